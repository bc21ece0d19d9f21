import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.tests.likelihood.judges import nll_by_hand, save_judge

from remask.cli import main
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.likelihood.perplexity import Judge, Policy, bootstrap, cut_prompts, measure, read_texts
from remask_lab.records.record import read_record
from tests.depth.models import with_ascii_tokenizer
from tests.goldens import uniform as goldens

TEXTS = ["the quick brown fox jumps", "", "short", "over the lazy dog and on", "and a third one, long enough"]
SAMPLING = {"max_tokens": 8, "block_length": 4, "steps_per_block": 2, "ignore_eos": True}
CACHES = ["--caches", "none,uniform-cache", "--cache-config", '{"uniform-cache": {"refresh_next": 0}}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_ascii_tokenizer(goldens.model_dir("unif"), tmp_path_factory.mktemp("model") / "unif")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judge(tmp_path_factory.mktemp("judge") / "gpt2")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", engine=EngineConfig(max_model_len=64))


def gen_ppl(folder: Path, judge: Path, texts: Path, *options: str) -> int:
    model = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--max-model-len", "64"]
    given = ["--judge", str(judge), "--prompts", str(texts), "--prompt-tokens", "12"]
    return main(["--quiet", "eval", "gen-ppl", *model, *given, *options])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_the_command(
    tmp_path: Path, folder: Path, judge: Path, texts: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "ppl.json"
    options = ["--requests", "3", "--sampling", json.dumps(SAMPLING), "--output", str(target), "--seed", "5", *CACHES]
    assert gen_ppl(folder, judge, texts, *options) == 0
    record = read_record(target, "eval gen-ppl")
    told = record.data
    assert [row["cache"] for row in told["rows"]] == ["none", "uniform-cache"]
    assert told["rows"][1]["settings"] == {"refresh_next": 0}
    assert record.about["settings"]["sampling"]["max_tokens"] == 8
    prompts = cut_prompts(llm, read_texts(texts), 12, 3)
    assert llm.tokenizer is not None
    assert [llm.tokenizer.decode(prompt) for prompt in prompts] == [TEXTS[i][:12] for i in (0, 3, 4)]
    for row, cache in zip(told["rows"], ("none", "uniform-cache"), strict=True):
        total = tokens = 0.0
        for number, (prompt, score) in enumerate(zip(prompts, row["scores"], strict=True)):
            settings = {"refresh_next": 0} if cache != "none" else {}
            params = SamplingParams.from_mapping({**SAMPLING, "seed": 5 + number})
            (output,) = llm.generate(prompt, params, cache=cache, cache_config=settings)
            assert score["text"] == output.text
            by_hand = nll_by_hand(judge, llm.tokenizer.decode(prompt), score["text"])
            assert score["nll"] == pytest.approx(by_hand, abs=1e-3)
            total, tokens = total + by_hand, tokens + score["tokens"]
        assert row["mean_nll"] == pytest.approx(total / tokens, abs=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-3)
        assert row["low"] <= row["perplexity"] <= row["high"]
    out = capsys.readouterr().out
    assert "3 responses" in out
    assert f"Saved as {target}" in out


def test_special_tokens_are_dropped(llm: LLM, judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    prompts = cut_prompts(llm, iter(TEXTS), 12, 2)
    params, found = SamplingParams.from_mapping(SAMPLING), Judge(str(judge))
    (plain,) = measure(llm, found, prompts, [Policy("none", {})], params)
    pad = llm.tokenizer.encode(plain.scores[0].text)[0]
    monkeypatch.setattr(llm.tokenizer, "special_ids", frozenset([pad]))
    (row,) = measure(llm, found, prompts, [Policy("none", {})], params)
    gone = llm.tokenizer.decode([pad])
    assert [score.text for score in row.scores] == [score.text.replace(gone, "") for score in plain.scores]
    assert row.scores[0].dropped == plain.scores[0].text.count(gone) > 0
    assert row.tokens < plain.tokens
    every = frozenset(range(llm.loaded.config.vocab))
    monkeypatch.setattr(llm.tokenizer, "special_ids", every)
    with pytest.raises(ConfigError, match="no response under 'none' has any text"):
        measure(llm, found, prompts, [Policy("none", {})], params)


def test_empty_responses_count_for_nothing(llm: LLM, judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    prompts = cut_prompts(llm, iter(TEXTS), 12, 2)
    params, found = SamplingParams.from_mapping(SAMPLING), Judge(str(judge))
    (plain,) = measure(llm, found, prompts, [Policy("none", {})], params)
    assert plain.empty == 0
    gone = set(plain.scores[0].text)
    monkeypatch.setattr(llm.tokenizer, "special_ids", frozenset(llm.tokenizer.encode(plain.scores[0].text)))
    (row,) = measure(llm, found, prompts, [Policy("none", {})], params)
    left = "".join(c for c in plain.scores[1].text if c not in gone)
    assert left
    nll, tokens = found.score(llm.tokenizer.decode(prompts[1]), left)
    assert (row.empty, row.tokens) == (1, tokens)
    assert row.perplexity == row.low == row.high == pytest.approx(math.exp(nll / tokens))


def test_the_interval_is_that_of_resampled_responses() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 150, 200)
    nll = tokens * rng.normal(2.0, 0.3, 200)
    low, high = bootstrap(nll.tolist(), tokens.tolist(), seed=1, resamples=4000)
    mean = nll.sum() / tokens.sum()
    # Delta method: the standard error of a ratio of sums.
    error = math.sqrt(((nll - mean * tokens) ** 2).sum()) / tokens.sum()
    assert math.log(low) == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert math.log(high) == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert bootstrap([3.0], [2], seed=0, resamples=10) == pytest.approx((math.exp(1.5),) * 2)


def test_texts_of_files(tmp_path: Path) -> None:
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text('{"text": "one\u2028line", "title": "x"}\r\n\n{"prompt": "two"}\n')
    plain.write_text(" = Heading = \r\n\none\u2028line\n")
    assert list(read_texts(lines)) == ["one\u2028line", "two"]
    assert list(read_texts(plain)) == [" = Heading = ", "one\u2028line"]
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_texts(tmp_path / "none"))


@pytest.mark.parametrize("line", ['{"text": 3}', '{"title": "a"}', '{"text": "a", "prompt": "b"}', "[1]", "{"])
def test_bad_lines_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + line)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2\b"):
        list(read_texts(path))


def test_too_few_long_texts(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"4 prompts of 12 tokens .* has 3 texts that long \(the longest has 28"):
        cut_prompts(llm, iter(TEXTS), 12, 4)


def test_an_end_token_at_the_end_is_no_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    stop = llm.loaded.config.stop_ids[0]
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: [*range(5, 5 + len(text)), stop])
    assert cut_prompts(llm, iter(["abcd", "abc"]), 3, 2) == [[5, 6, 7]] * 2
    with pytest.raises(ConfigError, match="has 1 texts that long"):
        cut_prompts(llm, iter(["abcd", "abc"]), 4, 2)


BAD: list[tuple[list[str], str]] = [
    (["--requests", "0"], "--requests must be a whole number from 1"),
    (["--prompt-tokens", "0"], "--prompt-tokens must be a whole number from 1"),
    (["--sampling", '{"seed": 3}'], "use --seed"),
    (["--cache-config", '{"bicache": {}}'], "which is not among --caches"),
    (["--cache-config", '{"none": 3}'], "must be an object of settings"),
    (["--output", "/nowhere/at/all.json"], "there is no folder"),
    (["--caches", "none,dkv-decode"], "not defined on uniform models"),
    (["--judge", "/nowhere/at/all"], "cannot be loaded"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options(
    folder: Path, judge: Path, texts: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    usual = ["--requests", "2", "--sampling", json.dumps(SAMPLING)]
    assert gen_ppl(folder, judge, texts, *usual, *options) == 2
    assert message in capsys.readouterr().err


def test_a_failed_request_is_told(llm: LLM, judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    prompts = cut_prompts(llm, iter(TEXTS), 12, 1)
    policy = type(llm.session.policy("none"))
    monkeypatch.setattr(policy, "plan", broken)
    with pytest.raises(RemaskError, match=r"request 0 failed: .*broken"):
        measure(llm, Judge(str(judge)), prompts, [Policy("none", {})], SamplingParams.from_mapping(SAMPLING))


@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize(("prompt", "response"), [("a town", " by the sea"), ("", "the sea"), ("häuser", "é")])
def test_scores_are_those_by_hand(tmp_path: Path, begin: bool, prompt: str, response: str) -> None:
    folder = save_judge(tmp_path / "judge", begin=begin)
    judge = Judge(str(folder), "float32")
    nll, tokens = judge.score(prompt, response)
    assert nll == pytest.approx(nll_by_hand(folder, prompt, response), abs=1e-3)
    unseen = not begin and not prompt  # nothing stands before the first token
    assert tokens == len(response.encode()) - unseen
    assert judge.dtype == "float32"


def test_long_responses_are_scored_in_parts(tmp_path: Path) -> None:
    folder = save_judge(tmp_path / "judge", positions=400)
    nll, tokens = Judge(str(folder)).score("", "sea " * 80)
    assert tokens == 320
    assert nll == pytest.approx(nll_by_hand(folder, "", "sea " * 80), rel=1e-4)


def test_an_empty_response_has_no_score(tmp_path: Path) -> None:
    assert Judge(str(save_judge(tmp_path / "judge"))).score("a", "") == (0.0, 0)


def test_what_a_judge_cannot_read(tmp_path: Path) -> None:
    folder = save_judge(tmp_path / "judge", positions=8)
    with pytest.raises(ConfigError, match=r"have 9 tokens of the judge .*, which reads 8; use shorter"):
        Judge(str(folder)).score("abcd", "efgh")

"""Models with several modes (Nemotron-Labs-Diffusion): recorded runs, and drafts that change no token."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from remask import LLM, EngineConfig, SamplingParams
from remask.cli import main
from remask.engine.request import Request
from remask.errors import CheckpointError, ConfigError
from remask.policies import Dense
from remask.policies.exact import Exact
from remask.readers.logprobs import Logprobs
from remask.request.result import Result
from remask.sampling.causal import CausalDecoding
from remask.sampling.decoder import Predictions
from tests.depth.models import with_ascii_tokenizer
from tests.engine.support import CheckedTransformer, Work, lively_adapters, lively_weights, poisoned_engine, run
from tests.engine.support import small_config as small
from tests.goldens import nemotron as goldens
from tests.oracles import nemotron

NAME = "nemotron-labs-diffusion"
DRAFTER = "linear_spec_lora"
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "ar"},
    {"mode": "diffusion", "threshold": 0.2},
    {"mode": "diffusion", "remasking": "bound", "threshold": 0.5, "block_length": 5},
    {"mode": "diffusion", "remasking": "sequential"},
    {"mode": "linear_speculation"},
    {"mode": "linear_speculation", "speculation": {"draft_window": 2, "max_draft_window": 16, "lora": False}},
)


@pytest.fixture(scope="module", params=goldens.MODELS)
def llm(request: pytest.FixtureRequest) -> tuple[LLM, list[dict[str, Any]]]:
    made = LLM(str(goldens.folder(request.param)), dtype="float32", engine=EngineConfig(max_num_seqs=12, page_size=4))
    return made, goldens.runs(request.param)


def places(trace: Any, prompt: int) -> list[list[int]]:
    """What each pass over a block transferred, within the block of 8; passes that give its first token left out."""
    found = [[(position - prompt) % 8 for position in transfer.positions] for transfer in trace]
    return [each for each in found if each != [0]]


@pytest.mark.thorough
def test_recorded_runs_together(llm: tuple[LLM, list[dict[str, Any]]]) -> None:
    """All modes in one batch, and again where the pages of their prompts are shared, whoever has computed them."""
    model, runs = llm
    asked = [goldens.sampling(run) for run in runs]
    for again in (False, True):
        outputs = model.generate([run["prompt"] for run in runs], asked, trace=True)
        for run_, output in zip(runs, outputs, strict=True):
            assert list(output.token_ids) == run_["tokens"]
            if run_["mode"] == "diffusion":
                assert places(output.trace, len(run_["prompt"])) == run_["trace"]
            if run_["mode"] == "linear_speculation":
                # The recording drafts even where one token is left.
                assert output.usage.forwards in (run_["nfe"], run_["nfe"] - 1)
            assert not again or output.usage.cached_tokens == len(run_["prompt"]) // 4 * 4


@pytest.mark.few(8)
@pytest.mark.parametrize("share", range(24))
def test_recorded_runs_alone(llm: tuple[LLM, list[dict[str, Any]]], share: int) -> None:
    model, runs = llm
    for run_ in runs[share::24]:
        for cache in ("exact", "none"):
            (output,) = model.generate([run_["prompt"]], goldens.sampling(run_), cache=cache)
            assert list(output.token_ids) == run_["tokens"]


def test_a_block_ends_with_its_end_token_and_heat_makes_no_block_surer() -> None:
    """Of runs that ended: the oracle's passes, fewer than for whole blocks. One token to draw, so heat changes none."""
    llm, fewer = LLM(str(goldens.folder("peaky")), dtype="float32"), 0
    model = nemotron.load(goldens.folder("peaky"))
    for run_ in goldens.runs("peaky"):
        if run_["mode"] != "diffusion" or len(run_["tokens"]) == run_["max_tokens"]:
            continue
        asked = goldens.sampling(run_)
        del asked["blocks"]
        expected = nemotron.decode(model, run_["prompt"], asked)
        heated = asked | {"temperature": 3.0, "top_k": 1, "seed": 1}
        for output in llm.generate([run_["prompt"]] * 2, [asked, heated], trace=True):
            assert list(output.token_ids) == expected.tokens == run_["tokens"]
            assert places(output.trace, len(run_["prompt"])) == expected.trace
        fewer += len(expected.trace) < len(run_["trace"])
    assert fewer


def model_of(seed: int, *, drafter: bool = True) -> CheckedTransformer:
    """A random model in float64 that prefers a few tokens, so that drafts come true."""
    config = replace(small(NAME), drafter=DRAFTER)
    weights = lively_weights(config, seed=seed)
    favourites = torch.randperm(config.vocab - 2, generator=torch.Generator().manual_seed(seed))[:4]
    weights.head[favourites] *= 3
    return CheckedTransformer(config, lively_adapters(weights, [DRAFTER], seed) if drafter else weights)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    shared = [rng.randrange(60) for _ in range(24)]
    return [
        shared[: rng.choice([0, 8, 24])] + [rng.randrange(60) for _ in range(rng.randint(1, 9))] for _ in range(count)
    ]


def answers(model: CheckedTransformer, asked: list[tuple[list[int], dict[str, Any]]], cache: Any) -> list[Result]:
    work = [
        Work(
            Request(str(number), prompt, SamplingParams.from_mapping(sampling), readers=(Logprobs(2),)),
            cache,
            number % 5,
        )
        for number, (prompt, sampling) in enumerate(asked)
    ]
    results = run(poisoned_engine(model, max_num_seqs=6), work)
    return [results[str(number)] for number in range(len(asked))]


def logprobs(result: Result) -> list[float]:
    return [each for transfer in result.trace for each in transfer.logprobs]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_drafts_change_no_token(seed: int) -> None:
    """50 random prompts of each of 20 random models: drawn tokens and end tokens too, and log-probabilities."""
    rng, model = random.Random(seed), model_of(seed)
    asked, drafted = [], []
    for number, prompt in enumerate(prompts(rng, 50)):
        usual: dict[str, Any] = {
            "max_tokens": rng.randint(1, 24),
            "seed": number,
            "temperature": rng.choice([0.0, 0.0, 0.8]),
        }
        usual |= {"top_k": rng.choice([None, 5]), "ignore_eos": rng.random() < 0.5}
        window = {
            "draft_window": rng.randint(1, 6),
            "max_draft_window": rng.randint(6, 12),
            "lora": rng.choice([None, False]),
        }
        asked.append((prompt, usual | {"mode": "ar"}))
        drafted.append((prompt, usual | {"mode": "linear_speculation", "speculation": window}))
    cache = Exact(prefill_chunk=7)
    plain, quick = answers(model, asked, cache), answers(model, drafted, cache)
    assert [each.token_ids for each in plain] == [each.token_ids for each in quick]
    assert [each.finish_reason for each in plain] == [each.finish_reason for each in quick]
    for one, other in zip(plain, quick, strict=True):
        assert logprobs(other)[: len(logprobs(one))] == pytest.approx(logprobs(one), abs=1e-4)
    assert sum(each.usage.steps for each in quick) < sum(each.usage.steps for each in plain)


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_batch_is_each_alone(seed: int) -> None:
    """Under memory full of NaN, with prompts in chunks, shared pages and requests that join while others run."""
    rng, model = random.Random(seed), model_of(seed)
    asked = [(prompt, rng.choice(MODES) | {"max_tokens": rng.randint(1, 20)}) for prompt in prompts(rng, 14)]
    together = answers(model, asked, Exact(prefill_chunk=rng.choice([3, 512])))
    for each, found in zip(asked, together, strict=True):
        (alone,), (uncached,) = answers(model, [each], Exact()), answers(model, [each], Dense())
        assert (found.token_ids, found.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert [t.positions for t in found.trace] == [t.positions for t in alone.trace]
        assert found.token_ids == uncached.token_ids


def test_any_common_left_part_is_shared_by_all_modes() -> None:
    """Pages of 4 tokens, blocks of 8: what one mode has written another reads."""
    model, prompt = model_of(1), list(range(3, 22))
    engine = poisoned_engine(model, store_budget_tokens=256)
    usual = {"max_tokens": 16, "ignore_eos": True}

    def asked(name: str, prompt: list[int]) -> Work:
        return Work(Request(name, prompt, SamplingParams.from_mapping(usual | {"mode": name.split()[0]})), Exact())

    longer = prompt + list(run(engine, [asked("diffusion first", prompt)])["diffusion first"].token_ids)
    # Of 19 + 16 tokens the rows of all but the last block are final; whoever reads them completes another page.
    for mode, cached in (("ar", 24), ("linear_speculation", 32), ("diffusion", 32)):
        found = run(engine, [asked(mode, [*longer[:-1], 1])])[mode]
        assert found.usage.cached_tokens == cached
        (alone,) = answers(model, [([*longer[:-1], 1], usual | {"mode": mode})], Dense())
        assert found.token_ids == alone.token_ids


def test_a_form_is_kept_in_each_mode_but_with_drafts(tmp_path: Path) -> None:
    llm = LLM(str(with_ascii_tokenizer(goldens.folder("plain"), tmp_path / "model")))
    for mode in ("ar", "diffusion"):
        (found,) = llm.generate(["a"], {"mode": mode, "max_tokens": 6}, structured_outputs={"regex": "(ab|cd){3}"})
        assert re.fullmatch("(ab|cd){3}", found.text or "")
    with pytest.raises(ConfigError, match="mode 'linear_speculation': what 'structured_outputs' reads"):
        llm.generate(["a"], {"mode": "linear_speculation", "max_tokens": 6}, structured_outputs={"regex": "(ab|cd){3}"})


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"mode": "ar", "threshold": 0.5}, "threshold is for mode 'diffusion', and this one is 'ar'"),
        ({"mode": "ar", "remasking": "bound"}, "remasking.rule is for mode 'diffusion'"),
        ({"mode": "ar", "remasking": {"fallback": "leftmost"}}, "remasking.fallback is for mode 'diffusion'"),
        ({"mode": "linear_speculation", "block_length": 4}, "block_length is for mode 'diffusion'"),
        (
            {"speculation": {"draft_window": 4}},
            "speculation.draft_window is for mode 'linear_speculation', and this one is 'diffusion'",
        ),
        ({"mode": "linear_speculation", "speculation": {"lora": True}}, "has no adapter for drafts"),
        (
            {"mode": "linear_speculation", "speculation": {"draft_window": 4, "max_draft_window": 2}},
            "speculation.draft_window=4 is above max_draft_window=2",
        ),
        ({"remasking": "sequential", "threshold": 0.5}, "remasking 'sequential' does not rank by"),
        ({"remasking": "joint_threshold"}, "edits tokens, and a block here is final"),
        ({"blocks": {"sub_block_length": 2}}, "blocks.sub_block_length has no meaning"),
        ({"mode": "backwards"}, "Unknown mode 'backwards'. Available: ar, diffusion"),
        ({"mode": "linear_speculation", "presence_penalty": 1.0}, "depends on the steps before; use mode 'ar'"),
    ],
)
def test_what_a_mode_has_no_use_for_is_refused(sampling: dict[str, Any], message: str) -> None:
    llm = LLM("nemotron-labs-diffusion-tiny", load_format="dummy")
    with pytest.raises(ConfigError, match=message):
        llm.generate([[3, 4]], sampling)


@pytest.mark.parametrize(
    ("given", "came_true", "windows"),
    [
        ({}, [1, 8, 16, 32], [8, 16, 32, 32]),
        ({"max_draft_window": 4}, [1, 4], [4, 4]),
        ({"draft_window": 3, "max_draft_window": 7}, [1, 3, 6, 7], [3, 6, 7, 7]),
        ({"draft_window": 40}, [1, 40], [40, 40]),
        ({"draft_window": 3}, [1, 3, 6, 7, 6, 3, 1], [3, 6, 12, 12, 6, 3, 3]),
    ],
)
def test_how_drafts_grow_and_shrink(given: dict[str, Any], came_true: list[int], windows: list[int]) -> None:
    """Twice as long where all came true, half as long where at most half did."""
    params = SamplingParams.from_mapping({"max_tokens": 200, "mode": "linear_speculation", "speculation": given})
    decoding = CausalDecoding.of([1], params, 8, 63, 0, None, None)
    canvas = decoding.canvas()
    decoder, found = decoding.decoder(canvas, "all"), list[int]()
    for count in came_true:
        canvas.settle(np.arange(decoder.block.start, decoder.block.start + count), decoder.step)
        decoder.advance()
        found.append(len(decoder.block))
        decoder.advance()
    assert found == windows


def test_the_last_step_of_a_block_fills_what_is_left() -> None:
    params = SamplingParams(max_tokens=8, steps_per_block=2, threshold=1.0)
    decoding = CausalDecoding.of([1], params, 8, 63, 0, None, None)
    canvas = decoding.canvas()
    decoder, counts = decoding.decoder(canvas, "all"), list[int]()
    while not decoder.finished:
        open_ = decoder.block.start + np.flatnonzero(canvas.noisy[decoder.block.start : decoder.block.stop])
        chosen = decoder.choose(Predictions(open_, open_, np.full(len(open_), 0.5, dtype=np.float32)))
        canvas.settle(chosen, decoder.step)
        decoder.advance()
        counts.append(len(chosen))
    assert counts == [1, 1, 6]


# Of a model's folder or a server, a request, and what stays of the former.
DEFAULTS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"threshold": 0.5, "block_length": 4}, {"mode": "ar"}, {}),
    ({"threshold": 0.5}, {}, {"threshold": 0.5}),
    ({"threshold": 0.5}, {"mode": "diffusion"}, {"threshold": 0.5}),
    ({"mode": "ar"}, {"mode": "diffusion", "threshold": 0.5}, {}),
    ({"mode": "ar", "threshold": 0.5}, {}, {"mode": "ar"}),
    ({"remasking": "bound", "steps_per_block": 2}, {"mode": "linear_speculation"}, {}),
    ({"speculation": {"draft_window": 4}}, {}, {}),
    ({"speculation": {"draft_window": 4}}, {"mode": "linear_speculation"}, {"speculation": {"draft_window": 4}}),
    ({"speculation": {"draft_window": 4}, "temperature": 0.5}, {"mode": "ar"}, {"temperature": 0.5}),
]


@pytest.mark.parametrize(("usual", "own", "left"), DEFAULTS, ids=repr)
def test_defaults_of_another_mode_give_way(usual: dict[str, Any], own: dict[str, Any], left: dict[str, Any]) -> None:
    llm = LLM("nemotron-labs-diffusion-tiny", load_format="dummy")
    asked: dict[str, Any] = {"max_tokens": 8, "seed": 1, **own}
    params = llm.session.params(asked, usual, prompt_tokens=2)
    assert params == llm.session.params({**left, **asked}, prompt_tokens=2)
    (answer,) = llm.generate([[3, 4]], params)
    assert answer.error is None


def test_options_of_a_command_give_way_to_the_mode_of_a_line(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"mode": "ar"}, {}, {"mode": "ar", "threshold": 0.5}]
    (tmp_path / "in").write_text("".join(json.dumps({"prompt_token_ids": [3, 4], **each}) + "\n" for each in lines))
    options = ["generate", "--model", "nemotron-labs-diffusion-tiny", "--load-format", "dummy"]
    files = ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main([*options, *files, "--sampling", '{"max_tokens": 8, "threshold": 0.5}']) == 1
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert ["error" in each for each in answers] == [False, False, True]
    assert "threshold is for mode 'diffusion', and this one is 'ar'" in answers[2]["error"]


def test_other_models_have_one_mode() -> None:
    llm = LLM("sdar-tiny", load_format="dummy")
    with pytest.raises(
        ConfigError, match=r"mode is for models that are decoded in several modes; leave it out on sdar"
    ):
        llm.generate([[3, 4]], {"mode": "ar"})


def test_tensors_that_nobody_reads_and_a_damaged_adapter(tmp_path: Path) -> None:
    """What files may hold beside the weights, without a head of their own; a folder of an adapter that is empty."""
    config = json.loads((goldens.ROOT / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = load_file(goldens.ROOT / "model.safetensors")
    del tensors["diffusion_head.weight"]
    for name in ("self_attn.k_scale", "self_attn.v_scale"):
        tensors[f"encoder.layers.0.{name}"] = torch.ones(1)
    tensors["encoder.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm, sampling = LLM(str(tmp_path), dtype="float32"), {"mode": "ar", "max_tokens": 8}
    expected = nemotron.decode(nemotron.load(tmp_path), [5, 6, 7], sampling).tokens
    assert list(llm.generate([[5, 6, 7]], sampling)[0].token_ids) == expected
    (tmp_path / DRAFTER).mkdir()
    with pytest.raises(ConfigError, match=rf"adapters: '{DRAFTER}' is the name of the adapter that the folder of"):
        LLM(str(tmp_path), adapters={DRAFTER: str(tmp_path)})
    with pytest.raises(CheckpointError, match="linear_spec_lora' cannot be used"):
        LLM(str(tmp_path))

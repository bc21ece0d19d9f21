"""Bad input through every door: Python, options, and lines of a file."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from remask import LLM, EngineConfig, SamplingParams
from remask.cli import main
from remask.errors import ConfigError
from tests.engine.kinds import RAW, checkpoint
from tests.goldens import model_dir

LIMIT = 48  # of a canvas, below what the models take
PROMPT = [5, 6, 7, 8]

# (model, line, what the error says). One of each place that refuses something; what each field and setting may be is
# held by the tests of `request`, `sampling` and `policies`.
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("gidd", {"sampling": {"uniform": {"canvas_length": 50}}}, "make a canvas of 50, but max_model_len is 48"),
    ("gidd", {"sampling": {"uniform": {"initial_canvas": [1] * 9 + [40]}}}, "40; token ids go from 0 to 39"),
    ("gidd", {"sampling": {"uniform": {"initial_canvas": [1, "a"]}}}, "initial_canvas[1] must be a whole number"),
    ("gidd", {"sampling": {"uniform": {"sampler": "adaptve"}}}, "Did you mean 'adaptive'"),
    ("gidd", {"sampling": {"uniform": {"correction_temperature": 0.5}}}, "set correction_steps to 1 or more"),
    (
        "gidd",
        {"sampling": {"uniform": {"correction_steps": 0, "correction_tokens": 2}}},
        "correction_tokens=2 is of correction steps",
    ),
    ("gidd", {"sampling": {"remasking": "low_confidence"}}, "remasking.rule is for masked and block-causal models"),
    ("gidd", {"cache": "exact"}, "not defined on uniform models (gidd); use none, block-prefix, uniform-cache"),
    ("gidd", {"cache": "uniform-cache", "cache_config": {"refresh_next": -1}}, "refresh_next must be a whole number"),
    ("sdar", {"sampling": {"block_length": 49}}, "whole blocks of block_length=49 make a canvas of 49, but max_model"),
    ("sdar", {"sampling": {"remasking": "random"}}, "'random' is not defined on block-causal models; use low"),
    ("sdar", {"sampling": {"steps": 8, "steps_per_block": 2}}, "say the same thing in two ways"),
    ("sdar", {"sampling": {"remasking": {"fallback": "leftmost"}}}, "set threshold, too"),
    ("sdar", {"cache": "uniform-cache"}, "not defined on block-causal models (sdar); use none, exact"),
    ("llada", {"cache": "exact"}, "not defined on masked models (llada); use none, reuse, bicache"),
    ("llada", {"sampling": {"steps": 20_000_000}}, "steps=20000000 is more than the"),
    ("llada", {"sampling": {"block_length": 2**62}}, "block_length must be a whole number from 1 to"),
    ("llada", {"sampling": {"remasking": "random", "threshold": 0.5}}, "threshold compares probabilities"),
    ("llada", {"cache": "bicache", "cache_config": {"depth": 7}}, "exceeds the model's 6 layers; use 0 to 6"),
    ("llada", {"cache": "block-dual", "cache_config": {"fill_pass": "seperate"}}, "Did you mean 'separate'?"),
    ("llada", {"cache": "bicache+reuse", "cache_config": {"depth": 1}}, "both own the shared prefix"),
    ("dream", {"cache": "dkv-greedy", "sampling": {"remasking": "random"}}, "(LLaDA), not Dream"),
]
MODELS = sorted({model for model, _, _ in CASES})


def folder(model: str) -> Path:
    return checkpoint(model).folder if model in RAW else model_dir(model)


@cache
def llm(model: str) -> LLM:
    return LLM(str(folder(model)), dtype="float32", engine=EngineConfig(max_model_len=LIMIT))


def good() -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "sampling": {"max_tokens": 8, "block_length": 4, "seed": 1, "ignore_eos": True}}


def full(line: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT} | line | {"sampling": {"max_tokens": 8} | line.get("sampling", {})}


def generate(tmp_path: Path, model: str, lines: list[dict[str, Any]], *options: str) -> Iterator[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--input", str(source), "--output", str(target), "--dtype", "float32", "--max-model-len", str(LIMIT)]
    status = main(["--quiet", "generate", "--model", str(folder(model)), *files, *options])
    answers = []
    if target.exists():
        answers = [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]
    assert status in (1, 2)
    yield from answers


@pytest.mark.parametrize(("model", "line", "message"), CASES, ids=lambda value: str(value)[:50])
def test_from_python(model: str, line: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        llm(model).generate(
            [PROMPT],
            SamplingParams.from_mapping({"max_tokens": 8} | line.get("sampling", {})),
            cache=line.get("cache", "none"),
            cache_config=line.get("cache_config"),
        )
    assert message in str(caught.value)
    assert not llm(model).engine.busy
    llm(model).engine.check_integrity()


@pytest.mark.parametrize("model", MODELS)
def test_a_line_of_a_file_fails_alone(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [(line, message) for name, line, message in CASES if name == model]
    lines = [good()]
    for line, _ in cases:
        lines += [full(line), good()]
    answers = list(generate(tmp_path, model, [{"id": str(i), **line} for i, line in enumerate(lines)]))
    assert len(answers) == len(lines)
    for (line, message), answer in zip(cases, answers[1::2], strict=True):
        assert message in answer["error"], line
    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers[2::2])
    assert all(len(answer["token_ids"]) == 8 for answer in answers[::2])
    assert capsys.readouterr().err.count(" line ") == len(cases)


@pytest.mark.parametrize("model", MODELS)
def test_as_options(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What holds for all lines of a call: the line is answered by the error, or the call ends before it reads one."""
    for line, message in [(full(line), message) for name, line, message in CASES if name == model]:
        options = ["--sampling", json.dumps(line["sampling"])]
        if "cache" in line:
            options += ["--cache", line["cache"]]
        if "cache_config" in line:
            options += ["--cache-config", json.dumps(line["cache_config"])]
        told = [answer["error"] for answer in generate(tmp_path, model, [{"prompt_token_ids": PROMPT}], *options)]
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        assert any(message in text for text in [*told, capsys.readouterr().err]), line


def test_a_page_holds_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "page_size=6 is not a multiple of the model's block of 4; use 8, or leave it"
    with pytest.raises(ConfigError, match=wanted):
        LLM(str(folder("sdar")), engine=EngineConfig(page_size=6))
    assert list(generate(tmp_path, "sdar", [good()], "--page-size", "6")) == []
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(("model", "size"), [("sdar", 16), ("sdar, blocks of 3", 18), ("sdar, any block", 16)])
def test_the_default_page_is_the_least_of_whole_blocks(model: str, size: int) -> None:
    assert llm(model).engine.allocator.page_size == size


def test_hybrid_noise_may_change_more_often_than_a_block_has_positions() -> None:
    params = SamplingParams(
        max_tokens=8, block_length=4, steps_per_block=9, uniform={"tokens_per_step": 4}, ignore_eos=True
    )
    (answer,) = llm("gidd, hybrid").generate([PROMPT], params)
    assert len(answer.token_ids) == 8
    assert answer.usage.steps == 18

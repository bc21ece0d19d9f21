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

# (model, line, what the error says)
CASES: list[tuple[str, dict[str, Any], str]] = [
    (
        "gidd, masks",
        {"sampling": {"block_length": 8, "steps_per_block": 5, "uniform": {"tokens_per_step": 2}}},
        "steps_per_block=5 times tokens_per_step=2 is more than the 8 masks of a block",
    ),
    (
        "gidd, masks",
        {"sampling": {"block_length": 8, "uniform": {"tokens_per_step": 9}}},
        "more than the 8 masks of a block",
    ),
    (
        "gidd",
        {"sampling": {"uniform": {"canvas_length": 11}}},
        "canvas_length=11 is shorter than the prompt of 4 tokens and max_tokens=8 together; use 12 or more",
    ),
    (
        "gidd",
        {"sampling": {"uniform": {"canvas_length": 50}}},
        "canvas_length make a canvas of 50, but max_model_len is 48",
    ),
    (
        "gidd",
        {"sampling": {"uniform": {"initial_canvas": [1, 2, 3]}}},
        "canvas_length=7 is shorter than the prompt of 4 tokens",
    ),
    (
        "gidd",
        {"sampling": {"uniform": {"initial_canvas": [1] * 9, "canvas_length": 20}}},
        "initial_canvas must hold the 16 tokens of the canvas after the prompt, got 9",
    ),
    (
        "gidd",
        {"sampling": {"uniform": {"initial_canvas": [1] * 9 + [40]}}},
        "initial_canvas holds 40; token ids go from 0 to 39",
    ),
    ("gidd", {"sampling": {"uniform": {"initial_canvas": [1, "a"]}}}, "initial_canvas[1] must be a whole number"),
    ("gidd", {"sampling": {"uniform": {"sampler": "adaptve"}}}, "Did you mean 'adaptive'"),
    ("gidd", {"sampling": {"uniform": {"schedule": "square"}}}, "Unknown uniform.schedule 'square'"),
    (
        "gidd",
        {"sampling": {"uniform": {"sampler": "ancestral", "tokens_per_step": 2}}},
        "tokens_per_step is the adaptive sampler's",
    ),
    ("gidd", {"sampling": {"uniform": {"correction_steps": -1}}}, "correction_steps must be a whole number from 0"),
    (
        "gidd",
        {"sampling": {"uniform": {"correction_steps": 2, "correction_tokens": 0}}},
        "correction_tokens must be a whole number from 1",
    ),
    ("gidd", {"sampling": {"uniform": {"correction_temperature": 0.5}}}, "set correction_steps to 1 or more"),
    (
        "gidd",
        {"sampling": {"uniform": {"correction_steps": 0, "correction_tokens": 2}}},
        "correction_tokens=2 is of correction steps",
    ),
    ("gidd, masks", {"sampling": {"uniform": {"correction_steps": 2}}}, "this model's noise is masks alone"),
    ("gidd", {"sampling": {"max_tokens": 60}}, "make a canvas of 64, but max_model_len is 48"),
    ("gidd", {"sampling": {"steps": 8}}, "steps is for masked models, and this one is uniform; leave it out"),
    ("gidd", {"sampling": {"threshold": 0.9}}, "threshold is for masked and block-causal models"),
    ("gidd", {"sampling": {"remasking": "low_confidence"}}, "remasking.rule is for masked and block-causal models"),
    ("gidd", {"sampling": {"cfg_scale": 1.5}}, "cfg_scale is for masked models"),
    ("gidd", {"cache": "exact"}, "not defined on uniform models (gidd); use none, block-prefix, uniform-cache"),
    ("gidd", {"cache": "bicache", "cache_config": {"depth": 1}}, "not defined on uniform models (gidd)"),
    ("gidd", {"cache": "block-dual"}, "not defined on uniform models (gidd)"),
    ("gidd", {"cache": "uniform-cache", "cache_config": {"refresh_next": -1}}, "refresh_next must be a whole number"),
    ("sdar", {"sampling": {"max_tokens": 48}}, "make a canvas of 52, but max_model_len is 48; shorten one of them"),
    ("sdar", {"sampling": {"block_length": 49}}, "whole blocks of block_length=49 make a canvas of 49, but max_model"),
    (
        "sdar",
        {"sampling": {"remasking": "random"}},
        "remasking 'random' is not defined on block-causal models; use low",
    ),
    (
        "sdar",
        {"sampling": {"uniform": {"tokens_per_step": 2}}},
        "tokens_per_step is for uniform models, and this one is block-causal",
    ),
    ("sdar", {"sampling": {"uniform": {"initial_canvas": [1]}}}, "initial_canvas is for uniform models"),
    (
        "sdar",
        {"sampling": {"uniform": {"correction_steps": 2}}},
        "correction_steps is for uniform models, and this one is block-causal",
    ),
    ("sdar", {"sampling": {"steps": 8}}, "steps is for masked models"),
    ("sdar", {"sampling": {"steps": 8, "steps_per_block": 2}}, "say the same thing in two ways"),
    ("sdar", {"sampling": {"remasking": {"fallback": "leftmost"}}}, "set threshold, too"),
    ("sdar", {"sampling": {"remasking": {"fallback": "rightmost"}}}, "Unknown remasking.fallback 'rightmost'"),
    ("sdar", {"sampling": {"remasking": {"eb_threshold": 0.3}}}, "eb_threshold is for remasking 'entropy_bounded'"),
    ("sdar", {"sampling": {"remasking": "sequential", "threshold": 0.3}}, "does not rank by"),
    ("sdar", {"cache": "uniform-cache"}, "not defined on block-causal models (sdar); use none, exact"),
    ("sdar", {"cache": "reuse"}, "not defined on block-causal models (sdar)"),
    ("sdar", {"cache": "dllm-cache"}, "not defined on block-causal models (sdar)"),
    (
        "sdar",
        {"cache": "exact", "cache_config": {"prefill_chunk": 0}},
        "prefill_chunk must be a whole number from 1 to",
    ),
    ("sdar, any block", {}, "block_length is not in the model's config.json: give the one that it was trained with"),
    ("llada", {"cache": "exact"}, "not defined on masked models (llada); use none, reuse, bicache"),
    ("llada", {"cache": "uniform-cache"}, "not defined on masked models (llada)"),
    (
        "llada",
        {"sampling": {"uniform": {"sampler": "adaptive"}}},
        "sampler is for uniform models, and this one is masked",
    ),
    (
        "llada",
        {"sampling": {"uniform": {"correction_steps": 2}}},
        "correction_steps is for uniform models, and this one is masked",
    ),
    ("llada", {"sampling": {"remasking": "entropy_bounded"}}, "'entropy_bounded' is not defined on masked models"),
]


def bad(
    spec: str, values: dict[str, Any], message: str, sampling: dict[str, Any] | None = None, model: str = "llada"
) -> tuple[str, dict[str, Any], str]:
    """A case of settings of a cache policy that cannot be."""
    return model, {"cache": spec, "cache_config": values, "sampling": sampling or {}}, message


RANDOM = {"remasking": "random"}
CASES += [
    *(bad("dllm-cache", {"ratio": ratio}, "ratio must be a number from 0 to 1, got") for ratio in (-0.1, 1.5, "0.5")),
    bad("dllm-cache", {"prompt_interval": 0}, "prompt_interval must be a whole number from 1 to 2**63 - 1, got 0"),
    bad(
        "dllm-cache", {"response_interval": -3}, "response_interval must be a whole number from 1 to 2**63 - 1, got -3"
    ),
    bad("dllm-cache", {"cfg_interval": 1.5}, "cfg_interval must be a whole number from 1 to 2**63 - 1, got 1.5"),
    bad("dllm-cache", {"select": "keys"}, "Unknown select 'keys'. Did you mean 'key'? Available: key, random, value"),
    bad(
        "bicache",
        {"depth": 1, "refresh_interval": 0},
        "refresh_interval must be a whole number from 1 to 2**63 - 1, or null",
    ),
    bad("dkv-decode", {"refresh_interval": 0}, "refresh_interval must be a whole number from 1 to 2**63 - 1, or null"),
    bad("dkv-pd", {"refresh_interval": True}, "refresh_interval must be a whole number from 1 to 2**63 - 1, or null"),
    bad(
        "dkv-greedy",
        {"refresh_interval": -1},
        "refresh_interval must be a whole number from 1 to 2**63 - 1, or null",
        RANDOM,
    ),
    bad("dkv-greedy", {"window": -1}, "window must be a whole number from 0 to 2**63 - 1, got -1", RANDOM),
    bad("dkv-greedy", {"window": 9}, "window=9 exceeds the response's 8 positions; use a window from 0 to 8", RANDOM),
    bad("bicache+dkv-greedy", {"depth": 1, "window": 11}, "window=11 exceeds the response's 8 positions", RANDOM),
    bad("dkv-greedy", {"centre": "last"}, "Unknown centre 'last'. Available: current, previous", RANDOM),
    bad("dkv-greedy", {"extent": "all"}, "Unknown extent 'all'. Available: interval, noisy", RANDOM),
    bad("dllm-cache", {"phase": "down"}, "use phase='up', or sampling with 'steps'", {"threshold": 0.9}),
    bad("dkv-greedy", {}, "use remasking 'random' or 'order'"),
    bad("dkv-greedy", {}, "use remasking 'random' or 'order'", {"remasking": "slowfast"}),
    bad("elastic-cache", {"window": 0}, "window must be a whole number from 1 to 2**63 - 1, got 0"),
    bad("elastic-cache", {"threshold": 1.5}, "threshold must be a number from 0 to 1, got 1.5"),
    bad("elastic-cache", {}, "window=16 exceeds the response's 8 positions; use a window from 1 to 8"),
    bad("elastic-cache", {"window": 4}, "use window=8, or a remasking other than 'random' and 'order'", RANDOM),
    bad("elastic-cache", {"gamma": 1}, "Unknown setting of cache policy 'elastic-cache' 'gamma'"),
    bad("bicache+elastic-cache", {"depth": 1}, "bicache cannot wrap elastic-cache"),
    bad("none", {}, "threshold compares probabilities", {"remasking": "slowfast", "threshold": 0.5}),
    bad("dkv-greedy", {}, "(LLaDA), not Dream", RANDOM, "dream"),
    bad("dkv-decode", {"shift": "un"}, "shift='un' is for models whose rows predict the next position (Dream)"),
    bad("dkv-pd", {"shift": "un_right"}, "shift='un_right' is for models whose rows predict the next position"),
    bad("dkv-decode", {"shift": "right"}, "shift='right' is for models whose rows predict the next position"),
    bad("dkv-decode", {"shift": "left"}, "Unknown shift 'left'", model="dream"),
    bad("block-dual", {"fill_pass": "separate"}, "use fill_pass='transfer'", model="dream"),
    bad("block-dual", {"fill_pass": "seperate"}, "Did you mean 'separate'?"),
    bad("bicache", {"depth": 7}, "depth=7 exceeds the model's 6 layers; use 0 to 6"),
    bad("bicache", {"depth": -1}, "depth must be a number of layers >= 0 or 'table', got -1"),
    bad("bicache", {"depth": 1, "boundary": "kept"}, "Unknown boundary 'kept'. Available: recomputed, stored"),
    bad("bicache+reuse", {"depth": 1}, "both own the shared prefix"),
    bad("bicache+bicache", {"depth": 1}, "name bicache once"),
    bad("dllm-cache+dkv-decode", {}, "'dllm-cache' cannot wrap another policy; only bicache, acache can"),
    bad("block-dual+bicache", {}, "'block-dual' cannot wrap another policy; only bicache, acache can"),
    bad("none", {"window": 2}, "cache policy 'none' takes no settings, got 'window'"),
    bad("dkv-decode", {"window": 2}, "Unknown setting of cache policy 'dkv-decode' 'window'"),
]
CASES += [
    ("llada", {"sampling": {name: value}}, f"{name} must be a number from 0 to 1000")
    for name, value in (("cfg_scale", 1e39), ("temperature", 1e300))
]
CASES += [
    ("llada", {"sampling": {name: value}}, f"{name} must be a whole number from 1 to")
    for name, value in (("steps", 2**62), ("steps_per_block", 2**40), ("block_length", 2**62))
]
CASES += [("llada", {"sampling": {"steps": 20_000_000}}, "steps=20000000 is more than the")]
MODELS = sorted({model for model, _, _ in CASES})


def folder(model: str) -> Path:
    return checkpoint(model).folder if model in RAW else model_dir(model)


@cache
def llm(model: str) -> LLM:
    return LLM(str(folder(model)), dtype="float32", engine=EngineConfig(max_model_len=LIMIT))


def good() -> dict[str, Any]:
    """A line that runs."""
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

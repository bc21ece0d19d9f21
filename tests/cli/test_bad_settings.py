"""Settings of cache policies that cannot be: the same error from Python, from options, and from a line of JSONL."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remask import LLM, SamplingParams
from remask.cli import main
from remask.errors import ConfigError
from tests.goldens import model_dir

PROMPT = [1, 2, 3]


class Case(NamedTuple):
    spec: str
    settings: dict[str, Any]
    text: str  # of the error: the field, and what is allowed
    sampling: dict[str, Any] = {}  # noqa: RUF012 - never changed
    model: str = "llada"


RANDOM = {"remasking": "random"}
CASES = [
    *(Case("dllm-cache", {"ratio": ratio}, "ratio must be a number from 0 to 1, got") for ratio in (-0.1, 1.5, "0.5")),
    Case("dllm-cache", {"prompt_interval": 0}, "prompt_interval must be a whole number from 1 to 2**63 - 1, got 0"),
    Case(
        "dllm-cache", {"response_interval": -3}, "response_interval must be a whole number from 1 to 2**63 - 1, got -3"
    ),
    Case("dllm-cache", {"cfg_interval": 1.5}, "cfg_interval must be a whole number from 1 to 2**63 - 1, got 1.5"),
    Case("dllm-cache", {"select": "keys"}, "Unknown select 'keys'. Did you mean 'key'? Available: key, random, value"),
    Case(
        "bicache",
        {"depth": 1, "refresh_interval": 0},
        "refresh_interval must be a whole number from 1 to 2**63 - 1, or null",
    ),
    Case("dkv-decode", {"refresh_interval": 0}, "refresh_interval must be a whole number from 1 to 2**63 - 1, or null"),
    Case("dkv-pd", {"refresh_interval": True}, "refresh_interval must be a whole number from 1 to 2**63 - 1, or null"),
    Case(
        "dkv-greedy",
        {"refresh_interval": -1},
        "refresh_interval must be a whole number from 1 to 2**63 - 1, or null",
        RANDOM,
    ),
    Case("dkv-greedy", {"window": -1}, "window must be a whole number from 0 to 2**63 - 1, got -1", RANDOM),
    Case("dkv-greedy", {"window": 9}, "window=9 exceeds the response's 8 positions; use a window from 0 to 8", RANDOM),
    Case("bicache+dkv-greedy", {"depth": 1, "window": 11}, "window=11 exceeds the response's 8 positions", RANDOM),
    Case("dkv-greedy", {"centre": "last"}, "Unknown centre 'last'. Available: current, previous", RANDOM),
    Case("dkv-greedy", {"extent": "all"}, "Unknown extent 'all'. Available: interval, noisy", RANDOM),
    Case("dllm-cache", {"phase": "down"}, "use phase='up', or sampling with 'steps'", {"threshold": 0.9}),
    Case("dkv-greedy", {}, "use remasking 'random' or 'order'"),
    Case("dkv-greedy", {}, "use remasking 'random' or 'order'", {"remasking": "slowfast"}),
    Case("elastic-cache", {"window": 0}, "window must be a whole number from 1 to 2**63 - 1, got 0"),
    Case("elastic-cache", {"threshold": 1.5}, "threshold must be a number from 0 to 1, got 1.5"),
    Case("elastic-cache", {}, "window=16 exceeds the response's 8 positions; use a window from 1 to 8"),
    Case("elastic-cache", {"window": 4}, "use window=8, or a remasking other than 'random' and 'order'", RANDOM),
    Case("elastic-cache", {"gamma": 1}, "Unknown setting of cache policy 'elastic-cache' 'gamma'"),
    Case("bicache+elastic-cache", {"depth": 1}, "bicache cannot wrap elastic-cache"),
    Case("none", {}, "threshold compares probabilities", {"remasking": "slowfast", "threshold": 0.5}),
    Case("dkv-greedy", {}, "(LLaDA), not Dream", RANDOM, "dream"),
    Case("dkv-decode", {"shift": "un"}, "shift='un' is for models whose rows predict the next position (Dream)"),
    Case("dkv-pd", {"shift": "un_right"}, "shift='un_right' is for models whose rows predict the next position"),
    Case("dkv-decode", {"shift": "right"}, "shift='right' is for models whose rows predict the next position"),
    Case("dkv-decode", {"shift": "left"}, "Unknown shift 'left'", model="dream"),
    Case("block-dual", {"fill_pass": "separate"}, "use fill_pass='transfer'", model="dream"),
    Case("block-dual", {"fill_pass": "seperate"}, "Did you mean 'separate'?"),
    Case("bicache", {"depth": 7}, "depth=7 exceeds the model's 6 layers; use 0 to 6"),
    Case("bicache", {"depth": -1}, "depth must be a number of layers >= 0 or 'table', got -1"),
    Case("bicache", {"depth": 1, "boundary": "kept"}, "Unknown boundary 'kept'. Available: recomputed, stored"),
    Case("bicache+reuse", {"depth": 1}, "both own the shared prefix"),
    Case("bicache+bicache", {"depth": 1}, "name bicache once"),
    Case("dllm-cache+dkv-decode", {}, "'dllm-cache' cannot wrap another policy; only bicache, acache can"),
    Case("block-dual+bicache", {}, "'block-dual' cannot wrap another policy; only bicache, acache can"),
    Case("none", {"window": 2}, "cache policy 'none' takes no settings, got 'window'"),
    Case("dkv-decode", {"window": 2}, "Unknown setting of cache policy 'dkv-decode' 'window'"),
]
EACH = pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{n}-{case.spec}-{json.dumps(case.settings)}") for n, case in enumerate(CASES)]
)


@cache
def llm(model: str) -> LLM:
    return LLM(str(model_dir(model)), dtype="float32")


def sampling_of(case: Case) -> dict[str, Any]:
    return {"max_tokens": 8, **case.sampling}


@EACH
def test_from_python(case: Case) -> None:
    params = SamplingParams.from_mapping(sampling_of(case))
    with pytest.raises(ConfigError) as caught:
        llm(case.model).generate(PROMPT, params, cache=case.spec, cache_config=case.settings)
    assert case.text in str(caught.value)
    assert not llm(case.model).engine.busy


def generate(tmp_path: Path, model: str, lines: list[dict[str, Any]], *options: str) -> int:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--input", str(source), "--output", str(target), "--dtype", "float32"]
    return main(["--quiet", "generate", "--model", str(model_dir(model)), *files, *options])


@EACH
def test_from_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: Case) -> None:
    """What no request could use ends the command; what this request cannot use is its line's error."""
    cache = ["--cache", case.spec, "--cache-config", json.dumps(case.settings)]
    options = [*cache, "--sampling", json.dumps(sampling_of(case))]
    assert generate(tmp_path, case.model, [{"prompt_token_ids": PROMPT}], *options) in (1, 2)
    assert case.text in capsys.readouterr().err


@pytest.mark.parametrize("model", ["llada", "dream"])
def test_from_lines(tmp_path: Path, model: str) -> None:
    """All cases in one file, and the good line among them is answered."""
    cases = [case for case in CASES if case.model == model]
    lines: list[dict[str, Any]] = [
        {
            "id": number,
            "prompt_token_ids": PROMPT,
            "prefix_length": 2,
            "cache": case.spec,
            "cache_config": case.settings,
            "sampling": sampling_of(case),
        }
        for number, case in enumerate(cases)
    ]
    good = {"id": "good", "prompt_token_ids": PROMPT, "sampling": {"max_tokens": 8}}
    assert generate(tmp_path, model, [*lines, good]) == 1
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    for case, answer in zip(cases, answers, strict=False):
        assert case.text in answer["error"], case
    assert answers[-1]["id"] == "good"
    assert "error" not in answers[-1]

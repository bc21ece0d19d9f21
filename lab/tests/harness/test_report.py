"""The table of tasks and caches, and what a failing request makes of a row."""

from typing import Any

import pytest

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.harness.report import table
from remask_lab.harness.run import generate, sampling_of

COSTS = {"seconds": 2.0, "throughput_tok_s": 12.5, "prefix_ratio": 0.875, "prefix_hits": 3}


def row(task: str, cache: str, metrics: dict[str, Any], tokens: list[list[int]] | None = None) -> dict[str, Any]:
    samples = [{"token_ids": ids} for ids in tokens or []]
    return {
        "task": task,
        "cache": cache,
        "result": {"metrics": metrics, "samples": samples, **(COSTS if tokens else {})},
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rows_of_all_sorts() -> None:
    half = {"value": 0.5, "interval": [0.25, 0.75]}
    strict = {"strict_match": half, "same_answer": {"value": 1.0, "interval": [0.5, 1.0]}}
    rows = [
        row("a", "none", strict, [[1, 2], [3, 4]]),
        row("a", "bicache", strict, [[1, 2], [3, 5]]),
        row("c", "none", {"acc,none": half, "perplexity,none": {"value": 12.345678, "interval": None}}),
        row("d", "none", {}),
    ]
    lines = [cells(line) for line in table(rows).splitlines()[2:]]
    percent = "50.0 % (25.0 to 75.0)"
    assert lines == [
        ["a", "none", percent, "100.0 % (50.0 to 100.0)", "100.0 %", "12.5", "0.875", "3"],
        ["a", "bicache", percent, "100.0 % (50.0 to 100.0)", "75.0 %", "12.5", "0.875", "3"],
        ["c", "none", f"acc,none {percent}; perplexity,none 12.35", "-", "-", "-", "-", "-"],
        ["d", "none", "-", "-", "-", "-", "-", "-"],
    ]


def test_seeds_count_from_the_first_request() -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    prompt = [5, 6, 7]
    drawn = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    both = generate(llm, [Request("", prompt, drawn)] * 2, llm.session.policy("none"), seed=4)
    first, second = (output.token_ids for output in both.outputs)
    assert first != second
    (alone,) = generate(llm, [Request("", prompt, drawn)], llm.session.policy("none"), seed=5).outputs
    assert alone.token_ids == second
    assert both.costs()["completion_tokens"] == 16


def test_a_request_that_cannot_run_stops_all_before_they_begin() -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    params = sampling_of(llm, {"max_tokens": 8}, 256)
    with pytest.raises(ConfigError, match="token ids"):
        generate(llm, [Request("", [5], params), Request("", [10**6], params)], llm.session.policy("none"), seed=0)
    assert not llm.engine.busy

"""Scores of responses, the same on local data and through lm-eval."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from remask_lab.harness.execute import run_tests
from remask_lab.harness.matching import judge
from remask_lab.records.interval import wilson

Scoring = Literal["strict", "code"]

METRICS = ("strict_match", "pass_at_1", "same_answer")  # each 0 or 1; a task's score is the first one that it has

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response.

    Attributes:
        metrics: 0 or 1 by name.
        answer: the final answer, or the code. None without one.
        failure: why the code fails its tests.
    """

    metrics: dict[str, float]
    answer: str | None
    failure: str | None = None


def score(scoring: Scoring, response: str, right: str, before: str = "", entry: str = "") -> Score:
    """Scores a response. With "code" its code is run against the tests `right`.

    `before` and `entry` are those of `Doc`. Raises `SandboxError` where generated code cannot be confined.
    """
    if scoring == "strict":
        verdict = judge(response, right)
        return Score({"strict_match": float(verdict.strict), "same_answer": float(verdict.same)}, verdict.answer)
    code = code_of(response)
    if code is None:
        return Score({"pass_at_1": 0.0}, None, "the response has no fenced block of code")
    failure = run_tests(f"{before}\n{code}\n" if entry else code, right, before, entry)
    return Score({"pass_at_1": float(failure is None)}, code, failure)


def shares(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every metric over `samples`, with Wilson's 95 % interval."""
    found = {}
    for name in METRICS:
        values = [sample[name] for sample in samples if name in sample]
        if values:
            right = int(sum(values))
            found[name] = {"value": right / len(values), "interval": list(wilson(right, len(values)))}
    return found


def code_of(response: str) -> str | None:
    """The first fenced block of Python, up to its end or the response's end. None without one."""
    found = _BLOCK.search(response)
    return None if found is None else found[1]

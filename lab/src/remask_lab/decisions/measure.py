"""Measurements of decisions: accuracy, calibration of their probabilities, and speed."""

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from remask.llm import LLM
from remask_lab.decisions.questions import KnownQuestion, draw
from remask_lab.records.interval import estimate, verdict_texts

BINS: Final = 10
"""Bins of probabilities, of equal width (Guo et al., On Calibration of Modern Neural Networks, arXiv 1706.04599)."""
RESAMPLES: Final = 1000
TIMED: Final = 60
"""The number of questions about one page that are timed."""
FORMS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "yes_no": {"default": {}, "Yes, No": {"labels": ["Yes", "No"]}, "yes, no": {"labels": ["yes", "no"]}},
    "choice": {"default": {}, "letters": {"labels": "letters"}},
}
"""The forms of questions that are compared on the first half: fields that replace or extend a question's, by type."""


def halves(items: Sequence[KnownQuestion]) -> dict[str, list[KnownQuestion]]:
    """The questions of either half of the states, each half pages and messages."""
    first = [item for item in items if item.state_number // 2 % 2 == 0]
    return {"first": first, "second": [item for item in items if item.state_number // 2 % 2]}


def measure(llm: LLM, items: Sequence[KnownQuestion], fields: Mapping[str, Any], *, calibrate: bool) -> dict[str, Any]:
    """Accuracy, calibration error, log loss in nats and label mass of questions written with `fields`.

    Neighbouring questions about one state are decided in one body. Accuracy and calibration error have a 95 % interval
    over states. The probability of an answer counts as 1e-9 at least in the log loss.
    """
    probabilities, right, losses, label_masses = [list[float]() for _ in range(4)]
    for _, group in groupby(items, key=lambda item: item.state_number):
        body = list(group)
        questions = {str(number): {**item.question, **fields} for number, item in enumerate(body)}
        decisions = llm.decide(body[0].state, questions, calibrate=calibrate).answers.values()
        for item, decision in zip(body, decisions, strict=True):
            probabilities.append(max(decision.distribution))
            right.append(float(decision.choice == item.answer))
            losses.append(-math.log(max(decision.probabilities[item.answer], 1e-9)))
            label_masses.append(decision.label_mass)
    states = [item.state_number for item in items]
    verdicts = [value > 0 for value in right]
    return {
        "questions": len(items),
        "accuracy": estimate(verdicts, states),
        "chance": sum(1 / len(item.question.get("criteria") or (0, 1)) for item in items) / len(items),
        "calibration_error": [
            calibration_error(probabilities, right),
            *calibration_interval(probabilities, right, states),
        ],
        "log_loss": sum(losses) / len(losses),
        "label_mass": sum(label_masses) / len(label_masses),
        "verdicts": verdict_texts(verdicts, states),
    }


def calibration_error(probabilities: Sequence[float], right: Sequence[float]) -> float:
    """The expected calibration error over `BINS` bins of probabilities.

    It is the mean over questions of the distance between a bin's mean probability and its share of right answers.
    `probabilities` are those of the given answers, and `right` is 1 for right ones and 0 for others.
    """
    total = 0.0
    for number in range(BINS):
        indices = [i for i, value in enumerate(probabilities) if min(int(value * BINS), BINS - 1) == number]
        total += abs(sum(probabilities[i] - right[i] for i in indices))
    return total / len(probabilities)


def calibration_interval(
    probabilities: Sequence[float], right: Sequence[float], states: Iterable[int]
) -> tuple[float, float]:
    """The 95 % interval of the calibration error: its percentiles over `RESAMPLES` resamples of the states.

    The error is biased upwards in few questions, and more so in resamples, so the interval may lie above a small error.
    """
    by_state: dict[int, list[int]] = {}
    for index, state in enumerate(states):
        by_state.setdefault(state, []).append(index)
    rng, errors = random.Random(0), []
    for _ in range(RESAMPLES):
        indices = [index for state in rng.choices([*by_state], k=len(by_state)) for index in by_state[state]]
        errors.append(calibration_error([probabilities[i] for i in indices], [right[i] for i in indices]))
    errors.sort()
    return errors[RESAMPLES // 40], errors[-RESAMPLES // 40]


def speed(llm: LLM, kind: str, seed: int) -> dict[str, float]:
    """Questions of one type about one page, decided in a second: `alone`, a body each, and `together`, in one body."""
    items = [item for item in draw(2 * TIMED, seed, per_state=TIMED) if item.question["type"] == kind]
    state = items[0].state
    questions = {str(number): item.question for number, item in enumerate(items)}
    llm.decide(state, {"0": questions["0"]})  # what the first pass compiles and allocates is not timed
    start = time.perf_counter()
    for name, question in questions.items():
        llm.decide(state, {name: question})
    middle = time.perf_counter()
    llm.decide(state, questions)
    end = time.perf_counter()
    return {"alone": len(items) / (middle - start), "together": len(items) / (end - middle)}

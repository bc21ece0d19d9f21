"""How often decisions are right, how well their probabilities are calibrated, and how many are read in a second."""

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
"""Of equal width, as in Guo et al., On Calibration of Modern Neural Networks (arXiv 1706.04599)."""
RESAMPLES: Final = 1000
TIMED: Final = 60
"""Questions about one page that are timed."""
FORMS: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "yes_no": {"default": {}, "Yes, No": {"labels": ["Yes", "No"]}, "yes, no": {"labels": ["yes", "no"]}},
    "choice": {"default": {}, "letters": {"labels": "letters"}},
}
"""The ways to write a question that are compared on the first half: fields beside its own."""


def halves(items: Sequence[KnownQuestion]) -> dict[str, list[KnownQuestion]]:
    """Questions by halves of the states: on the first a prompt is chosen, and the second is reported."""
    first = [each for each in items if each.about // 2 % 2 == 0]
    return {"first": first, "second": [each for each in items if each.about // 2 % 2]}


def measure(llm: LLM, items: Sequence[KnownQuestion], fields: Mapping[str, Any], *, calibrate: bool) -> dict[str, Any]:
    """Accuracy, calibration and label mass of questions, those of a state in one body; each with its 95 % interval."""
    sure, right, lost, mass = [list[float]() for _ in range(4)]
    for _, group in groupby(items, key=lambda each: each.about):
        body = list(group)
        questions = {str(number): {**each.question, **fields} for number, each in enumerate(body)}
        found = llm.decide(body[0].state, questions, calibrate=calibrate)
        for each, decision in zip(body, found.answers.values(), strict=True):
            sure.append(max(decision.distribution))
            right.append(float(decision.choice == each.answer))
            lost.append(-math.log(max(decision.probabilities[each.answer], 1e-9)))
            mass.append(decision.label_mass)
    states = [each.about for each in items]
    verdicts = [value > 0 for value in right]
    return {
        "questions": len(items),
        "accuracy": estimate(verdicts, states),
        "chance": sum(1 / len(each.question.get("criteria") or (0, 1)) for each in items) / len(items),
        "calibration_error": [calibration_error(sure, right), *resampled(sure, right, states)],
        "log_loss": sum(lost) / len(lost),
        "label_mass": sum(mass) / len(mass),
        "verdicts": verdict_texts(verdicts, states),
    }


def calibration_error(sure: Sequence[float], right: Sequence[float]) -> float:
    """The expected calibration error: by how much probability and share of right answers differ in a bin, on average.

    `sure` are the probabilities of what was answered, and `right` is 1 where that is the truth.
    """
    total = 0.0
    for number in range(BINS):
        places = [place for place, share in enumerate(sure) if min(int(share * BINS), BINS - 1) == number]
        total += abs(sum(sure[place] - right[place] for place in places))
    return total / len(sure)


def resampled(sure: Sequence[float], right: Sequence[float], states: Iterable[int]) -> tuple[float, float]:
    """The middle 95 % of the calibration error over states drawn with replacement.

    The error is biased upwards in few questions, and in resamples more so: of small errors the interval may lie above.
    """
    places: dict[int, list[int]] = {}
    for place, state in enumerate(states):
        places.setdefault(state, []).append(place)
    rng, errors = random.Random(0), []
    for _ in range(RESAMPLES):
        drawn = [place for state in rng.choices([*places], k=len(places)) for place in places[state]]
        errors.append(calibration_error([sure[place] for place in drawn], [right[place] for place in drawn]))
    errors.sort()
    return errors[RESAMPLES // 40], errors[-RESAMPLES // 40]


def speed(llm: LLM, kind: str, seed: int) -> dict[str, float]:
    """Questions a second about one page: each in a body of its own, and all in one."""
    items = [each for each in draw(2 * TIMED, seed, apiece=TIMED) if each.question["type"] == kind]
    questions = {str(number): each.question for number, each in enumerate(items)}
    llm.decide(items[0].state, {"0": questions["0"]})  # makes what a first pass makes
    began = time.perf_counter()
    for name, question in questions.items():
        llm.decide(items[0].state, {name: question})
    alone = time.perf_counter()
    llm.decide(items[0].state, questions)
    done = time.perf_counter()
    return {"alone": len(items) / (alone - began), "together": len(items) / (done - alone)}

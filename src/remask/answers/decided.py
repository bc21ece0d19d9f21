"""Decisions: the probabilities of a question's alternatives, and their forms in two APIs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remask.request.questions import Decisions, Question, Value


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question.

    Attributes:
        distribution: the probability of each alternative, in their order; they sum to 1.
        label_mass: the probability of all labels together, before calibration.
        label_texts: the label of each alternative, which the model would have written.
    """

    question: Question
    distribution: tuple[float, ...]
    label_mass: float
    label_texts: tuple[str, ...]

    @classmethod
    def of(
        cls, question: Question, logprobs: Sequence[float], labels: Sequence[str], base_logprobs: Sequence[float] | None
    ) -> "Decision":
        """Return the decision for the log-probabilities of the labels.

        `base_logprobs`, those without the state, calibrate it unless they are None (arXiv 2102.09690).
        """
        raw = np.asarray(logprobs, dtype=np.float64)
        calibrated = raw
        if base_logprobs is not None:
            calibrated = raw - _log_softmax(np.asarray(base_logprobs, dtype=np.float64))
        distribution = np.exp(_log_softmax(calibrated))
        return cls(question, tuple(distribution.tolist()), min(1.0, math.exp(_log_sum_exp(raw))), tuple(labels))

    @property
    def type(self) -> str:
        """The type of the question."""
        return self.question.type

    @property
    def names(self) -> tuple[Value, ...]:
        """The values of the alternatives: names of a choice, "yes" and "no", numbers, or levels counted from "0"."""
        return tuple(alternative.value for alternative in self.question.alternatives)

    @property
    def probabilities(self) -> dict[Value, float]:
        """The probability of each alternative, by its value."""
        return dict(zip(self.names, self.distribution, strict=True))

    @property
    def labels(self) -> dict[Value, str]:
        """The label of each alternative, by its value."""
        return dict(zip(self.names, self.label_texts, strict=True))

    @property
    def choice(self) -> Value:
        """The value of the most probable alternative."""
        return self.names[int(np.argmax(self.distribution))]

    @property
    def value(self) -> float | None:
        """The probability of yes, the most probable number or the expected level of a score. None for a choice."""
        if self.question.kind == "yes_no":
            return self.distribution[0]
        if self.question.kind == "number":
            return int(self.choice)
        return self._mean if self.question.kind == "score" else None

    @property
    def mean(self) -> float | None:
        """The expected number. None for other questions."""
        return self._mean if self.question.kind == "number" else None

    @property
    def entropy(self) -> float:
        """The entropy of the probabilities, in nats."""
        return -sum(p * math.log(max(p, 1e-300)) for p in self.distribution)

    @property
    def confidence(self) -> float:
        """The confidence as System One defines it, from 0 (all alternatives equally probable) to 1 (one is certain).

        A score's confidence is 1 - spread / even_spread, at least 0: the spread is the expected distance from the most
        probable level, and the even spread the mean distance of all levels from their middle. Other questions have
        (p - 1/n) / (1 - 1/n), with p the highest of n probabilities.
        """
        count = len(self.distribution)
        best = int(np.argmax(self.distribution))
        if self.question.kind != "score":
            return max(0.0, (self.distribution[best] - 1 / count) / (1 - 1 / count))
        levels = np.arange(count)
        spread = float(np.abs(levels - best) @ np.asarray(self.distribution))
        even_spread = float(np.abs(levels - (count - 1) / 2).mean())
        return max(0.0, 1 - spread / even_spread)

    @property
    def system_one(self) -> dict[str, Any]:
        """The answer in System One's form, with fields of our own under `x_`."""
        kind = self.question.kind
        if kind == "yes_no":
            return {"type": self.type, "noul": self.value, **self._extensions}
        answer: dict[str, Any] = {"type": self.type, kind: self.choice if kind == "choice" else self.value}
        if kind == "score":
            levels = self.question.criteria or [alternative.text for alternative in self.question.alternatives]
            answer["legend"] = dict(zip(self.names, levels, strict=True))
        if self.mean is not None:
            answer["mean"] = self.mean
        return {**answer, "probabilities": self.probabilities, "confidence": self.confidence, **self._extensions}

    @property
    def openai(self) -> dict[str, Any]:
        """The answer in OpenAI's form, with fields of our own under `x_`."""
        kind = self.question.kind
        answer: dict[str, Any] = {"type": self.type, "name": self.question.name}
        if kind == "yes_no":
            return {**answer, "probability": self.value, **self._extensions}
        answer[kind] = self.choice if kind == "choice" else self.value
        if self.mean is not None:
            answer["mean"] = self.mean
        probabilities: list[dict[str, Any]] = []
        for alternative, probability in zip(self.question.alternatives, self.distribution, strict=True):
            label = {"label": alternative.text} if kind == "score" else {}
            value = alternative.value if kind == "choice" else int(alternative.value)
            probabilities.append({"value": value, **label, "probability": probability})
        return {**answer, "confidence": self.confidence, "probabilities": probabilities, **self._extensions}

    @property
    def _mean(self) -> float:
        return float(np.asarray(self.distribution) @ np.asarray([int(str(name)) for name in self.names]))

    @property
    def _extensions(self) -> dict[str, Any]:
        """Fields that the APIs do not have."""
        return {"x_label_mass": self.label_mass, "x_entropy": self.entropy, "x_labels": list(self.label_texts)}


def api_answers(
    decisions: Decisions, answers: Mapping[str, Decision]
) -> dict[str, dict[str, Any]] | list[dict[str, Any]]:
    """`answers`, by the ids of their questions, in the form of the API that `decisions` came by.

    System One's form is an object by id. OpenAI's is a list, with a refusal for each question that has no answer.
    """
    if decisions.input is None:
        return {name: answer.system_one for name, answer in answers.items()}
    return [
        answers[name].openai if name in answers else {"type": "refusal", "name": question.name}
        for name, question in decisions.questions.items()
    ]


def _log_sum_exp(values: NDArray[np.float64]) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values - _log_sum_exp(values)

"""What was decided: the probabilities of a question's alternatives, and the forms in which two APIs tell them."""

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
        shares: the probability of each alternative, in their order; they sum to 1.
        label_mass: the probability that the model gives to the labels at all, before calibration.
        written: what the model would have written for each alternative.
    """

    question: Question
    shares: tuple[float, ...]
    label_mass: float
    written: tuple[str, ...]

    @classmethod
    def of(
        cls, question: Question, logprobs: Sequence[float], labels: Sequence[str], base: Sequence[float] | None
    ) -> "Decision":
        """The decision for the log-probabilities of the labels, calibrated by those without the state, the `base`."""
        raw = np.asarray(logprobs, dtype=np.float64)
        shares = _softmax(raw if base is None else raw - _softmax(np.asarray(base, dtype=np.float64), log=True))
        return cls(question, tuple(shares.tolist()), min(1.0, math.exp(_total(raw))), tuple(labels))

    @property
    def type(self) -> str:
        """The question's."""
        return self.question.type

    @property
    def names(self) -> tuple[Value, ...]:
        """The alternatives: names of a choice, "yes" and "no", numbers, and levels counted from "0"."""
        return tuple(alternative.value for alternative in self.question.alternatives)

    @property
    def probabilities(self) -> dict[Value, float]:
        """Of each alternative."""
        return dict(zip(self.names, self.shares, strict=True))

    @property
    def labels(self) -> dict[Value, str]:
        """What the model would have written for each alternative."""
        return dict(zip(self.names, self.written, strict=True))

    @property
    def choice(self) -> Value:
        """The most probable alternative."""
        return self.names[int(np.argmax(self.shares))]

    @property
    def value(self) -> float | None:
        """Of yes or no the probability of yes, of a number the most probable one, of a score the expected level."""
        if self.question.kind == "yes_no":
            return self.shares[0]
        if self.question.kind == "number":
            return int(self.choice)
        return self._mean if self.question.kind == "score" else None

    @property
    def mean(self) -> float | None:
        """The expected number."""
        return self._mean if self.question.kind == "number" else None

    @property
    def entropy(self) -> float:
        """Of the probabilities, in nats."""
        return -sum(share * math.log(max(share, 1e-300)) for share in self.shares)

    @property
    def confidence(self) -> float:
        """From 0, where all alternatives are as probable, to 1, where one is certain, as System One defines it.

        Of a score: 1 less the expected distance from its most probable level, in that of equal probabilities from the
        middle, and no less than 0. Of others: by how much the most probable one exceeds an equal share.
        """
        count, best = len(self.shares), int(np.argmax(self.shares))
        if self.question.kind != "score":
            return max(0.0, (self.shares[best] - 1 / count) / (1 - 1 / count))
        places = np.arange(count)
        spread = float(np.abs(places - best) @ np.asarray(self.shares))
        return max(0.0, 1 - spread / float(np.abs(places - (count - 1) / 2).mean()))

    @property
    def system_one(self) -> dict[str, Any]:
        """The answer in System One's form, with fields of our own under `x_`."""
        kind, levels = self.question.kind, self.question.criteria
        if kind == "yes_no":
            return {"type": self.type, "noul": self.value, **self._more}
        answer: dict[str, Any] = {"type": self.type, kind: self.choice if kind == "choice" else self.value}
        if kind == "score":
            answer["legend"] = dict(zip(self.names, levels, strict=True))
        if self.mean is not None:
            answer["mean"] = self.mean
        return {**answer, "probabilities": self.probabilities, "confidence": self.confidence, **self._more}

    @property
    def openai(self) -> dict[str, Any]:
        """The answer in OpenAI's form, with fields of our own under `x_`."""
        kind = self.question.kind
        answer: dict[str, Any] = {"type": self.type, "name": self.question.name}
        if kind == "yes_no":
            return {**answer, "probability": self.value, **self._more}
        answer[kind] = self.choice if kind == "choice" else self.value
        if self.mean is not None:
            answer["mean"] = self.mean
        shares: list[dict[str, Any]] = []
        for alternative, share in zip(self.question.alternatives, self.shares, strict=True):
            label = {"label": alternative.text} if kind == "score" else {}
            value = alternative.value if kind == "choice" else int(alternative.value)
            shares.append({"value": value, **label, "probability": share})
        return {**answer, "confidence": self.confidence, "probabilities": shares, **self._more}

    @property
    def _mean(self) -> float:
        return float(np.asarray(self.shares) @ np.asarray([int(str(name)) for name in self.names]))

    @property
    def _more(self) -> dict[str, Any]:
        return {"x_label_mass": self.label_mass, "x_entropy": self.entropy, "x_labels": list(self.written)}


def told(decisions: Decisions, answers: Mapping[str, Decision]) -> dict[str, dict[str, Any]] | list[dict[str, Any]]:
    """Answers by the ids of their questions, in the form of the API that asked.

    System One's are an object by id, and OpenAI's a list with refusals where there is no answer.
    """
    if decisions.input is None:
        return {name: answer.system_one for name, answer in answers.items()}
    return [
        answers[name].openai if name in answers else {"type": "refusal", "name": question.name}
        for name, question in decisions.questions.items()
    ]


def _total(logs: NDArray[np.float64]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def _softmax(logs: NDArray[np.float64], *, log: bool = False) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = logs - _total(logs)
    return shares if log else np.exp(shares)

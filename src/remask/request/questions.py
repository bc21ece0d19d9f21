"""Decisions: questions over one state, each answered by the model's distribution over a few labels.

What a request says of them is declared here, and nowhere else, and so is the form of what is answered.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.checks.fields import check, declare, parse
from remask.checks.values import Choice, Flag, ListOf, Settings, Text, Values, Whole, shown, weight
from remask.errors import ConfigError

QuestionKind: TypeAlias = Literal["choice", "yes_no", "number", "score"]

MAX_QUESTIONS = 8192
MAX_ALTERNATIVES = 1000
"""Of one question."""
MAX_STATE_VALUES = 2**18
"""Of one state, those within others included."""
MAX_LABEL_TOKENS = 4
ANSWER = "{answer}"
"""Marks the place of the label in a question's `template`."""
MASK = "{mask}"
"""Marks a mask in it that is not read."""

_TEXT = 2**20
_BESIDE = 32  # characters that a chat template writes around an answer
_NUMBERS = Whole(-(10**9), 10**9)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_YES_NO = (("yes", "no"), ("Yes", "No"), ("true", "false"), ("Y", "N"), ("1", "0"))
_YES, _NO = _YES_NO[0]


@dataclass(frozen=True, slots=True)
class Alternatives(Values):
    """Lists of names, or objects that give each name a text or null."""

    @property
    def words(self) -> str:
        return f"a list of at most {MAX_ALTERNATIVES} texts, or an object of texts and nulls by name"

    def fits(self, value: object) -> bool:
        texts = Text(_TEXT)
        if isinstance(value, Mapping):
            names, notes = list(value), [note for note in value.values() if note is not None]
        elif isinstance(value, list | tuple):
            names, notes = list(value), []
        else:
            return False
        return len(names) <= MAX_ALTERNATIVES and all(map(texts.fits, [*names, *notes]))

    def schema(self) -> dict[str, Any]:
        array = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_ALTERNATIVES}
        note = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        named = {"type": "object", "additionalProperties": note, "maxProperties": MAX_ALTERNATIVES}
        return {"anyOf": [array, named]}


@dataclass(frozen=True, slots=True)
class JsonState(Values):
    """Texts, objects and lists."""

    @property
    def words(self) -> str:
        return f"a text, or an object or a list of at most {MAX_STATE_VALUES} values altogether"

    def fits(self, value: object) -> bool:
        if isinstance(value, Mapping | list | tuple):
            return weight(value, MAX_STATE_VALUES) <= MAX_STATE_VALUES
        return Text(2**26, empty=True).fits(value)

    def schema(self) -> dict[str, Any]:
        held = {"type": "object", "maxProperties": MAX_STATE_VALUES}, {"type": "array", "maxItems": MAX_STATE_VALUES}
        return {"anyOf": [Text(2**26, empty=True).schema(), *held]}


@dataclass(frozen=True)
class Question:
    """One question. Raises `ConfigError` when made, naming the field, the value and what is allowed."""

    type: str = declare(
        "choice",
        Choice(("choice", "yes_no", "noul", "number", "score")),
        "What is decided: one of some names, yes or no (`noul` is another name of it), a whole number in a range, or a "
        "level of an ordered scale.",
    )
    instructions: str = declare("", Text(_TEXT, empty=True), "The question, as the model reads it.")
    criteria: Any = declare(
        None,
        Alternatives(),
        "`choice`: the names, or an object that says what each means. `score`: the levels, the lowest first. `yes_no`: "
        "optionally what `yes` (or `true`) and `no` (or `false`) mean.",
    )
    min: int | None = declare(None, _NUMBERS, "`number`: the least one.")
    max: int | None = declare(None, _NUMBERS, "`number`: the largest one.")
    step: int = declare(1, Whole(1, 10**9), "`number`: how far apart they are.")
    labels: Any = declare(
        "auto",
        ListOf(Text(256), "texts", MAX_ALTERNATIVES, single=True),
        'What the model would write for each alternative: "auto", "letters", "names", or a list of texts in order.',
    )
    template: str = declare(
        ANSWER,
        Text(_TEXT),
        f"The answer's text. `{ANSWER}` is the place of the label, once; each `{MASK}` is a mask that is not read.",
    )
    show_options: bool = declare(
        True,
        Flag(),
        "Whether the alternatives and their labels stand below the question; without them it stands alone.",
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.instructions.strip():
            raise ConfigError("instructions is empty; say what is asked")
        if self.template.count(ANSWER) != 1:
            raise ConfigError(f"template must hold {ANSWER} once, got {shown(self.template)}")
        if isinstance(self.labels, str) and self.labels not in ("auto", "letters", "names"):
            raise ConfigError(f'labels must be "auto", "letters", "names" or a list of texts, got {shown(self.labels)}')
        bounds = self.min is not None or self.max is not None or self.step != 1
        if bounds != (self.kind == "number"):
            raise ConfigError("min, max and step are those of a number, which needs min and max")
        if self.kind == "number":
            self._check_numbers()
        elif self.kind != "yes_no" and (self.criteria is None or len(self.criteria) < 2):
            raise ConfigError(f"criteria must hold two alternatives at least for a {self.kind}")
        if len({*self.names}) < len(self.names):
            raise ConfigError("criteria holds a name twice; names must differ")
        if not isinstance(self.labels, str):
            if len(self.labels) != len(self.names):
                raise ConfigError(f"labels holds {len(self.labels)} texts for {len(self.names)} alternatives")
            if len({*self.labels}) < len(self.labels):
                raise ConfigError("labels holds a text twice; labels must differ")
        if self.labels == "letters" and len(self.names) > len(_LETTERS):
            raise ConfigError(f'labels="letters" is for {len(_LETTERS)} alternatives at most; use "names"')

    def _check_numbers(self) -> None:
        if self.min is None or self.max is None or self.min >= self.max:
            raise ConfigError("a number needs min and max, the former smaller")
        count = len(range(self.min, self.max + 1, self.step))
        if self.criteria is not None:
            raise ConfigError("criteria is not for a number: its alternatives are those from min to max")
        if not 2 <= count <= MAX_ALTERNATIVES:
            raise ConfigError(
                f"min={self.min}, max={self.max} and step={self.step} make {count} numbers; from 2 to "
                f"{MAX_ALTERNATIVES} are taken: change step"
            )

    @property
    def kind(self) -> QuestionKind:
        """The type by its own name."""
        return "yes_no" if self.type == "noul" else self.type  # type: ignore[return-value]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The alternatives, as the answer names them."""
        if self.kind == "number":
            assert self.min is not None
            assert self.max is not None
            return tuple(map(str, range(self.min, self.max + 1, self.step)))
        return (_YES, _NO) if self.kind == "yes_no" else tuple(self.criteria)

    @property
    def notes(self) -> tuple[str | None, ...]:
        """The note on each alternative, if any."""
        if self.criteria is not None and self.kind == "yes_no":
            other = {"true": _YES, "false": _NO}
            told = self.criteria if isinstance(self.criteria, Mapping) else {}
            given = {str(other.get(name, name)): note for name, note in told.items()}
            if not given.keys() <= {_YES, _NO} or len(given) < len(self.criteria):
                raise ConfigError(
                    "criteria of a yes_no are an object of those of yes and no (or true and false), got "
                    f"{shown(self.criteria)}"
                )
            return given.get(_YES), given.get(_NO)
        return tuple(self.criteria.values()) if isinstance(self.criteria, Mapping) else (None,) * len(self.names)

    @property
    def labellings(self) -> list[tuple[str, ...]]:
        """The labels that the model may be asked for, one for each alternative, best ones first."""
        count = len(self.names)
        letters = [tuple(_LETTERS[:count]), tuple(_LETTERS[:count].lower())] if count <= len(_LETTERS) else []
        if not isinstance(self.labels, str):
            return [tuple(self.labels)]
        if self.labels == "letters":
            return letters
        if self.labels == "names":
            return [self.names]
        if self.kind == "yes_no":
            return [*_YES_NO]
        if self.kind == "score":
            return [tuple(map(str, range(1, count + 1))), *letters]
        if self.kind == "choice":
            return [*letters, self.names]
        width = max(map(len, self.names))
        padded = (
            () if any(name.startswith("-") for name in self.names) else (tuple(n.zfill(width) for n in self.names),)
        )
        return [self.names, *padded]

    def prompt(self, labels: Sequence[str]) -> str:
        """The text that asks for one of `labels`."""
        if not self.show_options:
            return self.instructions
        lines = [self.instructions.strip()]
        numbers = self.kind == "number" and self.labels != "letters"  # which say themselves what they stand for
        for name, note, label in zip(self.names, self.notes, labels, strict=True):
            told = [each for each in (None if name == label else name, note) if each is not None]
            if told and not numbers:
                lines.append(f"{label}: {', '.join(told)}")
        said = f"a number from {labels[0]} to {labels[-1]}" if numbers else f"one of {', '.join(labels)}"
        return "\n".join([*lines, f"Answer with {said}."])

    def decided(self, logprobs: Sequence[float], labels: Sequence[str], base: Sequence[float] | None) -> "Decision":
        """The decision for the log-probabilities of the labels, calibrated by those without the state, if given."""
        raw = np.asarray(logprobs, dtype=np.float64)
        shares = _softmax(raw if base is None else raw - _softmax(np.asarray(base, dtype=np.float64), log=True))
        best = int(shares.argmax())
        probabilities = dict(zip(self.names, shares.tolist(), strict=True))
        value: float | None = None
        mean: float | None = None
        if self.kind == "yes_no":
            value = probabilities[_YES]
        elif self.kind == "number":
            value, mean = int(self.names[best]), float(shares @ np.array([int(name) for name in self.names]))
        elif self.kind == "score":
            value = float(shares @ np.arange(1, len(shares) + 1))
        return Decision(
            type=self.type,
            choice=self.names[best],
            value=value,
            mean=mean,
            probabilities=probabilities,
            label_mass=min(1.0, math.exp(_total(raw))),
            entropy=float(-(shares * np.log(np.maximum(shares, 1e-300))).sum()),
            labels=dict(zip(self.names, labels, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """Questions over one state. Raises `ConfigError` when made, naming the question and the field."""

    state: Any = declare("", JsonState(), "What the questions are about; an object or a list is read as its JSON text.")
    questions: Any = declare(
        None,
        Settings("questions by their ids", MAX_QUESTIONS, 2**24),
        "The questions by their ids, each an object of the fields below.",
    )
    together: bool = declare(
        False,
        Flag(),
        "One canvas for all questions, so that they influence each other; by default each has its own canvas.",
    )
    calibrate: bool = declare(
        False,
        Flag(),
        "Divide by what the model says of each label without the state, for which every question is read once more.",
    )
    end_turn: bool = declare(
        True,
        Flag(),
        "Whether the end of the assistant's turn follows the answer, as the chat template writes it.",
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.questions:
            raise ConfigError("questions is empty; ask one at least")
        made = {}
        for name, each in self.questions.items():
            try:
                question = each if isinstance(each, Question) else parse(Question, each, "it", "question field")
                _ = question.notes
            except ConfigError as error:
                raise ConfigError(f"questions.{name[:64]}: {error}") from error
            made[name] = question
        object.__setattr__(self, "questions", made)

    @classmethod
    def from_mapping(cls, values: object) -> "Decisions":
        """Decisions from JSON-like values. Raises `ConfigError` on unknown names and on values not allowed."""
        return parse(cls, values, "decisions", "decisions field")

    @property
    def text(self) -> str:
        """The state as the model reads it."""
        return self.state if isinstance(self.state, str) else json.dumps(self.state, ensure_ascii=False)

    @property
    def chars(self) -> int:
        """About how many characters are tokenized: every question, and its template once for each label."""
        asked = [
            len(question.prompt(question.names)) * len(question.labellings) for question in self.questions.values()
        ]
        tried = [sum(map(len, question.labellings)) for question in self.questions.values()]
        templates = [_BESIDE + len(question.template) for question in self.questions.values()]
        alone = sum(map(int.__mul__, tried, templates))
        joint = sum(asked) * len(asked) + sum(tried) * sum(templates) if self.together else 0
        return len(self.text) + sum(asked) + alone + joint


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to one question.

    Attributes:
        type: the question's.
        choice: the most probable alternative.
        value: of yes or no, the probability of yes; of a number, the most probable one; of a score, the expected level,
            counted from 1.
        mean: the expected number.
        probabilities: of each alternative; they sum to 1.
        label_mass: the probability that the model gives to the labels at all, before calibration.
        entropy: of the probabilities, in nats.
        labels: what the model would have written for each alternative.
    """

    type: str
    choice: str
    value: float | None
    mean: float | None
    probabilities: Mapping[str, float]
    label_mass: float
    entropy: float
    labels: Mapping[str, str]

    @property
    def content(self) -> dict[str, Any]:
        """The decision as JSON-like values, with the names that other servers give to some of them."""
        fields: dict[str, Any] = {"type": self.type, "choice": self.choice}
        if self.value is not None:
            fields["value"] = self.value
        if self.mean is not None:
            fields["mean"] = self.mean
        if self.type == "noul":
            fields["noul"] = self.value
        if self.type == "score":
            fields |= {"score": self.value, "legend": {label: name for name, label in self.labels.items()}}
        return fields | {
            "probabilities": dict(self.probabilities),
            "confidence": self.probabilities[self.choice],
            "label_mass": self.label_mass,
            "entropy": self.entropy,
            "labels": dict(self.labels),
        }


def _total(logs: NDArray[np.float64]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def _softmax(logs: NDArray[np.float64], *, log: bool = False) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = logs - _total(logs)
    return shares if log else np.exp(shares)

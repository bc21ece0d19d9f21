"""Decisions: questions over one state, each answered by the model's distribution over a few labels.

Their fields in a request are declared here, and nowhere else. Two APIs have such questions, OpenAI's (`input`, and a
list of questions) and System One's (`state`, and questions by their ids); they share all fields but those that name the
alternatives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from remask.checks.fields import Nested, check, declare, parse
from remask.checks.values import AnyOf, Choice, Flag, ListOf, Settings, Text, Values, Whole, count_values, shown
from remask.errors import ConfigError
from remask.request.transcripts import Transcript, Transcripts, has_image, instructions_text, is_parts, text_of

QuestionKind: TypeAlias = Literal["choice", "yes_no", "number", "score"]
Value: TypeAlias = str | bool

MAX_QUESTIONS = 8192
MAX_ALTERNATIVES = 1000
"""Of one question."""
MAX_OPENAI_QUESTIONS, MAX_OPENAI_CHOICES = 400, 255
"""Of a body with `input`."""
MAX_STATE_VALUES = 2**18
"""Of one state, nested ones included."""
MAX_LABEL_TOKENS = 4
"""Of labels of equal length, so that the text after them is on the canvas when they are predicted."""
ANSWER = "{answer}"
"""Marks the place of the label in a question's `template`."""
MASK = "{mask}"
"""Marks a mask in the template that is not read."""

_MAX_TEXT = 2**20
_MAX_QUESTION_CHARS = 2**24  # of all questions of a request
_TEMPLATE_CHARS = 32  # characters that a chat template writes around an answer
_NUMBERS = Whole(-(10**9), 10**9)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CODES = [first + second for first in _LETTERS for second in _LETTERS + "0123456789"]
"""Labels of more alternatives than there are letters."""
_YES_NO = (("True", "False"), ("Yes", "No"), ("yes", "no"), ("Y", "N"), ("1", "0"))
_SELF_EXPLANATORY = {"true", "false", "yes", "no"}  # labels that need no explanation
_YES, _NO = "yes", "no"
_SIDES = {"true": _YES, "false": _NO}
_SYNONYMS = {"noul": "yes_no", "predicate": "yes_no"}
_DEFAULT_QUESTION = "Which of these applies?"  # if only criteria are sent


@dataclass(frozen=True, slots=True)
class Json(Values):
    """Texts, and objects and lists of at most `max_values` values.

    Attributes:
        max_values: values of an object or a list, nested ones included.
        max_chars: characters of a text, or of the JSON text of an object or a list.
    """

    max_values: int
    max_chars: int

    @property
    def words(self) -> str:
        return f"a text, or an object or a list of at most {self.max_values} values altogether"

    def fits(self, value: object) -> bool:
        if isinstance(value, Mapping | list | tuple):
            if count_values(value, self.max_values) > self.max_values:
                return False
            try:
                text = text_of(value)
            except (TypeError, ValueError, RecursionError):  # a caller in Python may send what is no JSON
                return False
            return Text(self.max_chars).fits(text)
        return Text(self.max_chars, empty=True).fits(value)

    def schema(self) -> dict[str, Any]:
        containers = (
            {"type": "object", "maxProperties": self.max_values},
            {"type": "array", "maxItems": self.max_values},
        )
        return {"anyOf": [Text(self.max_chars, empty=True).schema(), *containers]}


_PROSE = Json(10_000, _MAX_TEXT)


@dataclass(frozen=True, slots=True)
class Alternatives(Values):
    """Lists of names, or objects that say what each name means."""

    @property
    def words(self) -> str:
        return f"a list of at most {MAX_ALTERNATIVES} texts, or an object of texts and nulls by name"

    def fits(self, value: object) -> bool:
        if isinstance(value, Mapping):
            names = list(value)
            notes = [note for note in value.values() if note is not None]
        elif isinstance(value, list | tuple):
            names = []
            notes = list(value)
        else:
            return False
        if len(value) > MAX_ALTERNATIVES:
            return False
        return all(map(Text(_MAX_TEXT).fits, names)) and all(map(_PROSE.fits, notes)) and "" not in notes

    def schema(self) -> dict[str, Any]:
        array = {"type": "array", "items": _PROSE.schema(), "maxItems": MAX_ALTERNATIVES}
        note = {"anyOf": [_PROSE.schema(), {"type": "null"}]}
        notes = {"type": "object", "additionalProperties": note, "maxProperties": MAX_ALTERNATIVES}
        return {"anyOf": [array, notes]}


_DESCRIPTION = Text(_MAX_TEXT, empty=True)


class _Checked:
    """Checks its declared fields when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Option(_Checked):
    """One of the choices of OpenAI's form."""

    value: Value | None = declare(None, AnyOf((Flag(), Text(_MAX_TEXT))), "What the answer names; true is not `true`.")
    description: str | None = declare(None, _DESCRIPTION, "What it means.")


@dataclass(frozen=True, slots=True)
class Level(_Checked):
    """One of the levels of OpenAI's form."""

    label: str | None = declare(None, Text(_MAX_TEXT), "What the answer names.")
    description: str | None = declare(None, _DESCRIPTION, "What it means.")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the answers to choose from.

    Attributes:
        value: its name in the answer.
        text: its name as the model reads it.
        note: what it means; None if the request does not say.
    """

    value: Value
    text: str
    note: str | None = None


@dataclass(frozen=True)
class Question:
    """One question. Raises `ConfigError` when made, naming the field, the value and what is allowed."""

    type: str = declare(
        "choice",
        Choice(("choice", "score", "yes_no", "noul", "predicate", "number")),
        "What is decided: one of some names, a level of an ordered scale, yes or no (`noul` is System One's name of "
        "it, and `predicate` OpenAI's), or a whole number in a range.",
    )
    instructions: Any = declare(
        "",
        _PROSE,
        "The question, as the model reads it; an object or a list is read as its JSON text, and OpenAI's parts "
        "(`input_text`, `input_json`) one below the other.",
    )
    criteria: Any = declare(
        None,
        Alternatives(),
        "`choice`: an object that says what each name means, or a list of names. `score`: a list of the levels, the "
        "lowest first. Yes or no: optionally an object of what `true` (or `yes`) and `false` (or `no`) mean.",
    )
    choices: Sequence[Option] | None = declare(
        None,
        ListOf(Nested(Option, "choice field"), "choices", MAX_ALTERNATIVES),
        "OpenAI's form of the criteria of a `choice`: objects of `value`, a text or a boolean, and `description`.",
    )
    levels: Sequence[Level] | None = declare(
        None,
        ListOf(Nested(Level, "level field"), "levels", MAX_ALTERNATIVES),
        "OpenAI's form of the criteria of a `score`: objects of `label` and `description`.",
    )
    name: str | None = declare(None, Text(1024), "OpenAI's: what the answer repeats; those of a body must differ.")
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
        Text(_MAX_TEXT),
        f"The answer's text. `{ANSWER}` is the place of the label, once; each `{MASK}` is a mask that is not read.",
    )
    show_options: bool = declare(
        True,
        Flag(),
        "Whether the alternatives and their labels stand below the question; without them it stands alone.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.template.count(ANSWER) != 1:
            raise ConfigError(f"template must hold {ANSWER} once, got {shown(self.template)}")
        if isinstance(self.labels, str) and self.labels not in ("auto", "letters", "names"):
            raise ConfigError(f'labels must be "auto", "letters", "names" or a list of texts, got {shown(self.labels)}')
        has_range = self.min is not None or self.max is not None or self.step != 1
        if has_range != (self.kind == "number"):
            raise ConfigError("min, max and step are those of a number, which needs min and max")
        self._check_forms()
        alternatives = self.alternatives
        form = next((name for name in ("choices", "levels") if getattr(self, name) is not None), "criteria")
        if self.kind != "yes_no" and len(alternatives) < 2:
            raise ConfigError(f"{form} must hold two alternatives at least for a {self.kind}")
        # The type is a part of the key, as true and 1 are equal in Python.
        if len({(type(alternative.value), alternative.value) for alternative in alternatives}) < len(alternatives):
            raise ConfigError(f"{form} holds a name twice; names must differ")
        if not self.question_text.strip():
            raise ConfigError("instructions is empty; say what is asked")
        self._check_labels(len(alternatives))

    def _check_labels(self, count: int) -> None:
        """Raise `ConfigError` unless there is a label for each of `count` alternatives."""
        if self.labels == "letters" and count > len(_CODES):
            raise ConfigError(f'labels="letters" is for {len(_CODES)} alternatives at most; use "names"')
        if isinstance(self.labels, str):
            return
        if len(self.labels) != count:
            raise ConfigError(f"labels holds {len(self.labels)} texts for {count} alternatives")
        if len({*self.labels}) < len(self.labels):
            raise ConfigError("labels holds a text twice; labels must differ")

    def _check_forms(self) -> None:
        """Raise `ConfigError` if the alternatives do not come in the one form that the question's type takes."""
        forms = {"choice": ("criteria", "choices"), "score": ("criteria", "levels"), "yes_no": ("criteria",)}
        form_names = [name for name in ("criteria", "choices", "levels") if getattr(self, name) is not None]
        wrong_form = next((name for name in form_names if name not in forms.get(self.kind, ())), None)
        if wrong_form is not None:
            allowed = " or ".join(forms.get(self.kind, ("min", "max")))
            raise ConfigError(f"{wrong_form} is not for a {self.type}, whose alternatives are told by {allowed}")
        if any(option.value is None for option in self.choices or ()) or any(
            level.label is None for level in self.levels or ()
        ):
            raise ConfigError("choices need a value each, and levels a label")
        if len(form_names) > 1:
            raise ConfigError(f"{' and '.join(form_names)} are two forms of the same; send one of them")
        if self.kind == "score" and isinstance(self.criteria, Mapping):
            raise ConfigError("criteria of a score are a list of its levels, the lowest first, and no object")
        names = self.criteria if self.kind == "choice" and isinstance(self.criteria, list | tuple) else ()
        if bad := [name for name in names if not isinstance(name, str)]:
            raise ConfigError(f"criteria of a choice are names, got {shown(bad[0])}; say in an object what each means")
        if self.kind == "yes_no" and self.criteria is not None:
            sides = [*map(_side, self.criteria)] if isinstance(self.criteria, Mapping) else [None]
            if None in sides or len({*sides}) < len(sides):
                raise ConfigError(
                    "criteria of a yes_no are an object of those of yes and no (or true and false), got "
                    f"{shown(self.criteria)}"
                )
        if self.kind == "number":
            self._check_number_range()

    def _check_number_range(self) -> None:
        if self.min is None or self.max is None or self.min >= self.max:
            raise ConfigError("a number needs min and max, with min < max")
        count = len(range(self.min, self.max + 1, self.step))
        if not 2 <= count <= MAX_ALTERNATIVES:
            raise ConfigError(
                f"min={self.min}, max={self.max} and step={self.step} make {count} numbers; from 2 to "
                f"{MAX_ALTERNATIVES} are taken: change step"
            )

    @property
    def kind(self) -> QuestionKind:
        """The question's type, with synonyms resolved."""
        return _SYNONYMS.get(self.type, self.type)  # type: ignore[return-value]

    @property
    def has_image(self) -> bool:
        """Whether the instructions hold an image. No served model can answer such a question."""
        return has_image(self.instructions)

    @cached_property
    def question_text(self) -> str:
        """The question as the model reads it, without its alternatives."""
        parts = is_parts(self.instructions)
        question = instructions_text("instructions", self.instructions) if parts else self.instructions
        has_notes = any(alternative.note is not None for alternative in self.alternatives)
        has_criteria = has_notes or self.kind not in ("yes_no", "number")
        return _DEFAULT_QUESTION if not question and has_criteria else text_of(question)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The answers to choose from, in order."""
        if self.kind == "number":
            assert self.min is not None
            assert self.max is not None
            return tuple(Alternative(text, text) for text in map(str, range(self.min, self.max + 1, self.step)))
        if self.kind == "yes_no":
            notes = {_side(name): note for name, note in (self.criteria or {}).items()}
            return tuple(Alternative(name, name, _note(notes.get(name))) for name in (_YES, _NO))
        if self.kind == "score":
            levels = [(level.label or "", level.description) for level in self.levels or ()]
            levels = levels or [(text_of(criterion), None) for criterion in self.criteria or ()]
            return tuple(Alternative(str(index), text, note) for index, (text, note) in enumerate(levels))
        if self.choices is not None:
            return tuple(
                Alternative(option.value, text_of(option.value), option.description)
                for option in self.choices
                if option.value is not None
            )
        if isinstance(self.criteria, Mapping):
            return tuple(Alternative(name, name, _note(note)) for name, note in self.criteria.items())
        return tuple(Alternative(name, name) for name in self.criteria or ())

    @property
    def labellings(self) -> list[list[tuple[str, ...]]]:
        """Labellings to choose from, in groups, best group first. Within a group the one of fewest canvases is used.

        A labelling has a label for each alternative, or more labels than alternatives, any of which may be used.
        """
        count = len(self.alternatives)
        names = tuple(alternative.text for alternative in self.alternatives)
        letters: list[tuple[str, ...]] = []
        if count <= len(_LETTERS):
            letters = [tuple(_LETTERS[:count]), tuple(_LETTERS[:count].lower())]
        elif count <= len(_CODES):
            letters = [tuple(_CODES)]
        if not isinstance(self.labels, str):
            return [[tuple(self.labels)]]
        if self.labels == "letters":
            return [letters]
        if self.labels == "names":
            return [[names]]
        if self.kind == "yes_no":
            return [[*_YES_NO]]
        if self.kind == "score":
            digits = [tuple(map(str, range(count)))] if count <= 10 else []  # a digit each
            return [[*digits, *letters]]
        if self.kind == "choice":  # a canvas for each beginning of many long names would cost too much
            return [[names], letters] if count <= len(_LETTERS) else [[*letters, names]]
        width = max(map(len, names))
        padded = () if any(name.startswith("-") for name in names) else (tuple(n.zfill(width) for n in names),)
        return [[names, *padded]]

    def prompt(self, labels: Sequence[str]) -> str:
        """The question with its alternatives and the request to answer with one of `labels`."""
        if not self.show_options:
            return self.question_text
        lines = [self.question_text.strip()]
        # The numbers themselves need no explanation.
        has_number_labels = self.kind == "number" and self.labels in ("auto", "names")
        for alternative, label in zip(self.alternatives, labels, strict=True):
            is_plain = self.kind == "yes_no" and label.lower() in _SELF_EXPLANATORY
            text = None if is_plain or label == alternative.text else alternative.text
            explanation = ", ".join(part for part in (text, alternative.note) if part is not None)
            if explanation and not has_number_labels:
                lines.append(f"{label}: {explanation}")
        if has_number_labels:
            request = f"Answer with a number from {labels[0]} to {labels[-1]}."
        elif self.kind == "yes_no":
            request = f"{labels[0]} or {labels[1]}?"
        elif all(alternative.text == label for alternative, label in zip(self.alternatives, labels, strict=True)):
            request = f"Options: {', '.join(labels)}."
        elif len(labels) > len(_LETTERS):
            request = "Answer with the label of one of them."
        else:
            request = f"Answer with one of {', '.join(labels)}."
        return "\n".join([*lines, request])


@dataclass(frozen=True, slots=True)
class CacheOptions(_Checked):
    """OpenAI's settings of the prompt's cache."""

    mode: str = declare(
        "implicit", Choice(("implicit", "explicit")), "Whether what is shared ends at breakpoints alone."
    )
    ttl: str = declare("30m", Choice(("30m",)), "Entries stay for as long as the store has room.")


@dataclass(frozen=True)
class Decisions:
    """Questions over one state. Raises `ConfigError` when made, naming the question and the field."""

    state: Any = declare(
        "", Json(MAX_STATE_VALUES, 2**26), "What the questions are about; an object or a list is read as its JSON text."
    )
    questions: Any = declare(
        None,
        AnyOf(
            (
                ListOf(Settings("fields of a question", 32, _MAX_QUESTION_CHARS), "questions", MAX_OPENAI_QUESTIONS),
                Settings("questions by their ids", MAX_QUESTIONS, _MAX_QUESTION_CHARS),
            )
        ),
        "The questions, each an object of the fields below: by their ids, or with `input` a list of them.",
    )
    input: Any = declare(
        None,
        Transcripts(),
        "OpenAI's form of `state`: a text, or a list of messages, calls of tools and their outputs.",
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
        True, Flag(), "Whether the end of the assistant's turn follows the answer, as the chat template writes it."
    )
    prompt_cache_options: CacheOptions | None = declare(
        None,
        Nested(CacheOptions, "prompt_cache_options field"),
        "OpenAI's: with the `mode` `explicit` what requests share ends at the last `prompt_cache_breakpoint` of "
        "`input`, or is nothing; by default it is all of `input`.",
    )

    def __post_init__(self) -> None:
        check(self)
        is_list = isinstance(self.questions, list | tuple)
        if self.input is not None and self.state:
            raise ConfigError("state and input both say what the questions are about; send one of them")
        if not self.questions:
            raise ConfigError("questions is empty; ask one at least")
        if is_list != (self.input is not None):
            raise ConfigError("questions are a list where they are about `input`, and an object about a `state`")
        questions: dict[str, Question] = {}
        for key, value in enumerate(self.questions) if is_list else self.questions.items():
            try:
                question = value if isinstance(value, Question) else parse(Question, value, "it", "question field")
                self._check_form(question)
            except ConfigError as error:
                raise ConfigError(f"questions.{str(key)[:64]}: {error}") from error
            questions[str(key)] = question
        names: set[str] = set()
        for name in (question.name for question in questions.values() if question.name is not None):
            if name in names:
                raise ConfigError(f"questions: the name {shown(name)} is that of two of them; names must differ")
            names.add(name)
        object.__setattr__(self, "questions", questions)
        _ = self.transcript  # raises ConfigError if `input` is not valid

    def _check_form(self, question: Question) -> None:
        """Raise `ConfigError` if `question` has fields that do not go with `input`, or without it, with `state`."""
        if self.input is None:
            for name in ("choices", "levels", "name"):
                if getattr(question, name) is not None:
                    raise ConfigError(f"{name} is OpenAI's and goes with `input`; about a `state` send criteria alone")
            return
        if not question.instructions:
            raise ConfigError("instructions is empty; say what is asked")
        if not isinstance(question.instructions, str):
            instructions_text("instructions", question.instructions)
        if question.choices is not None and len(question.choices) > MAX_OPENAI_CHOICES:
            raise ConfigError(
                f"choices holds {len(question.choices)} choices; from 2 to {MAX_OPENAI_CHOICES} are taken"
            )

    @classmethod
    def from_mapping(cls, values: object) -> "Decisions":
        """Decisions from JSON-like values. Raises `ConfigError` on unknown names and on values not allowed."""
        return parse(cls, values, "decisions", "decisions field")

    @cached_property
    def transcript(self) -> Transcript:
        """The conversation that the questions are about. A state is one message; an empty one is no message."""
        if isinstance(self.input, list | tuple):
            return Transcript.of(self.input)
        return Transcript.of_text(text_of(self.state) if self.input is None else self.input)

    @property
    def readable_questions(self) -> dict[str, Question]:
        """The questions by their ids, without those that show an image."""
        return {name: question for name, question in self.questions.items() if not question.has_image}

    @property
    def shared_messages(self) -> Sequence[Mapping[str, Any]]:
        """The messages whose tokens other requests may share. The last one may end at a breakpoint within its text."""
        if self.prompt_cache_options is not None and self.prompt_cache_options.mode == "explicit":
            return self.transcript.shared or ()
        return self.transcript.messages

    @property
    def chars(self) -> int:
        """An estimate of the characters to tokenize: every question, and its template once for each label."""
        questions = self.readable_questions.values()
        label_count = prompt_chars = template_chars = labelled_chars = 0
        for question in questions:
            labelling_count = sum(map(len, question.labellings))
            names = [alternative.text for alternative in question.alternatives]
            answer_chars = _TEMPLATE_CHARS + len(question.template)
            label_count += len(names) * labelling_count
            prompt_chars += len(question.prompt(names)) * labelling_count
            template_chars += answer_chars
            labelled_chars += len(names) * labelling_count * answer_chars
        joint_chars = 0
        if self.together:  # every canvas has all prompts and templates
            joint_chars = prompt_chars * len(questions) + label_count * template_chars
        return self.transcript.chars + prompt_chars + labelled_chars + joint_chars


def _side(name: str) -> str | None:
    """Return "yes" or "no" for any name of a side ("true" and "false" included), None for any other text."""
    side = _SIDES.get(name, name)
    return side if side in (_YES, _NO) else None


def _note(note: Any) -> str | None:
    return None if note is None else text_of(note)

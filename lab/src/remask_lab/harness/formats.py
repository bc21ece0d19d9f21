"""The formats of the benchmarks' data sets: how a record becomes a question and its right answer.

Each reader takes a line in the data set's published shape. It raises `ConfigError`, which names the line and the field,
where something is missing.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from remask.checks.values import is_whole
from remask.tasks.transit import SEPARATOR
from remask_lab.gsm8k import final_number
from remask_lab.likelihood.scores import LETTERS
from remask_lab.records.jsonl import Line


@dataclass(frozen=True, slots=True)
class Doc:
    """One question, its right answer, and a `solution` in the form that the task's rules demand.

    `asked` is the user's turn. The names of the fields are those that lm-eval's configs use.
    """

    asked: str
    right: str
    solution: str = ""


def _doc(question: str, answer: str, reasoning: str = "") -> Doc:
    """A question whose solution is `reasoning`, then the separator and the answer."""
    return Doc(question, answer, solution=f"{reasoning.strip()}\n{SEPARATOR} {answer}".lstrip())


_CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K's annotations

Reader = Callable[[Line], Doc]


@dataclass(frozen=True, slots=True)
class Format:
    """The reader of a benchmark's records, and the fields that they must have."""

    read: Reader
    fields: tuple[str, ...]


def _gsm8k(line: Line) -> Doc:
    """A question of GSM8K, as it is published, or as a chat of a question and its answer."""
    question, reasoning = line.exchange() if line.has("messages") else (line.text("question"), line.text("answer"))
    if "####" not in reasoning:
        raise line.error(f"field 'answer' has no '####' before its final number: {reasoning[-60:]!r}")
    return _doc(question, final_number(reasoning), _CALCULATOR.sub("", reasoning.partition("####")[0]))


def _math500(line: Line) -> Doc:
    reasoning = line.text("solution") if line.has("solution") else ""
    return _doc(line.text("problem"), line.text("answer").strip(), reasoning)


def _arc(line: Line) -> Doc:
    """A question of ARC, whose choices are two lists, of texts and of labels."""
    choices = line.get("choices")
    texts, labels = (choices.get(name) if isinstance(choices, dict) else None for name in ("text", "label"))
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
        raise line.error(f"field 'choices' must be an object of as many text as label, got {choices!r}")
    key = line.text("answerKey")
    if key not in labels:
        raise line.error(f"field 'answerKey' is {key!r}, which is none of the labels {', '.join(map(str, labels))}")
    # A few questions number their choices, but the format rules ask for letters.
    return _choice(line.text("question"), texts, labels.index(key))


def _gpqa(line: Line) -> Doc:
    """A question of GPQA with its four choices in a random order."""
    right = line.text("Correct Answer").strip()
    wrong = [line.text(f"Incorrect Answer {number}").strip() for number in (1, 2, 3)]
    question = line.text("Question").strip()
    choices = [right, *wrong]
    # The right choice always stands first in the data. The order is drawn from the question, so it is always the same.
    random.Random(question).shuffle(choices)
    return _choice(question, choices, choices.index(right))


def _mmlu(line: Line) -> Doc:
    choices, answer = line.texts("choices"), line.get("answer")
    if not is_whole(answer, 0, len(choices) - 1):
        raise line.error(f"field 'answer' must be a choice's number from 0 to {len(choices) - 1}, got {answer!r}")
    return _choice(line.text("question"), choices, answer)


def _mmlu_pro(line: Line) -> Doc:
    options, answer = line.texts("options"), line.text("answer")
    letters = LETTERS[: len(options)]
    if len(answer) != 1 or answer not in letters:
        raise line.error(f"field 'answer' must be one of the letters {letters}, got {answer!r}")
    return _choice(line.text("question"), options, letters.index(answer))


def _bbh(line: Line) -> Doc:
    return _doc(line.text("input"), line.text("target").strip())


def _choice(question: str, choices: Sequence[str], answer: int) -> Doc:
    """A question with lettered choices, whose answer is the letter of choice number `answer`, counted from 0."""
    choice_lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return _doc(f"{question.strip()}\n\n{choice_lines}", LETTERS[answer])


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "gsm8k": Format(_gsm8k, ("question", "answer")),
        "math500": Format(_math500, ("problem", "answer")),
        "arc_challenge": Format(_arc, ("question", "choices", "answerKey")),
        "gpqa": Format(_gpqa, ("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))),
        "mmlu": Format(_mmlu, ("question", "choices", "answer")),
        "mmlu_pro": Format(_mmlu_pro, ("question", "options", "answer")),
        "bbh": Format(_bbh, ("input", "target")),
    }
)
"""By the benchmark's name."""

"""Scores of responses, the same on local data and through lm-eval: an answer that matches.

The final answer is what follows the last `##` of a response. The last one, because a response may quote the rule that
it is under, or correct itself, before it answers. GSM8K's own `####` ends in `##` too.

Strict, as the BiCache paper matches (section 3.1): the final answer equals the right one, character for character,
except for white space at both ends. Up to notation: the two may also differ in LaTeX, currency, thousands separators,
units after a space, width of digits, and a full stop at the end. The difference between the two shares is what a model
loses to the format, not to the problem.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from remask.tasks.transit import final_answer
from remask_lab.records.interval import wilson

METRICS = ("strict_match", "same_answer")  # each 0 or 1; a task's score is the first one that it has


def shares(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every metric that `samples` have, with Wilson's 95 % interval."""
    metrics = {}
    for name in METRICS:
        values = [sample[name] for sample in samples if name in sample]
        if values:
            correct = int(sum(values))
            metrics[name] = {"value": correct / len(values), "interval": list(wilson(correct, len(values)))}
    return metrics


_WRAPPED = re.compile(
    r"\$(?P<dollars>[^$]*)\$|\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]|\*\*(?P<bold>.*)\*\*"
    r"|\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{(?P<braces>.*)\}|\((?P<letter>[A-Z])\)",
    re.DOTALL,
)
_SPACING = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![a-zA-Z])|\\q?quad(?![a-zA-Z])|~")
_FRACTION = re.compile(r"\\[dt]?frac")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)")
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?:[€£¥]|\\?\$)?\s*"
    r"(?:(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?P<decimals>\.\d+)?(?:\s*/\s*(?P<under>\d+))?|(?P<point>\.\d+)"
    r"|\\frac\{(?P<top>-?\d+)\}\{(?P<bottom>\d+)\})"
    r"(?:\s*(?:\\?%|°|\^\{?\\circ\}?))?"
)
_UNIT = re.compile(r"\s+[^\W\d_][^\d]*")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A response compared with the right answer.

    Attributes:
        answer: its final answer; None without a `##`.
        strict: whether that equals the right answer.
        same: whether the two are equal up to notation.
    """

    answer: str | None
    strict: bool
    same: bool

    @property
    def metrics(self) -> dict[str, float]:
        """0 or 1 by name, as `METRICS` has them."""
        return {"strict_match": float(self.strict), "same_answer": float(self.same)}


def judge(text: str, answer: str) -> Verdict:
    """Compare the response `text` with the right `answer`."""
    final = final_answer(text)
    if final is None:
        return Verdict(None, strict=False, same=False)
    strict = final == answer.strip()
    return Verdict(final, strict, same=strict or same_answer(final, answer))


def same_answer(candidate: str, answer: str) -> bool:
    """Whether two final answers are equal up to notation. Numbers are compared as fractions, so "0.50" is "1/2".

    A unit is dropped from `candidate` alone, and only where `answer` is a number: "3 x" is not "3 y".
    """
    plain_candidate, plain_answer = _plain(candidate), _plain(answer)
    number = _number(plain_answer)
    if number is not None:
        value = _number(plain_candidate)
        return (_number_before_unit(plain_candidate) if value is None else value) == number
    return _squeezed(plain_candidate) == _squeezed(plain_answer) != ""


def _plain(text: str) -> str:
    """`text` without wrapping, spacing commands and a final full stop, and with one form of fractions."""
    text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-"}).strip()
    previous = None
    while text != previous:
        previous = text
        text = text.removesuffix(".").strip()
        if (wrapped := _WRAPPED.fullmatch(text)) is not None and wrapped.lastgroup is not None:
            text = wrapped[wrapped.lastgroup].strip()
    text = _FRACTION.sub(r"\\frac", _SPACING.sub("", text.replace("{,}", ",")))
    return _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text).strip()


def _number(text: str) -> Fraction | None:
    """The number that all of `text` is; None where it is none."""
    match = _NUMBER.fullmatch(text)
    return None if match is None else _value(match)


def _number_before_unit(text: str) -> Fraction | None:
    """The number that `text` begins with, if a unit alone follows it."""
    match = _NUMBER.match(text)
    if match is None or _UNIT.fullmatch(text[match.end() :]) is None:
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of `_NUMBER`; None where it divides by zero."""
    if match["top"] is not None:
        numerator, denominator = int(match["top"]), int(match["bottom"])
        value = Fraction(numerator, denominator) if denominator else None
    elif match["point"] is not None:
        value = Fraction("0" + match["point"])
    else:
        whole = Fraction(match["whole"].replace(",", "") + (match["decimals"] or ""))
        denominator = int(match["under"] or 1)
        value = whole / denominator if denominator else None
    return None if value is None else -value if match["sign"] == "-" else value


def _squeezed(text: str) -> str:
    """`text` without spaces, for comparison. A single letter is a choice, whose case does not matter."""
    squeezed = "".join(text.split())
    return squeezed.upper() if len(squeezed) == 1 else squeezed

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
    """The mean of every metric over `samples`, with Wilson's 95 % interval."""
    found = {}
    for name in METRICS:
        values = [sample[name] for sample in samples if name in sample]
        if values:
            right = int(sum(values))
            found[name] = {"value": right / len(values), "interval": list(wilson(right, len(values)))}
    return found


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
    """How a response compares with the right answer. `answer` is its final answer, None without a `##`."""

    answer: str | None
    strict: bool
    same: bool

    @property
    def metrics(self) -> dict[str, float]:
        """0 or 1 by name, as `METRICS` has them."""
        return {"strict_match": float(self.strict), "same_answer": float(self.same)}


def judge(text: str, answer: str) -> Verdict:
    """Compares the response `text` with the right `answer`."""
    given = final_answer(text)
    if given is None:
        return Verdict(None, strict=False, same=False)
    strict = given == answer.strip()
    return Verdict(given, strict, same=strict or same_answer(given, answer))


def same_answer(given: str, answer: str) -> bool:
    """Whether two final answers are equal up to notation. Numbers are compared as fractions, so "0.50" is "1/2".

    Units are dropped from `given` only, and only where `answer` is a number: "3 x" is not "3 y".
    """
    ours, right = _plain(given), _plain(answer)
    number = _number(right)
    if number is not None:
        found = _number(ours)
        return (found if found is not None else _measured(ours)) == number
    return _squeezed(ours) == _squeezed(right) != ""


def _plain(text: str) -> str:
    """`text` without wrapping, spacing commands and a final full stop. Spaces stay."""
    text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-"}).strip()
    before = None
    while text != before:
        before = text
        text = text.removesuffix(".").strip()
        if (found := _WRAPPED.fullmatch(text)) is not None and found.lastgroup is not None:
            text = found[found.lastgroup].strip()
    text = _FRACTION.sub(r"\\frac", _SPACING.sub("", text.replace("{,}", ",")))
    return _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text).strip()


def _number(text: str) -> Fraction | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else _value(found)


def _measured(text: str) -> Fraction | None:
    """The number at the beginning of `text`, where only a unit follows it."""
    found = _NUMBER.match(text)
    if found is None or _UNIT.fullmatch(text[found.end() :]) is None:
        return None
    return _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    if found["top"] is not None:
        over, under = int(found["top"]), int(found["bottom"])
        value = Fraction(over, under) if under else None
    elif found["point"] is not None:
        value = Fraction("0" + found["point"])
    else:
        whole = Fraction(found["whole"].replace(",", "") + (found["decimals"] or ""))
        under = int(found["under"] or 1)
        value = whole / under if under else None
    return None if value is None else -value if found["sign"] == "-" else value


def _squeezed(text: str) -> str:
    """`text` without spaces, for comparison. A single letter is a choice, whose case does not matter."""
    text = "".join(text.split())
    return text.upper() if len(text) == 1 else text

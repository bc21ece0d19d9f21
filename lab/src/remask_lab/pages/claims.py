"""The papers' claims (`claims.toml`), and whether our tables show them: verdicts follow from the kept results."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from remask_lab.papers.definition import load_table
from remask_lab.papers.show import results_of
from remask_lab.records.interval import MARGIN, Estimate, LossVerdict, accuracy_difference, judge_answers
from remask_lab.records.markdown import markdown_table, percent
from remask_lab.records.record import Record

Result: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Mapping[str, Result]
Finding: TypeAlias = tuple[str, str]
"""A verdict, and a text of the figures that it follows from."""

YES, NO, UNSHOWN = "yes", "**no**", "not shown at this size"
UNTESTED, ELSEWHERE = "not run", "other model needed"
ROUNDS = 6
"""Rounds from which on their range is an interval of the median: of 97 % (1 - 2^(1 - n)), as in a sign test."""
FILE = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper. The names of attributes are those of `claims.toml`.

    Attributes:
        said: the claim, with the paper's figures.
        table: the table of ours whose results are tested; None if there is none.
        shows: the tests, each the name of one of `TESTS` and its arguments: rows of the table, and for some a number.
        because: a note on the verdict, or the reason why there is no table.
        instead: the verdict without a table.
    """

    paper: str
    said: str
    table: str | None = None
    shows: Sequence[Sequence[str]] = ()
    because: str = ""
    instead: str = ELSEWHERE

    def judge(self, rows: Rows) -> Finding:
        """The weakest verdict of its tests on the rows of its table, and the figures of all.

        Raises `KeyError` if a row is missing.
        """
        findings = [TESTS[test](rows, *arguments) for test, *arguments in self.shows]
        verdict = max((verdict for verdict, _ in findings), key=(YES, UNSHOWN, NO).index)
        return verdict, "; ".join(figures for _, figures in findings)


def read_claims() -> list[Claim]:
    """The claims of `claims.toml`, in its order."""
    return [Claim(**claim) for claim in tomllib.loads(FILE.read_text(encoding="utf-8"))["claims"]]


def loses(rows: Rows, name: str, than: str, points: str = f"{100 * MARGIN:g}") -> Finding:
    """Whether `name` has fewer right answers than `than`. It is refuted if a loss of `points` percent is excluded."""
    change = accuracy_difference(rows[name], rows[than])
    _, low, high = change
    verdict = YES if high < 0 else NO if low > -float(points) / 100 else UNSHOWN
    return verdict, f"{_accuracy(rows[than])} to {_accuracy(rows[name])}: {_points(change)}"


def keeps(rows: Rows, name: str, than: str) -> Finding:
    """Whether `name` keeps the right answers of `than` with less work. Any certain loss refutes it."""
    row, other = rows[name], rows[than]
    ratio, loss = row["work_ratio_to_none"], judge_answers(row, other)
    verdict = NO if ratio <= 1 or loss.loses else YES if loss is LossVerdict.KEPT else UNSHOWN
    figures = f"{_accuracy(other)} and {_accuracy(row)}: {_points(accuracy_difference(row, other))}"
    return verdict, f"{figures}, with 1/{ratio:.2f} of the work"


def ahead(rows: Rows, name: str, than: str) -> Finding:
    """Whether `name` has more right answers than `than`. It is refuted if a gain of `MARGIN` is excluded."""
    change = accuracy_difference(rows[name], rows[than])
    _, low, high = change
    verdict = YES if low > 0 else NO if high < MARGIN else UNSHOWN
    return verdict, f"{_accuracy(rows[name])} against {_accuracy(rows[than])}: {_points(change)}"


def faster(rows: Rows, name: str) -> Finding:
    """Whether `name` computes fewer row-layers than its baseline, and takes less time in each of `ROUNDS` rounds."""
    row = rows[name]
    verdict = NO if row["work_ratio_to_none"] <= 1 else _is_above(row, (1, 1))
    return verdict, f"{_speed(row)}, 1/{row['work_ratio_to_none']:.2f} of the work"


def quicker(rows: Rows, name: str, than: str) -> Finding:
    """Whether `name` gains more time on the common baseline than `than` does, in each of `ROUNDS` rounds."""
    row, other = rows[name], rows[than]
    return _is_above(row, other["ratio_range"]), f"{_speed(row)} and {_speed(other)}"


def deepens(rows: Rows, *names: str) -> Finding:
    """Whether the depth does not fall from row to row, and is larger in the last row than in the first."""
    depths = [rows[name]["prefix_depth"] for name in names]
    rises = depths == sorted(depths) and depths[-1] > depths[0]
    return YES if rises else NO, f"depths {', '.join(f'{depth:g}' for depth in depths)}"


TESTS: Mapping[str, Callable[..., Finding]] = {
    test.__name__: test for test in (loses, keeps, ahead, faster, quicker, deepens)
}


def claims_table(claims: Iterable[Claim], records: Iterable[Record]) -> str:
    """A Markdown table of `claims`, with the verdicts that follow from `records` of the papers' tables.

    Of several records of one table the first counts. Raises `RecordError` if one is of another version of its table,
    and `UnknownNameError` or `KeyError` if a claim names a table or a row that does not exist.
    """
    by_table: dict[str, Record] = {}
    for record in records:
        by_table.setdefault(record.about["settings"]["table"], record)
    lines = [[claim.paper, claim.said, *_verdict_cells(claim, by_table)] for claim in claims]
    return markdown_table(["paper", "what it says", "shown here", "at which scale", "figures, reasons"], lines)


def _verdict_cells(claim: Claim, records: Mapping[str, Record]) -> list[str]:
    """The verdict of a claim, the scale of its table with a link to it, and figures or reasons."""
    if claim.table is None:
        return [claim.instead, "-", claim.because]
    record = records.get(claim.table)
    if record is None:
        return [UNTESTED, "-", f"no results are kept of {claim.table}"]
    table = load_table(claim.table)
    rounds = record.about["settings"]["rounds"]
    rows = {name: {**row, "rounds": rounds} for name, row in results_of(table, record).items()}
    verdict, figures = claim.judge(rows)
    model, size = record.about["model"], record.about["parameters"] / 1e6
    heading = f"{table.name}: {table.title}".lower()
    anchor = "".join(letter for letter in heading if letter.isalnum() or letter in " -").replace(" ", "-")
    scale = f"`{model}`, {size:.2f}M parameters ([{claim.table}](#{anchor}))"
    because = f" {claim.because[0].upper()}{claim.because[1:]}." if claim.because else ""
    return [verdict, scale, f"{figures}.{because}"]


def _accuracy(row: Result) -> str:
    """The share of right answers in percent."""
    return percent(row["accuracy"])


def _points(change: Estimate) -> str:
    """A difference of shares with its interval, such as "+1.0 points (-2.0 to +4.0)"."""
    share, low, high = (100 * value for value in change)
    return f"{share:+.1f} points ({low:+.1f} to {high:+.1f})"


def _is_above(row: Result, other_range: Sequence[float]) -> str:
    """The verdict on whether the speeds of the rounds of `row` lie above `other_range`; unshown in few rounds."""
    if row["rounds"] < ROUNDS:
        return UNSHOWN
    low, high = row["ratio_range"]
    other_low, other_high = other_range
    return YES if low > other_high else NO if high <= other_low else UNSHOWN


def _speed(row: Result) -> str:
    """The speed as a multiple of the baseline's, with the range of its rounds."""
    low, high = row["ratio_range"]
    rounds = f"{low:.2f} to {high:.2f} in {row['rounds']} rounds" if row["rounds"] > 1 else "one round"
    return f"{row['ratio_to_none']:.2f}x the speed ({rounds})"

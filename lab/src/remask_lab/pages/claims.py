"""What each paper claims (`claims.toml`), and whether our tables show it: verdicts follow from the kept results."""

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
"""A verdict, and the figures that it follows from."""

YES, NO, UNSHOWN = "yes", "**no**", "not shown at this size"
UNTESTED, ELSEWHERE = "not run", "other model needed"
ROUNDS = 6
"""The least and the largest of so many paired rounds enclose the median with 97 % (1 - 2^(1 - n)): a sign test."""
FILE = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim, with the paper's figures; `shows` are tests of the results of `table`: the weakest verdict counts.

    `because` is what else a reader must know of the verdict, or why there is no table; then `instead` is the verdict.
    A test is the name of one of `TESTS`, names of the table's rows, and what else it takes.
    """

    paper: str
    said: str
    table: str | None = None
    shows: Sequence[Sequence[str]] = ()
    because: str = ""
    instead: str = ELSEWHERE

    def judge(self, rows: Rows) -> Finding:
        """What the rows of its table show of it, and their figures. Raises `KeyError` where one is not there."""
        found = [TESTS[test](rows, *names) for test, *names in self.shows]
        verdict = max((verdict for verdict, _ in found), key=(YES, UNSHOWN, NO).index)
        return verdict, "; ".join(figures for _, figures in found)


def read_claims() -> list[Claim]:
    return [Claim(**each) for each in tomllib.loads(FILE.read_text(encoding="utf-8"))["claims"]]


def loses(rows: Rows, name: str, than: str, points: str = f"{100 * MARGIN:g}") -> Finding:
    """`name` has fewer right answers than `than`; no where a loss of `points`, such as the paper's, is excluded."""
    over = accuracy_difference(rows[name], rows[than])
    verdict = YES if over[2] < 0 else NO if over[1] > -float(points) / 100 else UNSHOWN
    return verdict, f"{_right(rows[than])} to {_right(rows[name])}: {_points(over)}"


def keeps(rows: Rows, name: str, than: str) -> Finding:
    """`name` keeps the right answers of `than`, with less work; no where it loses some, however few."""
    row, other = rows[name], rows[than]
    saved, found = row["work_ratio_to_none"], judge_answers(row, other)
    verdict = NO if saved <= 1 or found.loses else YES if found is LossVerdict.KEPT else UNSHOWN
    told = f"{_right(other)} and {_right(row)}: {_points(accuracy_difference(row, other))}"
    return verdict, f"{told}, with 1/{saved:.2f} of the work"


def ahead(rows: Rows, name: str, than: str) -> Finding:
    """`name` has more right answers than `than`; no where it has less than `MARGIN` more."""
    over = accuracy_difference(rows[name], rows[than])
    verdict = YES if over[1] > 0 else NO if over[2] < MARGIN else UNSHOWN
    return verdict, f"{_right(rows[name])} against {_right(rows[than])}: {_points(over)}"


def faster(rows: Rows, name: str) -> Finding:
    """`name` computes fewer row-layers than its baseline, and takes less time in each of `ROUNDS` rounds."""
    row = rows[name]
    low, high = row["ratio_range"]
    verdict = NO if row["work_ratio_to_none"] <= 1 else _beyond(row, low, high, 1, 1)
    return verdict, f"{_speed(row)}, 1/{row['work_ratio_to_none']:.2f} of the work"


def quicker(rows: Rows, name: str, than: str) -> Finding:
    """`name` gains more time on the common baseline than `than` does, in each of `ROUNDS` rounds."""
    own, other = rows[name], rows[than]
    return _beyond(own, *own["ratio_range"], *other["ratio_range"]), f"{_speed(own)} and {_speed(other)}"


def deepens(rows: Rows, *names: str) -> Finding:
    """The depth does not fall along the rows, and rises from the first to the last."""
    depths = [rows[name]["prefix_depth"] for name in names]
    rises = depths == sorted(depths) and depths[-1] > depths[0]
    return YES if rises else NO, f"depths {', '.join(f'{at:g}' for at in depths)}"


TESTS: Mapping[str, Callable[..., Finding]] = {
    test.__name__: test for test in (loses, keeps, ahead, faster, quicker, deepens)
}


def claims_table(claims: Iterable[Claim], records: Iterable[Record]) -> str:
    """`claims` in Markdown, with what `records` of the papers' tables show of them.

    Of several records of one table the first counts. Raises `RecordError` where one is of another version of its table,
    and `UnknownNameError` or `KeyError` where a claim names a table or a row that is not there.
    """
    by_table: dict[str, Record] = {}
    for record in records:
        by_table.setdefault(record.about["settings"]["table"], record)
    lines = [[claim.paper, claim.said, *_judged(claim, by_table)] for claim in claims]
    return markdown_table(["paper", "what it says", "shown here", "at which scale", "figures, reasons"], lines)


def _judged(claim: Claim, records: Mapping[str, Record]) -> list[str]:
    if claim.table is None:
        return [claim.instead, "-", claim.because]
    record = records.get(claim.table)
    if record is None:
        return [UNTESTED, "-", f"no results are kept of {claim.table}"]
    table = load_table(claim.table)
    timed = {"rounds": record.about["settings"]["rounds"]}
    verdict, figures = claim.judge({name: {**row, **timed} for name, row in results_of(table, record).items()})
    model, size = record.about["model"], record.about["parameters"] / 1e6
    heading = f"{table.name}: {table.title}".lower()
    anchor = "".join(letter for letter in heading if letter.isalnum() or letter in " -").replace(" ", "-")
    scale = f"`{model}`, {size:.2f}M parameters ([{claim.table}](#{anchor}))"
    because = f" {claim.because[0].upper()}{claim.because[1:]}." if claim.because else ""
    return [verdict, scale, f"{figures}.{because}"]


def _right(row: Result) -> str:
    return percent(row["accuracy"])


def _points(over: Estimate) -> str:
    """A difference of shares with its interval, such as "+1.0 points (-2.0 to +4.0)"."""
    share, low, high = (100 * each for each in over)
    return f"{share:+.1f} points ({low:+.1f} to {high:+.1f})"


def _beyond(row: Result, low: float, high: float, other_low: float, other_high: float) -> str:
    """Whether a range of ratios over the rounds of `row` lies above another one."""
    if row["rounds"] < ROUNDS:
        return UNSHOWN
    return YES if low > other_high else NO if high <= other_low else UNSHOWN


def _speed(row: Result) -> str:
    """A ratio of times, with the range of its rounds."""
    low, high = row["ratio_range"]
    rounds = f"{low:.2f} to {high:.2f} in {row['rounds']} rounds" if row["rounds"] > 1 else "one round"
    return f"{row['ratio_to_none']:.2f}x the speed ({rounds})"

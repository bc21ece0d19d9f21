"""Claims of the papers beside the kept results: each names rows that are there, and verdicts follow from them."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from remask_lab.pages.claims import ELSEWHERE, NO, UNSHOWN, UNTESTED, YES, Claim, claims_table, read_claims
from remask_lab.pages.page import PAGES, RESULTS
from remask_lab.pages.results import read_all
from remask_lab.papers.definition import load_table
from remask_lab.papers.measure import SUBJECT
from remask_lab.papers.show import results_of
from remask_lab.records.interval import estimate
from remask_lab.records.record import Record

CLAIMS = read_claims()


def kept() -> list[Record]:
    return [record for record in read_all(RESULTS).values() if record.subject == SUBJECT]


def row(right: Sequence[str], **values: Any) -> dict[str, Any]:
    """What is kept of a row whose prefixes have these verdicts."""
    told = [letter == "1" for letter in "".join(right)]
    clusters = [number for number, each in enumerate(right) for _ in each]
    share, *interval = estimate(told, clusters)
    kept = {"accuracy": share, "accuracy_interval": interval, "verdicts": list(right), "rounds": 1}
    timed = {"work_ratio_to_none": 1.0, "ratio_to_none": 1.0, "ratio_range": [1.0, 1.0], "prefix_depth": 0.0}
    return kept | timed | values


def timed(low: float, high: float, work: float = 3.0, rounds: int = 6) -> dict[str, Any]:
    between = {"ratio_to_none": (low + high) / 2, "ratio_range": [low, high]}
    return row(GOOD, work_ratio_to_none=work, rounds=rounds, **between)


GOOD, HALF, BAD = ["11"] * 100, ["11", "00"] * 50, ["00"] * 100
ROWS = {
    "none": row(GOOD),
    "cache": row(GOOD, work_ratio_to_none=3.0, prefix_depth=2.0),
    "half": row(HALF, work_ratio_to_none=3.0, prefix_depth=3.0),
    "reuse": row(BAD, work_ratio_to_none=4.0),
    "few": row(GOOD[:4]),
    "few, cached": row(GOOD[:4], work_ratio_to_none=3.0),
    "twice": timed(1.9, 2.1),
    "once": timed(2.0, 2.0, rounds=1),
    "slower": timed(0.8, 0.9),
    "either": timed(0.9, 1.1),
    "thrice": timed(2.8, 3.2, work=0.9),
}


@pytest.mark.parametrize(
    ("shows", "verdict", "figures"),
    [
        ([["loses", "reuse", "none"]], YES, r"100\.0 % to 0\.0 %: -100\.0 points \(-100\.0 to -9"),
        ([["loses", "cache", "none"]], NO, r".*: \+0\.0 points \(-3\.0 to \+3\.0\)"),
        ([["loses", "cache", "none", "1"]], UNSHOWN, ""),
        ([["loses", "few, cached", "few"]], UNSHOWN, ""),
        ([["keeps", "cache", "none"]], YES, r".* with 1/3\.00 of the work"),
        ([["keeps", "none", "none"]], NO, ""),  # it saves nothing
        ([["keeps", "half", "none"]], NO, ""),
        ([["keeps", "few, cached", "few"]], UNSHOWN, ""),
        ([["ahead", "cache", "half"]], YES, r"100\.0 % against 50\.0 %"),
        ([["ahead", "none", "cache"]], NO, ""),
        ([["ahead", "few", "few, cached"]], UNSHOWN, ""),
        ([["faster", "twice"]], YES, r"2\.00x the speed \(1\.90 to 2\.10 in 6 rounds\), 1/3\.00 of the work"),
        ([["faster", "once"]], UNSHOWN, r"2\.00x the speed \(one round\)"),
        ([["faster", "slower"]], NO, ""),
        ([["faster", "either"]], UNSHOWN, ""),
        ([["faster", "thrice"]], NO, ""),
        ([["quicker", "twice", "either"]], YES, r"2\.00x the speed .* and 1\.00x the speed"),
        ([["quicker", "either", "twice"]], NO, ""),
        ([["quicker", "once", "either"]], UNSHOWN, ""),
        ([["deepens", "none", "cache", "half"]], YES, "depths 0, 2, 3"),
        ([["deepens", "none", "half", "cache"]], NO, "depths 0, 3, 2"),
        ([["faster", "twice"], ["faster", "once"]], UNSHOWN, ".*; .*"),
        ([["faster", "once"], ["faster", "slower"], ["faster", "twice"]], NO, ""),
    ],
)
def test_verdicts(shows: list[list[str]], verdict: str, figures: str) -> None:
    found, said = Claim("A", "it is so", "a-1", shows).judge(ROWS)
    assert found == verdict
    assert re.match(figures, said), said


def test_every_claim_is_tested_on_kept_results_or_says_why_not() -> None:
    records = {record.about["settings"]["table"]: record for record in kept()}
    for claim in CLAIMS:
        assert (claim.table is None) is (not claim.shows)
        if claim.table is None:
            assert claim.because, claim.said
        elif claim.table in records:
            rows = results_of(load_table(claim.table), records[claim.table])
            _, figures = claim.judge({name: {**each, "rounds": 1} for name, each in rows.items()})
            assert figures


def test_the_table_says_what_is_shown_and_where() -> None:
    shown, other = ["loses", "vLLM", "No caching"], ["keeps", "vLLM", "No caching"]
    asked = (
        Claim("A", "it is so", "bicache-1", [shown], "with reservations"),
        Claim("A", "it is not", "bicache-1", [shown, other]),
        Claim("B", "too large", because="no GPU"),
    )
    lines = claims_table(asked, kept()).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[2] for line in cells] == [YES, NO, ELSEWHERE]
    assert cells[0][4].endswith(" points (-100.0 to -92.6). With reservations.")
    assert "`bundled`, 1.09M parameters ([bicache-1](#bicache-1-" in cells[0][3]
    assert cells[2][3:] == ["-", "no GPU"]
    assert f"| {UNTESTED} " in claims_table(asked, [])


def test_sections_that_are_linked_are_on_the_page() -> None:
    page = PAGES["results"].read_text(encoding="utf-8")
    for claim in CLAIMS:
        if claim.table is not None:
            assert f"\n## {claim.table}: {load_table(claim.table).title}\n" in page

"""Claims of the papers beside the kept results: each names rows that are there, and verdicts follow from them."""

from typing import Any

import pytest

from remask_lab.pages import claims, results
from remask_lab.pages.claims import (
    CLAIMS,
    NO,
    UNTESTED,
    YES,
    Claim,
    ahead,
    all_of,
    claims_table,
    deepens,
    faster,
    keeps,
    loses,
    quicker,
)
from remask_lab.papers.definition import load_table
from remask_lab.papers.measure import SUBJECT
from remask_lab.papers.show import results_of
from remask_lab.records.record import Record


def row(accuracy: float, spread: float, **values: float) -> dict[str, Any]:
    kept = {"work_ratio_to_none": 1.0, "ratio_to_none": 1.0, "throughput_tok_s": 10.0, "prefix_depth": 0.0}
    return {"accuracy": accuracy, "accuracy_interval": [accuracy - spread, accuracy + spread], **kept, **values}


ROWS = {
    "none": row(0.95, 0.04),
    "reuse": row(0.1, 0.1, work_ratio_to_none=4.0, ratio_to_none=0.9),
    "cache": row(0.9, 0.06, work_ratio_to_none=3.0, ratio_to_none=2.0, throughput_tok_s=20.0, prefix_depth=2.0),
    "deep": row(0.5, 0.2, prefix_depth=3.0),
}


@pytest.mark.parametrize(
    ("test", "shown", "figures"),
    [
        (loses("reuse", "none"), True, "95.0 % (91.0 to 99.0) to 10.0 % (0.0 to 20.0)"),
        (loses("cache", "none"), False, "95.0 % (91.0 to 99.0) to 90.0 % (84.0 to 96.0)"),
        (keeps("cache", "none"), True, "95.0 % (91.0 to 99.0) and 90.0 % (84.0 to 96.0), with 1/3.00 of the work"),
        (keeps("none", "none"), False, "95.0 % (91.0 to 99.0) and 95.0 % (91.0 to 99.0), with 1/1.00 of the work"),
        (keeps("deep", "none"), False, "95.0 % (91.0 to 99.0) and 50.0 % (30.0 to 70.0), with 1/1.00 of the work"),
        (ahead("cache", "deep"), True, "90.0 % (84.0 to 96.0) against 50.0 % (30.0 to 70.0)"),
        (ahead("none", "cache"), False, "95.0 % (91.0 to 99.0) against 90.0 % (84.0 to 96.0)"),
        (faster("cache"), True, "2.00x the speed, 1/3.00 of the work"),
        (faster("reuse"), False, "0.90x the speed, 1/4.00 of the work"),
        (quicker("cache", "none"), True, "20 and 10 tokens/s"),
        (deepens("none", "cache", "deep"), True, "depths 0, 2, 3"),
        (deepens("none", "deep", "cache"), False, "depths 0, 3, 2"),
        (all_of(faster("cache"), faster("reuse")), False, "2.00x the speed, 1/3.00 of the work; 0.90x the speed, 1/4"),
    ],
)
def test_verdicts(test: claims.Test, shown: bool, figures: str) -> None:
    found, said = test(ROWS)
    assert found is shown
    assert said.startswith(figures)


def test_every_claim_is_tested_on_kept_results_or_says_why_not() -> None:
    records = {
        record.about["settings"]["table"]: record
        for record in results.read_all(results.RESULTS).values()
        if record.subject == SUBJECT
    }
    for claim in CLAIMS:
        assert (claim.table is None) is (claim.test is None)
        if claim.test is None or claim.table is None:
            assert claim.because, claim.said
        elif claim.table in records:
            shown, figures = claim.test(results_of(load_table(claim.table), records[claim.table]))
            assert isinstance(shown, bool)
            assert figures


def test_the_table_says_what_is_shown_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [each for each in results.read_all(results.RESULTS).values() if each.subject == SUBJECT]
    asked = (
        Claim("A", "it is so", "bicache-1", lambda _: (True, "1"), "with reservations"),
        Claim("A", "it is not", "bicache-1", lambda _: (False, "2")),
        Claim("B", "too large", because="no GPU"),
    )
    monkeypatch.setattr(claims, "CLAIMS", asked)
    lines = claims_table(records).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [line[2] for line in cells] == [YES, NO, UNTESTED]
    assert cells[0][4] == "1. With reservations."
    assert "`bundled`, 1.1M parameters ([bicache-1](#bicache-1-" in cells[0][3]
    assert cells[2][3:] == ["-", "no GPU"]
    kept: list[Record] = []
    assert "no results are kept of bicache-1" in claims_table(kept)


def test_sections_that_are_linked_are_on_the_page() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    for claim in CLAIMS:
        if claim.table is not None:
            assert f"\n## {claim.table}: {load_table(claim.table).title}\n" in page

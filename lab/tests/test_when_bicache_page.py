"""The page that says when BiCache is needed, and the minutes of a benchmark."""

from pathlib import Path
from typing import Any

import pytest

from remask.errors import RecordError
from remask_lab.gpu.results import benchmark_table
from remask_lab.pages.page import PAGES, RESULTS
from remask_lab.pages.when_bicache import Kind, kinds, main, page, predictor_table
from remask_lab.records.interval import estimate

ASKED = (("model", "other"), ("another", "one"), ("model", "one"))


def row(lost: int) -> dict[str, Any]:
    """A row with `lost` wrong answers to questions of 40 prefixes."""
    verdicts = ["0"] * lost + ["1"] * (40 - lost)
    share, *interval = estimate([verdict == "1" for verdict in verdicts], list(range(40)))
    return {"accuracy": share, "accuracy_interval": interval, "verdicts": verdicts, "work_ratio_to_none": 2.0}


@pytest.mark.parametrize(
    ("rule_depth", "lost", "verdict"),
    [
        (2, {1: 0, 2: 1, 3: 9}, "right: the next one loses answers"),
        (1, {1: 0, 2: 1, 3: 9}, "not too bold"),
        (2, {1: 0, 2: 9, 3: 20}, "too bold: 2 loses answers"),
        (3, {1: 9, 2: 0, 3: 20}, "too bold: 1 loses answers"),
        (2, {1: 0, 3: 1}, "no depth loses answers"),
    ],
)
def test_a_depth_is_judged_by_the_answers_that_it_loses(rule_depth: int, lost: dict[int, int], verdict: str) -> None:
    """One answer of 40 is no loss that is shown; nine are."""
    depths = {depth: row(number) for depth, number in lost.items()}
    assert (
        Kind("model", "task", "a task", rule_depth=rule_depth, layers=3, rows={"none": row(0)}, depths=depths).verdict
        == verdict
    )


def test_each_way_to_judge_stands_beside_the_answers_to_the_same_task() -> None:
    """Whatever the order of the cases, and with "-" where no answers were compared."""
    depths = {"2": {"nats": 0.1}, "10": {"nats": 0.2}, "1": {"nats": 0.0}}
    case = {"rule": [2, 3], "rule_by_rows": [1], "prefix_ratio": 0.5, "depths": depths}
    page_kinds = [
        Kind("model", task, task, rule_depth=2, layers=3, rows={"none": row(0)}, depths={1: row(lost), 2: row(20)})
        for task, lost in (("one", 0), ("other", 9))
    ]
    cases = [{**case, "model": model, "task": task} for model, task in ASKED]
    lines = predictor_table(cases, page_kinds).splitlines()[2:]
    assert lines == [
        "| `model`, other | 50 % | 2 | 1 | 2 | 0 |",
        "| `another`, one | 50 % | 2 | 1 | 2 | - |",
        "| `model`, one | 50 % | 2 | 1 | 2 | 1 |",
    ]


def test_minutes_of_a_benchmark_by_hand() -> None:
    shape = {"batches": [1, 8], "preset": "p", "canvas": 12, "response": 4, "prefix": 6}
    cell = {"requests": 8, "tokens_per_step": 2, "settings": {}}
    rows = [{**cell, "cache": "none", "tok_s": speed, "ms_per_step": ms} for speed, ms in ((1.0, 99.0), (2.0, 60.0))]
    gpu = {"shape": shape, "rows": rows, "gpu": "a GPU", "commit": "123456789", "date": "2026-01-01"}
    table = benchmark_table(gpu, 1600, 100)
    assert "| none | - | 20 |" in table, "1,600 questions / 8 x 100 steps x 60 ms = 1,200 s"
    assert "| block-dual | - | - |" in table
    assert "1600 times 100 steps of 2 tokens" in table
    assert "8 tokens of prompt, 6 of them shared" in table


@pytest.mark.thorough
def test_the_kept_page_is_made_of_the_kept_results() -> None:
    text = PAGES["when-bicache"].read_text(encoding="utf-8")
    page_kinds = kinds(RESULTS)
    assert text == page(RESULTS, page_kinds), "run: python -m remask_lab pages when-bicache"
    assert len(text.split()) < 1200
    assert [kind.verdict.split(":")[0] for kind in page_kinds] == ["right", "right", *["too bold"] * 3]
    assert (PAGES["when-bicache"].parent / "images" / "when-bicache.png").stat().st_size > 10_000


def test_without_an_h200_or_results_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecordError, match="nothing of an H200"):
        page(tmp_path, [])
    assert main(["--results", str(tmp_path), "--output", str(tmp_path / "page.md")]) == 2
    assert "there are no results" in capsys.readouterr().err

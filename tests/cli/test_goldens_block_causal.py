"""The golden SDAR runs through `remask generate`: token ids, order of transfers, and tokens found in shared pages."""

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cli.goldens import generate
from tests.goldens import block_causal as goldens

Cache = Literal["exact", "none"]
EACH_CACHE = pytest.mark.parametrize("cache", ["exact", "none"])
EACH_MODEL = pytest.mark.parametrize("model", goldens.DECODED)
SHARED = [
    pytest.param(model, family, page_size, id=f"{family.id}-{page_size}")
    for model in goldens.DECODED
    for family in goldens.families(model)
    for page_size in family.page_sizes
]


def check(run: goldens.Run, answer: dict[str, Any]) -> None:
    """Everything that binds for one run."""
    assert answer.get("error") is None, run.id
    assert answer["token_ids"] == run.expected_ids(), run.id
    trace = [(event["positions"], event["token_ids"]) for event in answer["trace"]]
    assert trace == run.expected_transfers(), run.id


def ask(tmp_path: Path, model: str, runs: list[goldens.Run], cache: Cache, *options: str) -> dict[str, dict[str, Any]]:
    """The checked answers by run id."""
    answers = generate(tmp_path, goldens.model_dir(model), (run.request_line(cache) for run in runs), *options)
    assert set(answers) == {run.id for run in runs}
    for run in runs:
        check(run, answers[run.id])
    return answers


@pytest.mark.few(7)
@EACH_MODEL
@EACH_CACHE
def test_all_golden_runs_of_a_model_in_one_call(tmp_path: Path, model: str, cache: Cache) -> None:
    """Lines of all strategies, block lengths and stop ids stand in one file, so they run batched together."""
    ask(tmp_path, model, goldens.runs(model), cache)


@pytest.mark.few(7)
@EACH_MODEL
@EACH_CACHE
@pytest.mark.parametrize("options", [["--max-num-seqs", "1"], ["--max-row-layers", "200", "--max-num-seqs", "5"]])
def test_the_answer_does_not_depend_on_the_batch(tmp_path: Path, model: str, cache: Cache, options: list[str]) -> None:
    """One at a time, or a few at a time under a tight budget."""
    ask(tmp_path, model, goldens.runs(model)[::9], cache, *options)


@pytest.mark.few(13)
@pytest.mark.parametrize(("model", "family", "page_size"), SHARED)
def test_a_family_finds_its_common_left_parts_in_shared_pages(
    tmp_path: Path, model: str, family: goldens.Family, page_size: int
) -> None:
    """One after the other from an empty pool: what they find is counted, what they answer does not change."""
    runs = [visit.run for visit in family.visits]
    answers = ask(tmp_path, model, runs, "exact", "--page-size", str(page_size), "--max-num-seqs", "1")
    found = [answers[run.id]["usage"]["cached_tokens"] for run in runs]
    assert found == [visit.all_page_hits[page_size] for visit in family.visits]
    assert any(found)

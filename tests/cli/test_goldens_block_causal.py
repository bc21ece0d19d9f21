"""The golden runs of SDAR, LLaDA2 and mixtures of experts through `remask generate`.

Token ids, order of transfers, edits, and tokens found in shared pages.
"""

from pathlib import Path
from typing import Any, Literal

import pytest

from tests import goldens
from tests.cli.goldens import check_trace, generate
from tests.goldens import block_causal, moe

Cache = Literal["exact", "none"]
OPTIONS = [["--max-num-seqs", "1"], ["--max-row-layers", "200", "--max-num-seqs", "5"]]
EACH_OPTIONS = pytest.mark.parametrize("options", OPTIONS, ids=["one at a time", "a tight budget"])
EACH_CACHE = pytest.mark.parametrize("cache", ["exact", "none"])
GOLDENS = {**dict.fromkeys(block_causal.DECODED, block_causal), **dict.fromkeys(moe.BLOCK_CAUSAL, moe)}
EACH_MODEL = pytest.mark.parametrize("model", GOLDENS)
SHARED = [
    pytest.param(model, family, page_size, id=f"{family.id}-{page_size}")
    for model in block_causal.DECODED
    for family in block_causal.families(model)
    for page_size in family.page_sizes
]


def ask(tmp_path: Path, model: str, runs: list[moe.Run], cache: Cache, *options: str) -> dict[str, dict[str, Any]]:
    """The answers by run id, in which everything that binds is right."""
    answers = generate(tmp_path, GOLDENS[model].model_dir(model), (run.request_line(cache) for run in runs), *options)
    assert set(answers) == {run.id for run in runs}
    for run in runs:
        answer = answers[run.id]
        assert answer.get("error") is None, run.id
        assert answer["token_ids"] == run.expected_ids(), run.id
        trace = [(event["positions"], event["token_ids"]) for event in answer["trace"]]
        assert trace == run.expected_transfers(), run.id
        assert [event.get("edits", []) for event in answer["trace"]] == run.expected_edits(), run.id
        assert all(event.get("edits") != [] for event in answer["trace"]), "left out where there are none"
    return answers


def ask_masked(tmp_path: Path, runs: list[dict[str, Any]], *options: str) -> None:
    named = {goldens.run_id(run): run for run in runs}
    lines = (goldens.request_line(run, name) for name, run in named.items())
    answers = generate(tmp_path, moe.model_dir(moe.MASKED), lines, *options)
    assert set(answers) == set(named)
    for name, run in named.items():
        assert answers[name]["token_ids"] == run["output_ids"], name
        check_trace(run, answers[name])
        forwards = goldens.expected_forwards(run)
        assert forwards in (None, answers[name]["usage"]["forwards"]), name


@pytest.mark.thorough
@EACH_MODEL
@EACH_CACHE
def test_all_golden_runs_of_a_model_in_one_call(tmp_path: Path, model: str, cache: Cache) -> None:
    """Lines of all strategies, block lengths and stop ids stand in one file, so they run batched together."""
    ask(tmp_path, model, GOLDENS[model].runs(model), cache)


@pytest.mark.few(7)
@EACH_MODEL
@EACH_CACHE
@EACH_OPTIONS
def test_the_answer_does_not_depend_on_the_batch(tmp_path: Path, model: str, cache: Cache, options: list[str]) -> None:
    """One at a time, or a few at a time under a tight budget: each expert is given other rows."""
    ask(tmp_path, model, GOLDENS[model].runs(model)[::9], cache, *options)


def test_llada_moe_in_one_call(tmp_path: Path) -> None:
    runs = moe.masked_runs()
    assert len(runs) == 76
    ask_masked(tmp_path, runs)


@pytest.mark.few(2)
@EACH_OPTIONS
def test_an_answer_of_llada_moe_does_not_depend_on_the_batch(tmp_path: Path, options: list[str]) -> None:
    ask_masked(tmp_path, moe.masked_runs()[::9], *options)


@pytest.mark.few(13)
@pytest.mark.parametrize(("model", "family", "page_size"), SHARED)
def test_a_family_finds_its_common_left_parts_in_shared_pages(
    tmp_path: Path, model: str, family: block_causal.Family, page_size: int
) -> None:
    """One after the other from an empty pool: what they find is counted, what they answer does not change."""
    runs = [visit.run for visit in family.visits]
    answers = ask(tmp_path, model, runs, "exact", "--page-size", str(page_size), "--max-num-seqs", "1")
    found = [answers[run.id]["usage"]["cached_tokens"] for run in runs]
    assert found == [visit.all_page_hits[page_size] for visit in family.visits]
    assert any(found)

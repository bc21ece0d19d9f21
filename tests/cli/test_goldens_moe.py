"""The golden runs of mixtures of experts through `remask generate`: token ids, transfers and edits."""

from pathlib import Path
from typing import Any, Literal

import pytest

from tests import goldens
from tests.cli.goldens import check_trace, generate
from tests.goldens import moe

Cache = Literal["exact", "none"]
EACH_CACHE = pytest.mark.parametrize("cache", ["exact", "none"])
EACH_MODEL = pytest.mark.parametrize("model", moe.BLOCK_CAUSAL)


def check_masked(tmp_path: Path, runs: dict[str, dict[str, Any]], *options: str) -> None:
    lines = (goldens.request_line(run, name) for name, run in runs.items())
    answers = generate(tmp_path, moe.model_dir(moe.MASKED), lines, *options)
    assert set(answers) == set(runs)
    for name, run in runs.items():
        assert answers[name]["token_ids"] == run["output_ids"], name
        check_trace(run, answers[name])
        forwards = goldens.expected_forwards(run)
        assert forwards in (None, answers[name]["usage"]["forwards"]), name


def check(tmp_path: Path, model: str, runs: list[moe.Run], cache: Cache, *options: str) -> None:
    answers = generate(tmp_path, moe.model_dir(model), (run.request_line(cache) for run in runs), *options)
    assert set(answers) == {run.id for run in runs}
    for run in runs:
        answer = answers[run.id]
        assert answer.get("error") is None, run.id
        assert answer["token_ids"] == run.expected_ids(), run.id
        trace = [(event["positions"], event["token_ids"]) for event in answer["trace"]]
        assert trace == run.expected_transfers(), run.id
        assert [event.get("edits", []) for event in answer["trace"]] == run.expected_edits(), run.id
        assert all(event.get("edits") != [] for event in answer["trace"]), "left out where there are none"


def test_llada_moe_in_one_call(tmp_path: Path) -> None:
    runs = {goldens.run_id(run): run for run in moe.masked_runs()}
    assert len(runs) == 76
    check_masked(tmp_path, runs)


@pytest.mark.few(3)
@EACH_MODEL
@EACH_CACHE
def test_all_golden_runs_of_a_model_in_one_call(tmp_path: Path, model: str, cache: Cache) -> None:
    """Lines of all strategies, block lengths and stop ids stand in one file, so they run batched together."""
    check(tmp_path, model, moe.runs(model), cache)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [["--max-num-seqs", "1"], ["--max-row-layers", "200", "--max-num-seqs", "5"]])
def test_the_answer_does_not_depend_on_the_batch(tmp_path: Path, options: list[str]) -> None:
    """One at a time, or a few at a time under a tight budget: each expert is given other rows."""
    check_masked(tmp_path, {goldens.run_id(run): run for run in moe.masked_runs()[::9]}, *options)
    for model in moe.BLOCK_CAUSAL:
        check(tmp_path, model, moe.runs(model)[::9], "exact", *options)

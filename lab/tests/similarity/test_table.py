"""Depths of a similarity table: the authors' cases, other taus, its file, and the command that writes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.tests.similarity.tables import AUTHORS, TABLE

from remask.errors import ConfigError, RecordError
from remask.llm import LLM
from remask.policies.bicache import DepthLookup
from remask_lab.papers.__main__ import main
from remask_lab.similarity.probe import limits_of
from remask_lab.similarity.rule import DepthRule, depth_entries
from remask_lab.similarity.table import SimilarityTable
from tests import goldens
from tests.depth.models import open_model

CASES = [
    (case["similarity"], float(tau), expected)
    for case in goldens.profiler()["table_cases"]
    for tau, expected in case["by_threshold"].items()
]
MODEL = ["--model", str(goldens.model_dir("llada")), "--dtype", "float32", "--device", "cpu"]


@pytest.mark.parametrize(("similarity", "tau", "expected"), CASES)
def test_golden_tables_and_lookups(similarity: list[list[float]], tau: float, expected: dict[str, Any]) -> None:
    entries = depth_entries(dict(enumerate(limits_of(AUTHORS, np.array(similarity)).tolist())), tau)
    assert entries == {int(r): b for r, b in expected["table"].items()}
    lookup = DepthLookup(entries)
    for ratio, depth in expected["lookup"].items():
        assert lookup.depth(int(ratio), 100) == (depth or 0)


def test_a_table_at_another_tau() -> None:
    table = replace(TABLE, layers=3, tau=0.8, limits={50: (0.9, 0.8, 0.7), 80: (0.95, 0.9, 0.85)})
    assert table.at(0.8) == DepthLookup({50: 1, 80: 3})
    assert table.at(0.89) == DepthLookup({50: 1, 80: 2})
    few = replace(table, limits={50: (0.9, 0.8), 80: (0.95, 0.9)})
    assert few.at(0.89) == DepthLookup({50: 1, 80: 2})
    with pytest.raises(ConfigError, match="without --needed-layers"):
        few.at(0.5)
    with pytest.raises(ConfigError, match="tau must lie between 0 and 1"):
        table.at(1.5)


def test_its_file(tmp_path: Path) -> None:
    llm, file = open_model("llada-tiny", dummy=True), tmp_path / "t.json"
    TABLE.save(file, llm, {"tau": 0.97}, 3)
    assert SimilarityTable.load(file, llm.loaded.fingerprint) == TABLE
    with pytest.raises(RecordError, match=r"is of the model 'llada-tiny' .*another one is loaded"):
        SimilarityTable.load(file, "other")
    content = json.loads(file.read_text())
    del content["data"]["limits"]
    file.write_text(json.dumps(content))
    with pytest.raises(RecordError, match="holds no similarities: 'limits'; measure again"):
        SimilarityTable.load(file, llm.loaded.fingerprint)


def profile(*options: str) -> int:
    return main(["profile", *MODEL, *options])


def test_the_command_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "t.json", tmp_path / "t.svg"
    options = ["--tau", "0.5", "--samples", "2", "--ratios", "50", "90", "--canvas", "100", "--seed", "3"]
    parts = ["--over-layers", "largest", "--over-requests", "mean-curve", "--at-boundary", "paper", "--joint"]
    assert profile(*options, *parts, "--output", str(file), "--plot", str(picture)) == 0
    out, llm = capsys.readouterr().out, LLM(MODEL[1], dtype="float32", device="cpu")
    saved = SimilarityTable.load(file, llm.loaded.fingerprint)
    assert (saved.tau, saved.samples, list(saved.curves), saved.definition) == (0.5, 2, [50, 90], "joint")
    assert "seed 3" in saved.source
    assert saved.rule == DepthRule("largest", "mean-curve", "paper")
    assert "rule: largest, mean-curve, paper" in out
    assert picture.exists()
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in ("50", "90")]
    assert rows == [[str(r), str(saved.lookup.depth(r, 100)), f"{b:.2f}"] for r, b in saved.request_depths.items()]


def test_growth_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3, 4]}\n')
    options = ["--max-samples", "16", "--ratios", "50", "--canvas", "20", "--prompts", str(prompts)]
    assert profile("--official", *options) == 0
    out = capsys.readouterr().out
    assert "official similarity, 16 requests" in out
    assert "Mean change of depth as N grew: 0.00 at 16" in out
    with pytest.raises(SystemExit):
        profile("--joint", "--official", *options)
    for option in ("--output", "--plot"):
        assert profile(option, str(tmp_path / "none" / "t.png")) == 2
        assert "there is no folder" in capsys.readouterr().err

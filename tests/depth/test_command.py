from pathlib import Path

import pytest

from remask.cli import profile
from remask.cli.main import parse
from remask.depth.find import DepthTable
from remask.errors import ConfigError
from remask_lab.similarity.rule import DepthRule
from tests import goldens

MODEL = ["--model", str(goldens.model_dir("llada")), "--dtype", "float32", "--device", "cpu"]


def remask(*args: str) -> int:
    return profile.run(parse(["--quiet", "profile", *MODEL, *args]))


def test_table_file_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "t.json", tmp_path / "t.svg"
    options = ["--tau", "0.5", "--samples", "2", "--ratios", "50", "90", "--canvas", "100", "--seed", "3"]
    assert remask(*options, "--output", str(table), "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    saved = DepthTable.load(table)
    assert (saved.tau, saved.samples, list(saved.curves)) == (0.5, 2, [50, 90])
    assert "seed 3" in saved.source
    assert saved.rule == DepthRule()
    assert "rule: leading, least-depth, safe" in out
    assert picture.exists()
    assert f"--depth-table {table}" in out
    rows = [line.split() for line in out.splitlines() if line.strip()[:2] in ("50", "90")]
    assert rows == [[str(r), str(saved.lookup.depth(r, 100)), f"{b:.2f}"] for r, b in saved.request_depths.items()]


def test_the_rule_is_an_option_in_three_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--samples", "2", "--ratios", "50", "--canvas", "40", "--tau", "0.5"]
    parts = ["--over-layers", "largest", "--over-requests", "mean-curve", "--at-boundary", "paper"]
    assert remask(*common, *parts, "--output", str(tmp_path / "t.json")) == 0
    assert DepthTable.load(tmp_path / "t.json").rule == DepthRule("largest", "mean-curve", "paper")
    assert "rule: largest, mean-curve, paper" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        remask("--at-boundary", "bold")


def test_growth_is_reported_and_nothing_is_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3, 4]}\n')
    options = ["--official", "--max-samples", "16", "--ratios", "50", "--canvas", "20", "--prompts", str(prompts)]
    assert remask(*options) == 0
    out = capsys.readouterr().out
    assert "official similarity, 16 requests" in out
    assert "Mean change of depth as N grew: 0.00 at 16" in out
    assert "Not saved" in out
    assert "no answers" in out
    assert "--input prompts.jsonl --caches reuse --depths 1" in out
    assert remask("--joint", *options[1:], "--output", str(tmp_path / "joint.json")) == 0
    assert DepthTable.load(tmp_path / "joint.json").definition == "joint"
    with pytest.raises(SystemExit):
        remask("--joint", *options)


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_targets_are_checked_before_anything_runs(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        remask(option, str(tmp_path / "none" / "t.png"))

"""`remask analyze` on shared prefixes: records, pictures and readings, and what is refused."""

from pathlib import Path

import pytest

from remask.cli import main
from remask_lab.records.record import read_record

DUMMY = ["--model", "llada-tiny", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
SHAPE = ["--requests", "2", "--prefixes", "1", "--prefix-tokens", "24", "--prompt-tokens", "4", "--max-tokens", "4"]


def analyze(*options: str) -> int:
    return main(["--quiet", "analyze", *options])


def check_picture(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") >= 1200


def test_prefix_similarity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "p.json", tmp_path / "plots"
    assert analyze("prefix-similarity", *DUMMY, *SHAPE, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze prefix-similarity")
    assert record.about["settings"]["name"] == "random tokens"
    assert (record.about["settings"]["tau"], record.about["seed"]) == (0.97, 2024)
    assert (record.data["requests"], record.data["steps"], record.data["prefix_tokens"]) == (2, 4, 24)
    assert len(record.data["similarity"]) == record.about["layers"]
    assert record.data["similarity"][0] == pytest.approx([1.0] * 4, abs=1e-6)
    check_picture(plots / "prefix-similarity.png")
    text = capsys.readouterr().out
    assert "llada-tiny: random tokens, 2 requests over 1 prefixes" in text
    assert record.data["reading"].split()[:5] == ["A", "prefix", "of", "24", "tokens"]
    assert " ".join(record.data["reading"].split()) in " ".join(text.split())


def test_the_authors_definition_on_the_bundled_task(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "bundled-transit", "--dtype", "float32", "--requests", "1", "--official", "--tau", "0.9"]
    assert analyze("prefix-similarity", *options) == 0
    text = capsys.readouterr().out
    assert "bundled-transit: transit, 1 requests over 1 prefixes" in text
    assert "stays above 0.9 in every step" in " ".join(text.split())


def test_guided_requests_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze("prefix-similarity", *DUMMY, "--sampling", '{"cfg_scale": 1}') == 2
    assert "leave cfg_scale out" in capsys.readouterr().err


GRID = ["--model", "bundled-transit", "--dtype", "float32", "--requests", "2", "--rounds", "1", "--cache", "bicache"]


def test_a_depth_table_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "other.json"
    options = ["--samples", "1", "--canvas", "64", "--ratios", "50", "--output", str(table)]
    assert main(["--quiet", "profile", *DUMMY, *options]) == 0
    assert analyze("grid", *GRID, "--depth-table", str(table)) == 2
    assert "is of the model 'llada-tiny'" in capsys.readouterr().err


def test_reuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "r.json", tmp_path / "plots"
    options = ["--depth", "1", "--refresh-interval", "2", "--traced", "1", "--rounds", "1"]
    assert analyze("reuse", *DUMMY, *SHAPE, *options, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze reuse")
    assert record.about["settings"]["depth"] == 1
    assert record.data["deep"]["depth"] == [1]
    assert [row["cache"] for row in record.data["collapse"]] == ["none", "reuse", "bicache"]
    assert "K/V refreshed every 2 steps" in record.data["reading"]
    assert "of its tokens are those of no cache" in record.data["reading"]
    for name in ("reuse-deep", "reuse-collapse"):
        check_picture(plots / f"{name}.png")
    assert "K/V of the prefix in deep layers" in capsys.readouterr().out


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depth", "0"], "has no shallow layers; give a depth of 1 to"),
        (["--depth", "99"], "exceeds the model's"),
        (["--traced", "0"], "--traced must be a whole number from 1"),
        (["--refresh-interval", "0"], "refresh_interval must be"),
    ],
)
def test_bad_reuse(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze("reuse", *DUMMY, *SHAPE, *options) == 2
    assert message in capsys.readouterr().err


def test_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots, prompts = tmp_path / "d.json", tmp_path / "plots", tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}\n')
    options = ["--samples", "2", "--canvas", "40", "--response", "4", "--ratios", "50", "90", "--system-prompts", "2"]
    tasks = ["--task", f"one={prompts}", "--task", f"two={prompts}"]
    assert analyze("depth", *DUMMY, *options, *tasks, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze depth")
    assert [task["task"] for task in record.data["tasks"]] == ["one", "two"]
    assert record.data["ratios"] == [50, 90]
    assert record.data["convergence"][0]["distance"] is None
    assert record.about["settings"]["samples"] == 2
    for name in ("depth-tasks", "depth-stability"):
        check_picture(plots / f"{name}.png")
    text = capsys.readouterr().out
    assert "ratio %" in text
    assert "a standard deviation of 0.00 over 2 tasks" in " ".join(text.split())


def test_a_task_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1]}\n')
    assert analyze("depth", *DUMMY, "--task", f"a={prompts}", "--task", f"a={prompts}") == 2
    assert "names 'a' twice" in capsys.readouterr().err


def test_leakage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots, prompts = tmp_path / "l.json", tmp_path / "plots", tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}\n')
    options = ["--samples", "1", "--canvas", "40", "--response", "4", "--ratios", "50", "90", "--steps", "2"]
    files = ["--prompts", str(prompts), "--output", str(output), "--plots", str(plots)]
    assert analyze("leakage", *DUMMY, *options, *files) == 0
    record = read_record(output, "analyze leakage")
    assert list(record.data["ratios"]) == ["50", "90"]
    assert record.about["settings"]["steps"] == 2
    check_picture(plots / "leakage.png")
    text = " ".join(capsys.readouterr().out.split())
    assert "1 prompts of p.jsonl" in text
    assert record.data["reading"] in text

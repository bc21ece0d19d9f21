"""`remask analyze` on shared prefixes: records, pictures, and what is refused."""

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
    assert f"above tau 0.97 in every request: in all steps {record.data['shallow']}, in the first step" in text


def test_the_authors_definition_on_the_bundled_task(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "bundled-transit", "--dtype", "float32", "--requests", "1", "--official", "--tau", "0.9"]
    assert analyze("prefix-similarity", *options) == 0
    text = capsys.readouterr().out
    assert "bundled-transit: transit, 1 requests over 1 prefixes" in text


def test_a_depth_table_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "other.json"
    assert main(["--quiet", "profile", *DUMMY, "--requests", "1", "--output", str(table)]) == 0
    words = ["--model", "bundled-transit", "--dtype", "float32", "--caches", "bicache", "--depth-table", str(table)]
    assert main(["--quiet", "bench", *words]) == 2
    assert "is of the model 'llada-tiny'" in capsys.readouterr().err


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
    assert "std over tasks" in text


def test_a_task_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [1]}\n')
    assert analyze("depth", *DUMMY, "--task", f"a={prompts}", "--task", f"a={prompts}") == 2
    assert "names 'a' twice" in capsys.readouterr().err

"""`remask analyze` on shared prefixes: records, pictures, and what is refused."""

import json
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


def test_first_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "f.json", tmp_path / "plots"
    options = ["--model", "bundled", "--dtype", "float32", "--requests", "6", "--prefixes", "3", "--seed", "31337"]
    assert analyze("first-predictions", *options, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze first-predictions")
    assert (record.about["settings"]["nats"], record.about["settings"]["requests"], record.about["seed"]) == (
        0.1,
        6,
        31337,
    )
    shifts = {shift["depth"]: shift for shift in record.data["shifts"]}
    assert list(shifts) == [1, 2, 3, 4, 6, 8, 9]
    assert (record.data["depth"], record.data["prefixes"], len(record.data["rule"])) == (2, 3, 6)
    assert shifts[2]["nats"] < 0.01 < 1 < shifts[3]["nats"]
    check_picture(plots / "first-predictions.png")
    text = " ".join(capsys.readouterr().out.split())
    assert "Up to depth 2 of 9 first predictions move by at most 0.1 nats" in text
    assert "--cache bicache --cache-config '{\"depth\": 2}'" in text
    assert text.count("remask bench --model bundled --caches none,reuse --depths 2,3") == 1


def test_first_predictions_of_own_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line counts, with its prefix and its length; `--requests` takes the first ones."""
    source, output = tmp_path / "own requests.jsonl", tmp_path / "f.json"
    lines = [
        {"prompt_token_ids": [*range(5, 25), 40 + at], "prefix_length": 20, "max_tokens": 4 + at} for at in range(3)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = [*DUMMY, "--input", str(source), "--depths", "all", "--nats", "50", "--output", str(output)]
    assert analyze("first-predictions", *options) == 0
    record = read_record(output, "analyze first-predictions")
    layers = record.about["layers"]
    assert [shift["depth"] for shift in record.data["shifts"]] == list(range(layers + 1))
    assert (record.data["requests"], record.data["prefixes"], record.data["prefix_tokens"]) == (3, 1, 20)
    assert (record.data["canvas_tokens"], record.data["depth"]) == (26, layers)
    assert record.data["shifts"][0]["nats"] == 0
    assert f"--input '{source}' --caches none,reuse --depths {layers}" in capsys.readouterr().out
    assert analyze("first-predictions", *options, "--requests", "1") == 0
    assert read_record(output).data["requests"] == 1
    assert read_record(output).data["shifts"][1]["nats_interval"] == [None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "random"], "--prompt and --input are requests of your own; leave --task out"),
        (["--prefixes", "2"], "leave --prefixes out"),
        (["--depths", "few"], "--depths must be numbers of layers separated by commas, or 'all'; got 'few'"),
        (["--depths", "-1"], "depth must be a number of layers >= 0"),
        (["--nats", "-1"], "--nats must be"),
        (["--sampling", '{"cfg_scale": 1}'], "leave cfg_scale out"),
    ],
)
def test_bad_first_predictions(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6, 7], "prefix_length": 2}\n')
    assert analyze("first-predictions", *DUMMY, "--input", str(source), *options) == 2
    assert message in capsys.readouterr().err


def test_first_predictions_without_a_prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    assert analyze("first-predictions", *DUMMY, "--input", str(source)) == 2
    assert "request '1' has no shared prefix to measure: set prefix_length" in capsys.readouterr().err


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

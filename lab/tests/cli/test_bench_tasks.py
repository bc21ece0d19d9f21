"""The options of `remask bench` that name a task, which other commands share."""

import json
from pathlib import Path

import pytest

from remask.cli import main

MODEL = ["--model", "bundled-tariff", "--dtype", "float32", "--device", "cpu"]


def bench(*options: str) -> int:
    return main(["--quiet", "bench", *MODEL, "--rounds", "1", *options])


@pytest.mark.thorough
def test_reuse_loses_the_questions_that_need_a_plan_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "questions.json"
    options = ["--task", "tariff", "--task-settings", '{"kinds": ["plan", "lookup"], "orders": 20}', "--requests", "12"]
    options += ["--caches", "none,reuse,bicache", "--cache-config", '{"bicache": {"depth": 2}}']
    assert bench(*options, "--baseline-steps", "off", "--answers", "--json", str(output)) == 0
    told = capsys.readouterr().out
    record = json.loads(output.read_text())
    assert record["about"]["settings"]["name"] == "tariff (orders=20, kinds=plan+lookup)"
    none, reuse, bicache = record["data"]["results"]
    (parts,) = (line for line in told.splitlines() if line.startswith("Parts of answers: none names "))
    assert f"plan {none['parts']['plan']:.3f}" in parts
    assert none["parts"]["plan"] >= 5 / 6
    assert bicache["parts"]["plan"] >= 5 / 6
    assert reuse["parts"]["plan"] == 0
    assert min(row["parts"]["lookup"] for row in (none, reuse, bicache)) >= 5 / 6
    answers = record["data"]["answers"]
    assert none["accuracy"] == sum(case["answers"][0]["correct"] for case in answers) / 12
    assert reuse["row_layers"] < bicache["row_layers"] < none["row_layers"]

"""`remask eval questions`, and the options that name a task, which other commands share."""

import json
from pathlib import Path

import pytest

from remask.cli import main

MODEL = ["--model", "bundled-tariff", "--dtype", "float32", "--device", "cpu"]


def questions(*options: str) -> int:
    return main(["--quiet", "eval", "questions", *MODEL, *options])


@pytest.mark.thorough
def test_reuse_loses_the_questions_that_need_a_plan_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "questions.json"
    options = ["--task", "tariff", "--task-settings", '{"kinds": ["plan", "lookup"], "orders": 20}', "--requests", "12"]
    options += [
        "--caches",
        "none,reuse,bicache",
        "--cache-config",
        '{"bicache": {"depth": 2}}',
        "--output",
        str(output),
    ]
    assert questions(*options) == 0
    assert "tariff (orders=20, kinds=plan+lookup), 12 requests" in capsys.readouterr().out
    none, reuse, bicache = (row["result"] for row in json.loads(output.read_text())["data"]["rows"])
    assert none["parts"]["plan"] >= 5 / 6
    assert bicache["parts"]["plan"] >= 5 / 6
    assert reuse["parts"]["plan"] == 0
    assert min(row["parts"]["lookup"] for row in (none, reuse, bicache)) >= 5 / 6
    assert none["accuracy"] == sum(sample["correct"] for sample in none["samples"]) / 12
    assert reuse["row_layers"] < bicache["row_layers"] < none["row_layers"]
    assert questions(*options) == 0
    assert f"3 rows were in {output} already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--task", "tarif"], "Did you mean 'tariff'"),
        (["--task-settings", '{"orders": 8}'], "name it with --task"),
        (["--task", "gsm8k", "--task-settings", '{"orders": 8}'], "the task gsm8k has no settings"),
        (["--task", "tariff", "--task-settings", '{"order": 8}'], "Did you mean 'orders'"),
        (["--task", "tariff", "--task-settings", '{"orders": 99}'], "orders must be a whole number from 4 to 64"),
        (["--task", "tariff", "--task-settings", '["orders"]'], "--task-settings must be a JSON object"),
        (["--task", "transit", "--task-settings", '{"rows": 2}'], "rows must be a whole number from 4"),
        (["--task", "random"], "random tokens have no right answers"),
    ],
)
def test_bad_tasks(capsys: pytest.CaptureFixture[str], options: list[str], text: str) -> None:
    assert questions(*options) == 2
    assert text in capsys.readouterr().err

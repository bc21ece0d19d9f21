"""The measurements of `remask_lab.speed` run, at sizes that say nothing about speed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError
from remask_lab.records.record import read_record
from remask_lab.speed.__main__ import MEASUREMENTS
from remask_lab.speed.__main__ import main as speed
from remask_lab.speed.command import run_measurement

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def run(name: str, *words: str) -> None:
    """Run a measurement; words may stand together in one string."""
    run_measurement("speed", name, *MEASUREMENTS[name], [each for word in words for each in word.split(" ")])


def measured(capsys: Capture, name: str, *words: str) -> Any:
    """The JSON that a measurement prints."""
    run(name, *words)
    return json.loads(capsys.readouterr().out)


def test_every_measurement_is_a_function_of_its_module() -> None:
    for name, (module, _) in MEASUREMENTS.items():
        assert callable(getattr(importlib.import_module(module), name))


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="--block must be at least 4, got 3"):
        run("large", "--block 3")


def test_a_users_error_is_one_line(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["speed", "policies", "--model", "llada-1t"])
    assert speed() == 2
    assert capsys.readouterr().err.startswith("error: Unknown preset 'llada-1t'.")


@pytest.mark.parametrize(
    "code",
    [
        "import remask",
        "from remask.cli import main; main(['--version'])",
        "from remask.cli import main; main(['--help'])",
        "import remask_lab.speed.__main__",
    ],
)
def test_starting_imports_no_torch(code: str) -> None:
    program = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: os._exit(3) if {'torch', 'numpy', 'transformers'} & set(sys.modules) else None)\n"
        + code
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_start_and_a_step_beside_its_products(capsys: Capture) -> None:
    told = measured(capsys, "large", "--model", "llada-tiny", "--block", "8", "--turns", "2")
    assert told["kv_tokens"] >= 2 * told["max_model_len"]
    assert 0 < told["weight_bytes"] < told["peak_bytes"] <= told["peak_bytes_after"]
    assert 0 < told["ratio_range"][0] <= told["ratio"] <= told["ratio_range"][1]


@pytest.mark.parametrize("model", ["llada-tiny", "dream-tiny"])
def test_every_policy_beside_none(capsys: Capture, tmp_path: Path, model: str) -> None:
    target = tmp_path / "policies.json"
    shape = "--batch 2 --prompt 24 --prefix 16 --response 16 --block-length 8"

    def rows_of(*words: str) -> dict[str, dict[str, Any]]:
        run("policies", "--model", model, shape, *words, "--json", str(target))
        return {row["cache"]: row for row in json.loads(target.read_text(encoding="utf-8"))["results"]}

    rows = rows_of("--steps", "4")
    none = rows.pop("none")
    assert (none["gain"], none["work_gain"], none["quotient"]) == (1, 1, 1)
    assert none["rows_a_layer"] == [80, 80]
    assert set(rows) >= {"dkv-decode", "dllm-cache", "bicache+block-dual"}
    assert ("dkv-greedy" in rows) is (model == "llada-tiny")
    block = rows["block-dual"]
    assert block["work_gain"] == pytest.approx(4 * 80 / (80 + 3 * 16)), "one full pass and three over two blocks of 8"
    assert block["steps_with_many_rows"] == 1
    assert block["times_bare_with_few_rows"] > 0
    assert rows["reuse"]["quotient"] is None
    assert rows["reuse"]["rows_a_layer"] == [48, 48], "without the prefix-only pass"
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in rows)
    rows = rows_of("--prefix", "0", "--steps", "1")
    assert {row["work_gain"] for row in rows.values()} == {1}, "without a prefix every policy begins with a full pass"


def test_uniform(capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "uniform.json"
    shape = "--canvas 64 --prompt 8 --block-length 8 --steps 4 --full-steps 2"
    run("uniform", "--model", "gidd-tiny", shape, "--json", str(target))
    report = read_record(target, "uniform block").data
    rows = {row["cache"]: row for row in report["results"]}
    assert rows["none"]["gain"] == rows["none"]["bound_by_rows"] == 1
    assert rows["block-prefix"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 56))
    assert rows["uniform-cache r=0"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 8))
    assert rows["uniform-cache r=4"]["bound_by_rows"] < rows["uniform-cache r=0"]["bound_by_rows"]
    assert all(ms > 0 for spent in report["operations_ms"].values() for ms in spent.values())
    assert "| cached |" in capsys.readouterr().out

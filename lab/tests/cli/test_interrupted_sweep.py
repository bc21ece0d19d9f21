"""Sweeps that end early, by `kill -9` or on a full disk: measured rows are kept, and not measured again."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.tests.cli.test_eval_tasks import GSM8K

from remask.cli import main
from remask_lab.records.record import read_record
from tests.disks import small_disk

# The process kills itself when it has written its record for the second time.
KILLED = """
import itertools, os, signal, sys
from lab.tests.cli.test_eval_tasks import GSM8K

from remask.cli import main
replace, written = os.replace, itertools.count(1)
def replaces(*names, **options):
    replace(*names, **options)
    if next(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replaces
sys.exit(main())
"""
CACHES = ["none", "reuse", "bicache"]
WORDS = ["--quiet", "eval", "tasks", "--model", "bundled-transit", "--dtype", "float32", "--device", "cpu"]
WORDS += ["--tasks", "remask_gsm8k", "--data", str(GSM8K), "--limit", "8", "--caches", ",".join(CACHES)]
WORDS += ["--sampling", '{"max_tokens": 4, "steps": 2}', "--metric", "agreement"]


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(path, "eval tasks").data["rows"]
    return found


@pytest.mark.thorough
def test_a_killed_sweep_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    words = [*WORDS, "--output", str(path)]
    sweep = subprocess.run([sys.executable, "-c", KILLED, *words], stdout=subprocess.DEVNULL, check=False)
    assert sweep.returncode == -signal.SIGKILL
    before = rows(path)
    assert len(before) == 2, "it was killed amid the sweep"
    assert main(words) == 0
    after = rows(path)
    assert after[: len(before)] == before, "times too: these rows were not measured again"
    assert [row["point"]["cache"] for row in after] == CACHES


@pytest.mark.thorough
def test_a_sweep_on_a_full_disk_keeps_its_rows_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 2) as reason:
        path = tmp_path / "disk" / "sweep.json"
        words = [*WORDS, "--output", str(path)]
        assert main(words) == 2
        assert f"error: the result '{path}' cannot be written: {reason}\n" in capsys.readouterr().err
        kept = rows(path)
        assert 1 <= len(kept) < 3
        (tmp_path / "sweep.json").write_bytes(path.read_bytes())
    words[words.index("--output") + 1] = str(tmp_path / "sweep.json")
    assert main(words) == 0
    assert rows(tmp_path / "sweep.json")[: len(kept)] == kept
    assert len(rows(tmp_path / "sweep.json")) == 3
    assert json.loads((tmp_path / "sweep.json").read_text())["subject"] == "eval tasks"

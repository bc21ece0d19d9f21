"""What a record says of the machine."""

import platform
import subprocess
from pathlib import Path

import pytest

from remask.machine.cpu import OthersUse
from remask_lab.records import machine


@pytest.mark.parametrize(
    ("used", "stolen", "text"),
    [
        (0.19, 0.1, None),
        (1.8, 0.0, "others used 1.8 of its 2 cores, load average 4.2. Times are longer"),
        (1.8, 0.6, "1.8 of its 2 cores, 0.6 of them the virtual machine's host, load average 4.2"),
    ],
)
def test_a_busy_machine_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, used: float, stolen: float, text: str | None
) -> None:
    monkeypatch.setattr(machine, "measure_others_use", lambda _: OthersUse(3.0, 2, used, stolen))
    monkeypatch.setattr(machine, "load_average", lambda: 4.2)
    found = machine.conditions(None)
    assert found["others"] == {"seconds": 3.0, "cores": 2, "used": used, "stolen": stolen}
    assert found["load_average"] == 4.2
    assert found["busy"] is None if text is None else text in str(found["busy"])


def test_what_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load_average", lambda: None)
    assert machine.conditions(None) == {"load_average": None, "others": None, "busy": None}


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC\n")
    assert machine.cpu_name(tmp_path / "cpuinfo") == "AMD EPYC"
    assert machine.cpu_name(tmp_path / "absent") == (platform.processor() or platform.machine())


def test_a_commit_is_unclean_where_the_code_differs_and_not_where_results_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    files = [tmp_path / name for name in ("src/code.py", "benchmarks/results/a.json", "docs/lab/a.md")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before", encoding="utf-8")
    monkeypatch.setattr(machine, "__file__", str(files[0]))
    run("init", "-q")
    run("add", "-A")
    run("commit", "-qm", "All")
    clean = run("rev-parse", "--short=12", "HEAD")
    for path in files[1:]:
        path.write_text("after", encoding="utf-8")
    assert machine.commit() == clean
    files[0].write_text("after", encoding="utf-8")
    assert machine.commit() == f"{clean}+changes"

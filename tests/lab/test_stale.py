"""Figures are stale where what they measure has changed since."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remask_lab.pages import stale
from remask_lab.pages.page import ROOT
from remask_lab.records.record import FORMAT

ABOUT = {"model": "bundled-tariff", "family": "llada", "kind": "masked", "settings": {"table": "dkv-1"}}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def touch(folder: Path, name: str) -> str:
    """Change a file, commit it, and return the commit."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}x", encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", f"Changes {name}")
    return git(folder, "rev-parse", "--short=12", "HEAD")


def record(folder: Path, name: str, commit: str | None, caches: list[str], **about: Any) -> None:
    rows = [{"point": {"cache": cache}, "result": {}} for cache in caches]
    (folder / "benchmarks" / "results").mkdir(parents=True, exist_ok=True)
    written = {
        "format": FORMAT,
        "subject": "paper",
        "about": {**ABOUT, **about, "commit": commit},
        "data": {"rows": rows},
    }
    (folder / "benchmarks" / "results" / name).write_text(json.dumps(written), encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("Nothing.\n", encoding="utf-8")
    return tmp_path


def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The printed rows by figure."""
    assert stale.main(["--root", str(folder), "--results", str(folder / "benchmarks" / "results")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_a_result_is_stale_where_its_policy_changed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = touch(checkout, "src/remask/policies/dkv.py")
    for name, caches in (("a.json", ["none", "dkv-decode"]), ("b.json", ["bicache+dllm-cache"])):
        record(checkout, name, f"{first}+changes", caches)
    record(checkout, "c.json", "0123456789ab", ["none"])
    record(checkout, "d.json", None, ["none"])
    touch(checkout, "src/remask/policies/dkv.py")
    last = touch(checkout, "src/remask/engine/engine.py")
    rows = told(checkout, capsys)
    assert rows["a.json"][1].endswith("Changes src/remask/policies/dkv.py")
    assert rows["b.json"][1] == "fresh"
    assert all(rows[name][2].startswith(f"stale: {last[:7]}") for name in ("a.json", "b.json")), "both were timed"
    assert rows["c.json"][1:] == rows["d.json"][1:] == ["unknown commit"] * 2
    touch(checkout, "src/remask/depth/rule.py")
    assert told(checkout, capsys)["b.json"][1].endswith("Changes src/remask/depth/rule.py")
    touch(checkout, "src/remask_lab/papers/tables/dkv-1.toml")
    assert "dkv-1.toml" in told(checkout, capsys)["b.json"][1]
    last = touch(checkout, "src/remask/sampling/slowfast.py")
    record(checkout, "e.json", last, ["none"])
    record(checkout, "f.json", last, ["none", "slowfast"])
    touch(checkout, "src/remask/sampling/slowfast.py")
    rows = told(checkout, capsys)
    assert (rows["e.json"][1], rows["f.json"][1] == "fresh") == ("fresh", False)


def test_a_quoted_figure_names_its_commit_and_its_command(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(checkout, "a.json", None, ["none"])
    first = touch(checkout, "src/remask_lab/speed/engines.py")
    text = (
        f"Head.\n\nIt is 2x (`python -m remask_lab speed sharing`,\ncommit {first}).\n\n"
        f"`remask analyze drift`, commit {first}.\n\n`remask bench` with `exact`, commit {first}.\n\n"
        f"## 2026-01-02\n\n`remask bench` on that day, commit {first}.\n"
    )
    (checkout / "docs" / "lab" / "log.md").write_text(text, encoding="utf-8")
    assert {place: row[1] for place, row in told(checkout, capsys).items() if "log" in place} == dict.fromkeys(
        ("docs/lab/log.md:4", "docs/lab/log.md:6", "docs/lab/log.md:8"), "fresh"
    )
    for changed, place in {
        "src/remask_lab/speed/engines.py": "docs/lab/log.md:4",
        "src/remask_lab/subjects/drift.py": "docs/lab/log.md:6",
        "src/remask/policies/exact.py": "docs/lab/log.md:8",
    }.items():
        touch(checkout, changed)
        assert told(checkout, capsys)[place][1].endswith(changed)


def test_outside_a_checkout_nothing_can_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("commit 0123456\n", encoding="utf-8")
    record(tmp_path, "a.json", None, ["none"])
    assert stale.main(["--root", str(tmp_path), "--results", str(tmp_path / "benchmarks" / "results")]) == 2
    assert "is no checkout with a history" in capsys.readouterr().err


def test_every_path_that_is_looked_at_is_there() -> None:
    """A path that was renamed would make every figure fresh."""
    named = [*stale.TIMES, *stale.NUMBERS, *(path for paths in stale.BEHIND.values() for path in paths)]
    named += [f"{stale.CORE}/policies/{name}.py" for name in stale.POLICY_FILES.values()]
    named += [f"{stale.CORE}/{name}" for name in stale.MODELS.values()]
    named += [f"{stale.LAB}/{name}" for names in stale._OF_COMMAND.values() for name in names]
    named += [f"{stale.LAB}/papers/measure.py", f"{stale.CORE}/sampling/slowfast.py"]
    named += [f"{stale.CORE}/sampling/{name}.py" for name in stale.DECODERS.values()]
    assert [path for path in named if not (ROOT / path).exists()] == []

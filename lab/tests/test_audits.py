"""The measurements of audits, small: what each keeps, and that `simulated` reads what `moved` wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

from remask_lab.audits import __main__ as audits
from remask_lab.audits.measure import _prompts
from remask_lab.records.record import read_record

BUNDLED = ["--model", "bundled-tariff", "--task", "tariff", "--task-settings", "{}"]
FEW = ["--questions", "6", "--pages", "6"]


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    file = folder / f"{words[0]}.json"
    monkeypatch.setattr("sys.argv", ["audits", *words, "--json", str(file)])
    assert audits.main() == 0
    return dict(json.loads(file.read_text()) if words[0] == "simulated" else read_record(file).data)


@pytest.mark.thorough
def test_a_depth_is_learned_and_what_it_costs_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = measured(monkeypatch, tmp_path, "learned", *BUNDLED, *FEW, "--learn", "30", "--depth", "2")
    assert set(data["learned"]["depths"].values()) == {2}
    assert data["later"]["depths"] == {"2": 6}
    earned, none, fixed = data["rows"]
    assert (earned["cache"], none["cache"], fixed["cache"]) == ("earned", "none", "fixed")
    assert earned["row_layers"] == fixed["row_layers"] < none["row_layers"]
    assert data["saved"]["earned"] == data["saved"]["fixed"] > 0
    assert data["audits"]["failed"] == data["audits"]["skipped"] == 0


@pytest.mark.thorough
def test_a_depth_that_moves_predictions_is_not_drawn_as_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = measured(monkeypatch, tmp_path, "moved", *BUNDLED, "--questions", "24", "--pages", "12")
    assert all(set(own) == {"1", "2", "3", "4", "6", "8"} for own in moved["requests"])
    assert max(own["2"] for own in moved["requests"]) < 0.1
    drawn = measured(monkeypatch, tmp_path, "simulated", "--input", str(tmp_path / "moved.json"), "--depth", "3")
    assert drawn["after 96"]["too_deep"] <= 0.1
    assert max(drawn["after 96"]["depths"], key=drawn["after 96"]["depths"].get) == "2"


def test_arithmetic_is_asked_under_as_many_prompts_as_there_are() -> None:
    assert [_prompts(questions) for questions in (1, 2, 30, 64)] == [1, 1, 12, 12]

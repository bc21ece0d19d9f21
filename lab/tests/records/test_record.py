"""Result files: what they hold, what is refused, and sweeps that go on where they stopped."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.errors import RecordError
from remask_lab.records.record import FORMAT, Record, Sweep, about, differences, read_record, write_record

ABOUT = {"model": "m", "fingerprint": "f", "settings": {"n": 3}, "seed": 1, "commit": "c"}


@dataclass
class Point:
    value: float
    series: tuple[float, ...]


def test_about_names_all_that_decides_a_result() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu")
    facts = about(llm, seed=7, settings={"rounds": 2, "ratios": (1, 2)})
    assert (facts["model"], facts["fingerprint"]) == ("llada-tiny", llm.loaded.fingerprint)
    assert (facts["seed"], facts["settings"]) == (7, {"rounds": 2, "ratios": [1, 2]})
    assert facts["machine"]["dtype"] == "float32"
    assert facts["machine"]["device"] == "cpu"
    assert {"remask", "torch"} <= set(facts["versions"])
    assert facts["layers"] == llm.loaded.config.layers


def test_numbers_come_back_and_what_is_none_is_null(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_record(path, Record("s", ABOUT, {"points": [Point(math.nan, (1.0, math.inf))], 3: "é"}))
    record = read_record(path, "s")
    assert record == Record("s", ABOUT, {"points": [{"value": None, "series": [1.0, None]}], "3": "é"})
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_record(path, Record("s", ABOUT, 1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordError, match="cannot be written: No space left"):
        write_record(path, Record("s", ABOUT, 2))
    assert read_record(path).data == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "does not hold JSON"),
        ("[1]", "format is None"),
        ('{"format": "remask-record-0"}', "'remask-record-0', not 'remask-record-1'; measure again"),
        (json.dumps({"format": FORMAT, "subject": "s"}), "has no about, data"),
        (json.dumps({"format": FORMAT, "subject": "t", "about": {}, "data": 0}), "holds 't', not 's'"),
    ],
)
def test_files_that_are_none_of_ours(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=message):
        read_record(path, "s")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_record(tmp_path / "none.json")


class Squares:
    """Counts what it measures, and fails at one number."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.measured: list[int] = []
        self.fails_at = fails_at

    def run(self, sweep: Sweep) -> list[Mapping[str, Any]]:
        return [sweep.row({"n": n, "sides": (n, n)}, partial(self.square, n)) for n in range(4)]

    def square(self, n: int) -> dict[str, Any]:
        if n == self.fails_at:
            raise KeyboardInterrupt
        self.measured.append(n)
        return {"area": n * n}


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    first, second = Squares(fails_at=2), Squares()
    with pytest.raises(KeyboardInterrupt):
        first.run(Sweep(path, "s", ABOUT))
    assert [row["result"] for row in read_record(path, "s").data["rows"]] == [{"area": 0}, {"area": 1}]
    sweep = Sweep(path, "s", {**ABOUT, "date": "another day"})
    assert sweep.resumed == 2
    assert second.run(sweep) == [{"area": n * n} for n in range(4)]
    assert (first.measured, second.measured) == ([0, 1], [2, 3])
    assert [row["point"] for row in read_record(path).data["rows"]] == [{"n": n, "sides": [n, n]} for n in range(4)]


@pytest.mark.parametrize(("name", "value"), [("fingerprint", "g"), ("settings", {"n": 4}), ("commit", "d")])
def test_rows_of_different_measurements_do_not_mix(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "sweep.json"
    Squares().run(Sweep(path, "s", ABOUT))
    before = path.read_bytes()
    with pytest.raises(RecordError, match=f"another measurement .*{name}.*begin anew"):
        Sweep(path, "s", {**ABOUT, name: value})
    with pytest.raises(RecordError, match="holds 's', not 't'"):
        Sweep(path, "t", ABOUT)
    assert path.read_bytes() == before
    assert len(differences(ABOUT, {**ABOUT, name: value})) == 1


def test_a_sweep_without_a_file_keeps_its_rows() -> None:
    squares = Squares()
    sweep = Sweep(None, "s", ABOUT)
    assert squares.run(sweep) == squares.run(sweep)
    assert squares.measured == [0, 1, 2, 3]
    assert len(sweep.record.data["rows"]) == 4


def test_rows_under_different_depth_tables_do_not_mix(tmp_path: Path) -> None:
    """BiCache's depths come from the table, so the same settings are another measurement under another one."""
    own = tmp_path / "table.json"
    table = LLM("bundled-transit", dtype="float32", device="cpu").depth_table
    assert table is not None
    replace(table, entries={50: 1}).save(own)
    shipped, other = (
        about(LLM("bundled-transit", dtype="float32", device="cpu", depth_table=path)) for path in (None, own)
    )
    assert shipped["depth_table"] == table.identity != other["depth_table"]
    Sweep(tmp_path / "sweep.json", "s", shipped).row({"cache": "bicache"}, lambda: {"speed": 1.0})
    with pytest.raises(RecordError, match=r"another measurement .*depth_table"):
        Sweep(tmp_path / "sweep.json", "s", other)
    uniform = LLM("gidd-tiny", load_format="dummy", dtype="float32", device="cpu")
    assert about(uniform)["depth_table"] is None

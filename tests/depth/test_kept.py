"""Depths that audits have earned: kept from one start to the next, by the model's fingerprint."""

import json
from pathlib import Path

import pytest

from remask.depth.find import earned_file, load_earned, save_earned
from remask.llm import LLM
from remask.policies.bicache import DepthLookup, Earned
from remask.policies.earned import PREFIXES, PROOF, Audit, EarnedDepths
from tests.depth.models import open_model


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def proven(depths: EarnedDepths) -> None:
    record = depths.record("", 80, 100)
    for number in range(max(PROOF, PREFIXES)):
        depths.add(record, [Audit(number, 2, 0.01)])


def test_what_one_start_has_earned_is_where_the_next_begins() -> None:
    first = open_model("llada-tiny", dummy=True)
    proven(first.engine.auditor.depths)
    assert open_model("llada-tiny", dummy=True).engine.auditor.depths.record("", 80, 100).depth(1, 0) == 2
    given = {"load_format": "dummy", "dtype": "float32", "device": "cpu"}
    anew = LLM("llada-tiny", depth_table="none", **given)  # type: ignore[arg-type]
    assert anew.engine.auditor.depths.records == {}
    assert anew.session.depths(None) == Earned(None)
    assert open_model("dream-tiny", dummy=True).engine.auditor.depths.records == {}, "another model"


def test_a_file_that_cannot_be_used_is_named(caplog: pytest.LogCaptureFixture) -> None:
    depths = EarnedDepths(4)
    proven(depths)
    save_earned(depths, "model")
    raw = json.loads(earned_file("model").read_text())
    for content in ("{", "[]", json.dumps(raw | {"version": 9}), json.dumps(raw | {"layers": 5})):
        earned_file("model").write_text(content)
        again = EarnedDepths(4)
        load_earned(again, "model")
        assert again.records == {}
    assert len(caplog.records) == 4
    assert all("is not used, and depths are earned anew" in each.getMessage() for each in caplog.records)


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "remask").write_text("a file where the folder would be")
    save_earned(EarnedDepths(4), "model")
    (told,) = caplog.records
    assert "earned depths are not saved" in told.getMessage()


def test_a_shipped_table_is_where_audits_begin() -> None:
    llm = open_model("bundled-transit")
    start = llm.session.depths(None)
    assert isinstance(start, Earned)
    assert isinstance(start.start, DepthLookup)

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remask.depth.find import find_table, save_table, shipped_table, table_file
from remask.depth.table import DepthTable
from remask.errors import TableError, UnknownNameError
from remask.policies.bicache import Earned, percent
from tests import goldens
from tests.checkpoint import checkpoints
from tests.checkpoint.adapters import adapted
from tests.depth.models import loaded, open_model, with_ascii_tokenizer

TABLE = DepthTable(
    model="llada-tiny",
    fingerprint="0123456789abcdef",
    family="llada",
    layers=2,
    bound=0.1,
    samples=16,
    source="a test",
    entries={5: 1, 40: 2},
    nats={5: {1: (0.01, 0.0, 0.02), 2: (1.0, 0.5, 1.5)}, 40: {2: (0.02, 0.01, 0.03)}},
)


def test_golden_ratios() -> None:
    for case in goldens.profiler()["ratio_cases"]:
        assert percent(case["prefix_len"], case["seq_len"]) == case["ratio"]
    for name, pair in goldens.profiler()["pairs"].items():
        assert percent(pair["prefix_len"], pair["seq_len"]) == pair["profiler_ratio"], name
        assert percent(pair["prefix_len"], pair["seq_len"] + 16) == pair["engine_ratio"], name


def test_round_trip(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    assert DepthTable.load(tmp_path / "table.json") == TABLE
    assert TABLE.lookup.depth(45, 100) == 2
    assert '   "2": [1.0, 0.5, 1.5]\n' in (tmp_path / "table.json").read_text(), "one line a depth"


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be written"):
        TABLE.save(tmp_path / "missing" / "table.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        DepthTable.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"it is of version 2, whose depths .*; measure anew\. Write one with `remask profile"),
        ({"version": 4}, "version is 4, this program reads 3"),
        ({"version": True}, "version is True"),
        ({"layers": "two"}, "layers must be a whole number"),
        ({"layers": True}, "layers must be a whole number"),
        ({"model": None}, "model must be a text"),
        ({"fingerprint": None}, "fingerprint must be a text"),
        ({"bound": -1}, "bound must be a number from 0"),
        ({"bound": float("nan")}, "bound must be a number"),
        ({"entries": [1, 2]}, "entries must be an object"),
        ({"entries": {"five": 1}}, "entries must be an object"),
        ({"entries": {"5": 1, "05": 2}}, "entries must be an object"),
        ({"entries": {"5": 3}}, "entries.5 must be a whole number from 0 to 2"),
        ({"entries": {"5": 2, "40": 1}}, "must not decrease"),
        ({"entries": {"105": 1}}, "percents from 0 to 100"),
        ({"nats": 3}, "nats must be an object"),
        ({"nats": {"5": [1]}}, "nats.5 must be an object with depths as keys"),
        ({"nats": {"5": {"3": [0, 0, 0]}}}, "a depth of nats.5 must be a whole number from 1 to 2, got 3"),
        ({"nats": {"5": {"1": [0, 0]}}}, "not enough values"),
        ({"nats": {"5": {"1": [0, 0, "x"]}}}, r"nats.5.1\[2\] must be a number"),
        ({"nats": {"5": {"1": [0.5, 0.6, 0.7]}}}, "nats.5.1 must be a mean and its interval"),
    ],
)
def test_malformed_tables(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TableError, match=message):
        DepthTable.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "[" * 100_000])
def test_files_that_are_no_tables(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"is not a depth table.*remask profile"):
        DepthTable.load(path)


def test_a_table_of_another_model(tmp_path: Path) -> None:
    """The fingerprint alone decides."""
    model, path = loaded("llada-tiny", dummy=True), tmp_path / "table.json"
    table = replace(TABLE, model="some other", fingerprint=model.fingerprint, family="another")
    table.save(path)
    assert DepthTable.load(path, model) == table
    replace(table, fingerprint="other").save(path)
    with pytest.raises(TableError, match=r"some other.*llada-tiny.*is loaded.*remask profile --model llada-tiny"):
        DepthTable.load(path, model)


def test_shipped_tables_are_of_what_was_measured() -> None:
    shipped = {table.fingerprint: table for table in map(DepthTable.load, sorted(SHIPPED.glob("*.json")))}
    for name, depth in {"bundled": 2, "bundled-tariff": 2, "bundled-transit": 10}.items():
        table = shipped_table(loaded(name))
        assert table is not None
        assert table == shipped.pop(table.fingerprint)
        assert table.lookup.depth(85, 100) == depth
    assert {table.model for table in shipped.values()} <= {"smollm2"}
    assert all(table.nats and table.samples >= 16 for table in shipped.values())
    assert shipped_table(loaded("llada-tiny", dummy=True)) is None


SHIPPED = Path(__file__).parents[2] / "src" / "remask" / "tables"


def test_a_saved_table_comes_before_a_shipped_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = loaded("bundled")
    shipped = find_table(model)
    assert shipped is not None
    table = replace(shipped, entries={10: 1}, source="a test")
    assert save_table(table, model) == table_file(model) == tmp_path / "remask" / "depth" / f"{model.fingerprint}.json"
    assert find_table(model) == table
    table_file(model).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert find_table(model) == shipped
    assert f"{table_file(model)} is not used" in caplog.text
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TableError, match="cannot be made: Not a directory; give --output"):
        save_table(table, model)


def test_each_adapter_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw = checkpoints.LLADA | {"vocab_size": 260, "embedding_size": 260, "mask_token_id": 259, "eos_token_id": 258}
    tensors = checkpoints.random_tensors(raw)
    adapted(tmp_path / "one", tensors, 1, target_modules=["q_proj"])
    base = with_ascii_tokenizer(checkpoints.write(tmp_path / "base", raw, tensors), tmp_path / "told")
    llm = open_model(str(base), adapters={"one": str(tmp_path / "one")})
    model = replace(llm.loaded, fingerprint=llm.session.fingerprint_of("one"))
    table = replace(TABLE, fingerprint=model.fingerprint)
    save_table(table, model)
    assert llm.depth_table is None
    assert llm.session.depth_table_of("one") == table
    assert llm.session.depths(None) == Earned(None)
    assert llm.session.depths("one") == Earned(table.lookup)
    with pytest.raises(UnknownNameError, match="Unknown adapter 'three'"):
        llm.session.depth_table_of("three")


def test_the_default_cache_without_audits(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """It is `bicache` where audits earn depths, a table is there or settings ask for it; else the log says why."""
    assert open_model("llada-tiny", dummy=True).session.cache == "bicache"
    with caplog.at_level(logging.INFO, logger="remask.session"):
        first = open_model("llada-tiny", dummy=True, audit=0.0)
    assert (first.session.cache, first.session.cache_name) == ("none", "none")
    (told,) = [record.getMessage() for record in caplog.records if "no depth table" in record.getMessage()]
    assert "remask profile --model llada-tiny" in told
    assert "Leave audits on" in told
    file = tmp_path / "table.json"
    replace(TABLE, fingerprint=first.loaded.fingerprint).save(file)
    assert open_model("llada-tiny", dummy=True, audit=0.0, depth_table=file).session.cache == "bicache"
    assert open_model("llada-tiny", dummy=True, audit=0.0, cache_config={"depth": 1}).session.cache == "bicache"
    assert open_model("bundled", audit=0.0).session.cache == "bicache"

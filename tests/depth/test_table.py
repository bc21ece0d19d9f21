import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remask.checkpoint.presets import preset
from remask.depth import cuts
from remask.depth import find as finding
from remask.depth import profile as profiling
from remask.depth.find import DepthTable, Growth, find_table, has_table, shipped_table
from remask.depth.limits import depth_entries, limits_of
from remask.depth.rule import AUTHORS, DepthRule
from remask.errors import ConfigError, TableError
from remask.policies.depth_lookup import DepthLookup, percent
from tests import goldens
from tests.depth.models import loaded, open_model

TABLE = DepthTable(
    model="llada-tiny",
    fingerprint="0123456789abcdef",
    family="llada",
    layers=2,
    hidden=64,
    vocab=256,
    tau=0.97,
    definition="flat",
    samples=16,
    source="a test",
    rule=DepthRule(boundary="paper"),
    entries={5: 1, 40: 2},
    limits={5: (1.0, 0.9), 40: (1.0, 0.98)},
    curves={5: (1.0, 0.9), 40: (1.0, 0.98)},
    request_depths={5: 1.25, 40: 2.0},
    growth=(Growth(16, 0.5),),
)
CASES = [
    (case["similarity"], float(tau), expected)
    for case in goldens.profiler()["table_cases"]
    for tau, expected in case["by_threshold"].items()
]


@pytest.mark.parametrize(("similarity", "tau", "expected"), CASES)
def test_golden_tables_and_lookups(similarity: list[list[float]], tau: float, expected: dict[str, Any]) -> None:
    entries = depth_entries(dict(enumerate(limits_of(AUTHORS, np.array(similarity)).tolist())), tau)
    assert entries == {int(r): b for r, b in expected["table"].items()}
    lookup = DepthLookup(entries)
    for ratio, depth in expected["lookup"].items():
        assert lookup.depth(int(ratio), 100) == (depth or 0)


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


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be written"):
        TABLE.save(tmp_path / "missing" / "table.json")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        DepthTable.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version is 3, this program reads 1 and 2"),
        ({"version": True}, "version is True"),
        ({"rule": {"layers": "leading"}}, "rule must be an object of layers, requests, boundary"),
        ({"rule": "safe"}, "rule must be an object"),
        ({"rule": {"layers": "all", "requests": "mean-depth", "boundary": "safe"}}, "layers.*'all'"),
        ({"limits": {"5": [1.0, 1.0, 1.0]}}, "limits.5 must be a list of up to 2"),
        ({"limits": {"5": [1.0, 0.98]}}, "entries are not those that limits give at tau"),
        ({"definition": "other"}, "definition is 'other'"),
        ({"layers": "two"}, "layers must be a whole number"),
        ({"layers": True}, "layers must be a whole number"),
        ({"model": None}, "model must be text"),
        ({"fingerprint": 7}, "fingerprint must be text"),
        ({"tau": 1.5}, "tau must be a number from 0 to 1"),
        ({"tau": float("nan")}, "tau must be a number"),
        ({"entries": [1, 2]}, "entries must be an object"),
        ({"entries": {"five": 1}}, "entries must be an object"),
        ({"entries": {"5": 3}}, "entries.5 must be a whole number from 0 to 2"),
        ({"entries": {"5": 2, "40": 1}}, "must not decrease"),
        ({"entries": {"105": 1}}, "percents from 0 to 100"),
        ({"curves": {"5": [1.0]}}, "curves.5 must be a list of 2"),
        ({"curves": {"5": [1.0, "x"]}}, "curves.5 must be a number"),
        ({"request_depths": {"5": -1}}, "request_depths.5 must be a number"),
        ({"growth": [[16]]}, "not enough values"),
        ({"growth": 3}, "not iterable"),
    ],
)
def test_malformed_tables(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TableError, match=message):
        DepthTable.load(path)


def first_format(path: Path, **changes: Any) -> Path:
    """The file of a table as the first format had it."""
    TABLE.save(path)
    raw = {**json.loads(path.read_text()), "version": 1, **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in ("rule", "limits")}))
    return path


def test_tables_of_the_first_format_were_made_by_the_authors_rule(tmp_path: Path) -> None:
    old = DepthTable.load(first_format(tmp_path / "old.json"))
    assert old == replace(TABLE, rule=AUTHORS)
    assert old.lookup_at(0.95) == DepthLookup({5: 1, 40: 2})
    assert old.lookup_at(0.99) == DepthLookup({5: 1})
    old.save(tmp_path / "new.json")
    assert DepthTable.load(tmp_path / "new.json") == old


def test_a_publication_does_not_say_its_rule(tmp_path: Path) -> None:
    old = DepthTable.load(first_format(tmp_path / "old.json", definition="published", curves={}))
    assert (old.rule, old.entries) == (None, TABLE.entries)
    with pytest.raises(ConfigError, match=r"holds no similarities \(a test\).*tau 0.9 .*remask profile"):
        old.lookup_at(0.9)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "[" * 100_000])
def test_files_that_are_no_tables(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"is no depth table.*remask profile"):
        DepthTable.load(path)


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "other"}, {"layers": 3, "curves": {}, "limits": {}}, {"fingerprint": None, "hidden": 128}],
)
def test_a_table_of_another_model(tmp_path: Path, change: dict[str, Any]) -> None:
    model = loaded("llada-tiny", dummy=True)
    table = replace(TABLE, model="some other", fingerprint=model.fingerprint)
    path = tmp_path / "table.json"
    table.save(path)
    assert DepthTable.load(path, model) == table
    replace(table, **change).save(path)
    with pytest.raises(TableError, match=r"some other.*llada-tiny.*is loaded.*remask profile --model llada-tiny"):
        DepthTable.load(path, model)


def test_the_published_table_goes_by_shape() -> None:
    tiny = loaded("llada-tiny", dummy=True)
    big = replace(tiny, name="anything", config=preset("llada-8b"))
    table = shipped_table(big)
    assert table is not None
    assert table.model == "GSAI-ML/LLaDA-8B-Instruct"
    assert "ACache" in table.source
    assert [table.lookup.depth(r, 100) for r in (0, 4, 12, 76, 88, 90, 95, 99)] == [1, 1, 3, 16, 17, 17, 19, 32]
    assert shipped_table(tiny) is None
    assert shipped_table(replace(tiny, config=preset("dream-7b"))) is None


def test_a_shipped_table_names_its_source(caplog: pytest.LogCaptureFixture) -> None:
    llm = open_model("llada-tiny", dummy=True)
    llm.loaded = replace(llm.loaded, config=preset("llada-8b"))
    with caplog.at_level(logging.INFO):
        assert find_table(llm).definition == "published"
    assert "LLaDA-8B-Instruct, which has this model's shape: published values" in caplog.text


def test_a_given_table_is_used(tmp_path: Path) -> None:
    model = loaded("llada-tiny", dummy=True)
    path = tmp_path / "table.json"
    replace(TABLE, fingerprint=model.fingerprint).save(path)
    llm = open_model("llada-tiny", dummy=True, depth_table=path)
    assert llm.depth_table.source == "a test"


def test_without_a_table_the_model_is_profiled(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 1)
    monkeypatch.setattr(cuts, "RATIOS", (50, 90))
    with caplog.at_level(logging.WARNING):
        table = find_table(open_model("llada-tiny", dummy=True))
    assert "remask profile --model llada-tiny" in caplog.text
    assert table.layers == 2
    assert list(table.curves) == [50, 90]


def few_ratios(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Profiles that end soon, and a cache folder of the test's own."""
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 1)
    monkeypatch.setattr(cuts, "RATIOS", (50, 90))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def unprofiled(*_: Any, **__: Any) -> DepthTable:
    raise AssertionError("the model is profiled")


def test_a_model_is_profiled_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_ratios(monkeypatch, tmp_path)
    first = open_model("llada-tiny", dummy=True)
    assert not first.has_depth_table
    table = first.depth_table
    (file,) = (tmp_path / "remask" / "depth").iterdir()
    assert file.name.startswith(f"{first.loaded.fingerprint}-")
    assert f"keeping the table in {file} for the next start" in caplog.text
    monkeypatch.setattr(finding, "profile", unprofiled)
    second = open_model("llada-tiny", dummy=True)
    assert second.has_depth_table
    with caplog.at_level(logging.INFO):
        assert second.depth_table == table
    assert f"depth table of an earlier start, {file}" in caplog.text
    assert not has_table(replace(first.loaded, fingerprint="another"))
    assert not has_table(loaded("sdar-tiny", dummy=True)), "such models have no tables"


def test_a_table_measured_in_another_way_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few_ratios(monkeypatch, tmp_path)
    llm = open_model("llada-tiny", dummy=True)
    find_table(llm)
    assert has_table(llm.loaded)
    monkeypatch.setattr(cuts, "RATIOS", (50,))
    assert not has_table(llm.loaded)
    assert list(find_table(llm).curves) == [50]


def test_a_kept_file_that_cannot_be_used_is_measured_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_ratios(monkeypatch, tmp_path)
    llm = open_model("llada-tiny", dummy=True)
    table = find_table(llm)
    (file,) = (tmp_path / "remask" / "depth").iterdir()
    file.write_text("{", encoding="utf-8")
    assert find_table(llm) == table
    assert f"{file} is not used, and written anew" in caplog.text
    assert DepthTable.load(file, llm.loaded) == table


def test_a_cache_folder_that_cannot_be_written_costs_time_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    few_ratios(monkeypatch, tmp_path / "file")
    assert find_table(open_model("llada-tiny", dummy=True)).layers == 2
    assert "the depth table is not kept" in caplog.text

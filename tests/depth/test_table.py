import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remask.depth import find as finding
from remask.depth import profile as profiling
from remask.depth.find import DepthTable, Growth, find_table, has_table, shipped_table
from remask.errors import TableError, UnknownNameError
from remask.families import preset
from remask.llm import LLM
from remask.policies.bicache import DepthLookup, percent
from remask_lab.similarity.probe import limits_of
from remask_lab.similarity.rule import DepthRule, depth_entries
from tests import goldens
from tests.checkpoint import checkpoints
from tests.checkpoint.adapters import adapted
from tests.depth.models import AUTHORS, SMALL, loaded, open_model, with_ascii_tokenizer

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
        ({"version": 3}, "version is 3, this program reads 2"),
        ({"version": True}, "version is True"),
        ({"rule": {"layers": "leading"}}, "rule must be an object of layers, requests, boundary"),
        ({"rule": "safe"}, "rule must be an object"),
        ({"rule": {"layers": "all", "requests": "mean-depth", "boundary": "safe"}}, "layers.*'all'"),
        ({"limits": {"5": [1.0, 1.0, 1.0]}}, "limits.5 holds 3 items; it must be a list of at most 2"),
        ({"limits": {"5": [1.0, 0.98]}}, "entries are not those that limits give at tau"),
        ({"definition": "other"}, "Unknown definition 'other'"),
        ({"layers": "two"}, "layers must be a whole number"),
        ({"layers": True}, "layers must be a whole number"),
        ({"model": None}, "model must be a text"),
        ({"fingerprint": 7}, "fingerprint must be a text"),
        ({"tau": 1.5}, "tau must be a number from 0 to 1"),
        ({"tau": float("nan")}, "tau must be a number"),
        ({"entries": [1, 2]}, "entries must be an object"),
        ({"entries": {"five": 1}}, "entries must be an object"),
        ({"entries": {"5": 3}}, "entries.5 must be a whole number from 0 to 2"),
        ({"entries": {"5": 2, "40": 1}}, "must not decrease"),
        ({"entries": {"105": 1}}, "percents from 0 to 100"),
        ({"curves": {"5": [1.0]}}, "curves must hold 2 similarities each"),
        ({"curves": {"5": [1.0, "x"]}}, r"curves.5\[1\] must be a number"),
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


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "[" * 100_000])
def test_files_that_are_no_tables(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"is no depth table.*remask profile"):
        DepthTable.load(path)


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "other"}, {"layers": 3, "curves": {}, "limits": {}}, {"fingerprint": None}],
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


def test_no_table_is_shipped_by_shape() -> None:
    """LLaDA-8B's base model and every fine-tune have the shape of LLaDA-8B-Instruct."""
    tiny = loaded("llada-tiny", dummy=True)
    assert shipped_table(replace(tiny, name="GSAI-ML/LLaDA-8B-Instruct", config=preset("llada-8b"))) is None


@pytest.mark.parametrize(("form", "depth", "page"), [("", 6, "when-bicache.md"), ("-int8", 5, "lab/log.md")])
def test_the_tables_of_smollm2_are_of_the_weights_that_were_measured(form: str, depth: int, page: str) -> None:
    """In bfloat16 and in int8, whose depths were measured apart."""
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "real-weights" / "town-depths.json"
    measured = json.loads(record.read_text(encoding="utf-8"))["about"]["fingerprint"] + form
    model = replace(loaded("a2d-tiny", dummy=True), config=preset("smollm2-135m"), fingerprint=measured)
    table = shipped_table(model)
    assert table is not None
    assert f"docs/{page}" in table.source
    assert shipped_table(replace(model, fingerprint="that of another adapter")) is None
    assert [table.lookup.depth(r, 100) for r in (30, 79, 80, 99)] == [0, 0, depth, depth]


def few_ratios(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Profiles that end soon, and a cache folder of the test's own."""
    monkeypatch.setattr(profiling, "FIRST_SAMPLES", 1)
    monkeypatch.setattr(profiling, "RATIOS", (50, 90))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def unprofiled(*_: Any, **__: Any) -> DepthTable:
    raise AssertionError("the model is profiled")


def test_a_model_is_profiled_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_ratios(monkeypatch, tmp_path)
    first = open_model("llada-tiny", dummy=True)
    assert not first.session.has_depth_table
    table = first.depth_table
    (file,) = (tmp_path / "remask" / "depth").iterdir()
    assert file.name.startswith(f"{first.loaded.fingerprint}-")
    assert f"keeping the table in {file} for the next start" in caplog.text
    monkeypatch.setattr(finding, "profile", unprofiled)
    second = open_model("llada-tiny", dummy=True)
    assert second.session.has_depth_table
    with caplog.at_level(logging.DEBUG):
        assert second.depth_table == table
    assert f"depth table of an earlier start, {file}" in caplog.text
    assert not has_table(replace(first.loaded, fingerprint="another"))
    assert not has_table(loaded("sdar-tiny", dummy=True)), "such models have no tables"


def test_a_profile_says_how_long_it_takes_and_how_to_skip_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_ratios(monkeypatch, tmp_path)
    assert find_table(open_model("llada-tiny", dummy=True).session).layers == 2
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"which takes \d+ (s|min|h) to \d+ (s|min|h) here", told)
    assert "Another cache, such as none, needs no table" in told
    for seconds, words in ((0.01, "1 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h")):
        assert finding._in_words(seconds) == words


def test_the_default_cache_measures_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is `bicache` where audits earn depths, a table is there or settings ask for it; else the log says why."""
    few_ratios(monkeypatch, tmp_path)
    assert open_model("llada-tiny", dummy=True).session.cache == "bicache"
    with caplog.at_level(logging.INFO, logger="remask.session"):
        first = open_model("llada-tiny", dummy=True, audit=0.0)
    assert (first.session.cache, first.session.cache_name) == ("none", "none")
    (told,) = [record.getMessage() for record in caplog.records if "no depth table" in record.getMessage()]
    assert "remask profile --model llada-tiny" in told
    assert "Leave audits on" in told
    table = find_table(first.session)
    monkeypatch.setattr(finding, "profile", unprofiled)
    assert open_model("llada-tiny", dummy=True, audit=0.0).session.cache == "bicache", "it was kept"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    table.save(tmp_path / "table.json")
    given: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "device": "cpu"}
    assert LLM("llada-tiny", depth_table=tmp_path / "table.json", **given).session.cache == "bicache"
    assert LLM("llada-tiny", cache_config={"depth": 1}, **given).session.cache == "bicache"
    assert [LLM(name).session.cache for name in ("bundled", "bundled-uniform")] == ["bicache", "none"]


def test_a_table_measured_in_another_way_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few_ratios(monkeypatch, tmp_path)
    llm = open_model("llada-tiny", dummy=True)
    find_table(llm.session)
    assert has_table(llm.loaded)
    monkeypatch.setattr(profiling, "RATIOS", (50,))
    assert not has_table(llm.loaded)
    assert list(find_table(llm.session).curves) == [50]


def test_a_kept_file_that_cannot_be_used_is_measured_anew(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few_ratios(monkeypatch, tmp_path)
    llm = open_model("llada-tiny", dummy=True)
    table = find_table(llm.session)
    (file,) = (tmp_path / "remask" / "depth").iterdir()
    file.write_text("{", encoding="utf-8")
    assert find_table(llm.session) == table
    assert f"{file} is not used, and written anew" in caplog.text
    assert DepthTable.load(file, llm.loaded) == table


def test_a_cache_folder_that_cannot_be_written_costs_time_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    few_ratios(monkeypatch, tmp_path / "file")
    assert find_table(open_model("llada-tiny", dummy=True).session).layers == 2
    assert "the depth table is not kept" in caplog.text


def test_each_adapter_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is what is measured of the model that the adapter is merged into, and is kept apart from the base's."""
    few_ratios(monkeypatch, tmp_path / "cache")
    raw = checkpoints.LLADA | {"vocab_size": 260, "embedding_size": 260, "mask_token_id": 259, "eos_token_id": 258}
    tensors, targets = checkpoints.random_tensors(raw), ["q_proj", "v_proj", "up_proj"]
    merged = adapted(tmp_path / "one", tensors, 1, target_modules=targets)
    adapted(tmp_path / "two", tensors, 2, target_modules=targets)
    paths = {name: str(tmp_path / name) for name in ("one", "two")}
    base, whole = (
        with_ascii_tokenizer(checkpoints.write(tmp_path / name, raw, own), tmp_path / f"{name} told")
        for name, own in (("base", tensors), ("merged", merged))
    )
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "engine": SMALL}
    llm = LLM(str(base), adapters=paths, **settings)
    assert not any(map(llm.session.has_depth_table_of, (None, "one", "two")))
    tables = {adapter: llm.session.depth_table_of(adapter) for adapter in (None, "one")}
    again = LLM(str(base), adapters=paths, **settings)
    assert [again.session.has_depth_table_of(adapter) for adapter in (None, "one", "two")] == [True, True, False]
    assert again.session.depth_table_of("one") == tables["one"]
    prints = {tables[None].fingerprint, tables["one"].fingerprint, LLM(str(whole), **settings).loaded.fingerprint}
    assert len(prints) == 3
    wanted = LLM(str(whole), **settings).depth_table
    assert tables["one"].limits.keys() == wanted.limits.keys()
    for ratio, limits in wanted.limits.items():
        np.testing.assert_allclose(tables["one"].limits[ratio], limits, atol=1e-4)
        assert np.abs(np.subtract(tables[None].limits[ratio], limits)).max() > 1e-3
    given = tmp_path / "given.json"
    tables[None].save(given)
    own = LLM(str(base), adapters=paths, depth_table=given, **settings)
    assert own.session.depth_table_of("two") == own.session.depth_table_of(None) == tables[None]
    with pytest.raises(UnknownNameError, match="Unknown adapter 'three'"):
        llm.session.policy("bicache", adapter="three")

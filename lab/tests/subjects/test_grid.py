"""What is said about a grid follows from its numbers, and depths from tau."""

from dataclasses import replace
from typing import Any

import pytest

from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies.bicache import DepthLookup
from remask.tasks import transit
from remask_lab.bench.grid import Grid, GridRow, lookup_at, run_grid
from remask_lab.bench.workload import TaskChoice, Workload, chat_workload
from remask_lab.records.record import Sweep
from remask_lab.subjects.grid import points_of, quality_name, reading, values_of, varied, worded
from tests.depth.test_table import TABLE
from tests.oracles import similarity
from tests.sampling_fields import flat_params


def row(accuracy: float | None, speed: float, agreement: float = 1.0, **axes: Any) -> GridRow:
    none = None if accuracy is None else 0.9
    return GridRow({"cache": "c", **axes}, accuracy, none, agreement, speed, 9.0, 2 * speed, 1.0, 1.0, 10, 10, 0.5)


def test_axes_that_vary_and_their_values() -> None:
    points: list[dict[str, Any]] = [
        {"cache": "a", "n": 8, "ratio": None},
        {"cache": "b", "n": 2, "ratio": 0.5, "own": True},
        {"cache": "b"},
    ]
    assert varied(points) == ("n", "ratio", "cache")
    assert values_of(points, "n") == [2, 8]
    assert values_of(points, "ratio") == [None, 0.5]
    assert worded({"cache": "b", "n": 2, "x": None}, ("x", "n", "cache", "other")) == "x=null, n=2, b"


def test_a_grid_that_costs_nothing() -> None:
    rows = [row(0.9, 1.5, n=1), row(1.0, 2.0, n=2), row(0.5, 9.0, n=4), row(0.9, 1.0, cache="none")]
    told = reading(rows)
    assert quality_name(rows) == "accuracy"
    assert told.startswith("4 points; accuracy from 50.0 % to 100.0 %. 2 of 3 cached points are as good as none")
    assert "the fastest of them, n=2, c, takes 1/2.00 of none's time for 1/4.00 of its FLOPs." in told
    assert "Over n 1 to 4: accuracy 90.0 % to 50.0 %; speed 1.50x to 9.00x; FLOPs saved 3.00x to 18.00x" in told
    assert "Over c, none: accuracy 80.0 %, 90.0 %" in told


def test_a_grid_that_costs_accuracy() -> None:
    told = reading([row(0.1, 3.0, n=1), row(0.8, 2.0, n=2)])
    assert "No cached point reaches none; the nearest, n=2, has 80.0 % against 90.0 % at 2.00x the speed." in told


def test_without_answers_tokens_are_compared() -> None:
    rows = [row(None, 3.0, 0.25, kind="a"), row(None, 2.0, 0.75, kind="b")]
    assert quality_name(rows) == "agreement with none"
    told = reading(rows)
    assert "the nearest, kind=b, has 75.0 % against 100.0 %" in told
    assert "Over kind a, b: agreement with none 25.0 %, 75.0 %" in told
    assert points_of(rows)[0] == {"cache": "c", "kind": "a"}


def test_a_single_point() -> None:
    assert reading([row(0.9, 1.0, cache="none")]) == "1 points; accuracy from 90.0 % to 90.0 %."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))


def task(llm: LLM) -> Workload:
    return chat_workload(llm, TaskChoice("transit"), 2, 1, 0, flat_params({**transit.SAMPLING, "ignore_eos": True}))


@pytest.mark.thorough
def test_depths_and_work_follow_from_tau_and_r(llm: LLM) -> None:
    sweep, workload = Sweep(None, "s", {}), task(llm)
    grid = Grid(("bicache",), {"tau": (0.9, 0.97, 0.99), "refresh_interval": (2, 4)})
    run_grid(llm, grid, lambda *_: workload, 1, sweep, progress=False)
    found = sweep.record.data["rows"]
    assert [tuple(row["point"]["settings"].values()) for row in found] == [
        (tau, interval) for tau in (0.9, 0.97, 0.99) for interval in (2, 4)
    ]
    layers, steps = llm.loaded.config.layers, 8
    for row in found:
        prefix = workload.tasks[0].request.prefix_length
        canvases = [len(each.request.prompt_token_ids) + 16 for each in workload.tasks]
        table = similarity.depth_table(llm.depth_table.curves, row["point"]["settings"]["tau"])
        depths = [similarity.depth_for(table, similarity.ratio(prefix, canvas)) for canvas in canvases]
        policy, none = row["result"]["policy"], row["result"]["none"]
        assert policy["prefix_depth"] == sum(depths) / len(depths)
        refreshes = -(-steps // row["point"]["settings"]["refresh_interval"])
        expected = sum(
            steps * (canvas - prefix) * layers + refreshes * prefix * (layers - depth)
            for canvas, depth in zip(canvases, depths, strict=True)
        )
        assert policy["row_layers"] == expected + prefix * layers, "and one prefix-only pass"
        assert none["row_layers"] == steps * sum(canvases) * layers


def test_a_table_without_similarities_has_no_other_tau(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    published = replace(llm.depth_table, limits={}, source="a publication")
    monkeypatch.setitem(llm.session._tables, None, published)
    sweep = Sweep(None, "s", {})
    with pytest.raises(ConfigError, match=r"holds no similarities \(a publication\).*--depth-table"):
        run_grid(llm, Grid(("bicache",), {"tau": (0.9,)}), lambda *_: task(llm), 1, sweep, progress=False)
    assert sweep.record.data["rows"] == []


LIMITS = {50: (0.9, 0.8, 0.7), 80: (0.95, 0.9, 0.85)}


def table(**changes: Any) -> DepthTable:
    """A table of two ratios and three layers."""
    return replace(TABLE, layers=3, tau=0.8, source="a test", **{"limits": LIMITS, **changes})


def test_a_table_at_another_tau() -> None:
    assert lookup_at(table(), 0.8) == DepthLookup({50: 1, 80: 3})
    assert lookup_at(table(), 0.89) == DepthLookup({50: 1, 80: 2})


@pytest.mark.parametrize(
    ("changes", "tau", "message"),
    [
        ({"limits": {}}, 0.9, r"holds no similarities \(a test\).*tau 0.9 .*remask profile"),
        ({"limits": {50: (0.9, 0.8), 80: (0.95, 0.9)}}, 0.5, "without --needed-layers"),
    ],
)
def test_depths_that_a_table_does_not_hold(changes: dict[str, Any], tau: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookup_at(table(**changes), tau)

"""Sweeps of tau and R: which depths are run, what is read out of the rows, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import TRANSIT_SAMPLING, Workload, random_workload, transit_workload
from remask_lab.records.sweep import Sweep
from remask_lab.subjects.sweep import Parameter, SweepValues, reading, run_sweep
from tests.oracles import similarity

SMALL = SweepValues(taus=(0.9, 0.97, 0.99), refresh_intervals=(2, 4), tau=0.97, refresh_interval=4, caches=("bicache",))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))


def task(llm: LLM) -> Workload:
    return transit_workload(llm, 2, 1, 0, SamplingParams.from_mapping({**TRANSIT_SAMPLING, "ignore_eos": True}))


@pytest.mark.thorough
def test_depths_and_work_follow_from_tau_and_r(llm: LLM) -> None:
    sweep, workload = Sweep(None, "s", {}), task(llm)
    rows = run_sweep(llm, workload, SMALL, sweep, 1)
    assert [row["tau"] for row in rows["tau"]] == [0.9, 0.97, 0.99]
    assert [row["refresh_interval"] for row in rows["refresh_interval"]] == [2, 4]
    assert len(sweep.record.data["rows"]) == 4, "tau = 0.97 with R = 4 belongs to both and is measured once"
    layers, steps = llm.loaded.config.layers, 8
    for row in (*rows["tau"], *rows["refresh_interval"]):
        prefix = workload.tasks[0].request.prefix_length
        canvases = [len(each.request.prompt_token_ids) + 16 for each in workload.tasks]
        table = similarity.depth_table(llm.depth_table.curves, row["tau"])
        depths = [similarity.depth_for(table, similarity.ratio(prefix, canvas)) for canvas in canvases]
        assert row["prefix_depth"] == sum(depths) / len(depths)
        refreshes = -(-steps // row["refresh_interval"])
        expected = sum(
            steps * (canvas - prefix) * layers + refreshes * prefix * (layers - depth)
            for canvas, depth in zip(canvases, depths, strict=True)
        )
        assert row["row_layers"] == expected + prefix * layers, "and one prefix-only pass"
        assert row["none"]["row_layers"] == steps * sum(canvases) * layers
        assert row["none"]["cache"] == "none"


def test_a_table_without_similarities_has_no_other_tau(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    published = replace(llm.depth_table, limits={}, source="a publication")
    monkeypatch.setattr(llm, "_table", published)
    with pytest.raises(ConfigError, match=r"holds no similarities \(a publication\).*--depth-table"):
        run_sweep(llm, task(llm), SMALL, Sweep(None, "s", {}), 1)


def test_nothing_is_measured_where_a_point_cannot_run(llm: LLM) -> None:
    sweep = Sweep(None, "s", {})
    with pytest.raises(ConfigError, match="elastic-cache"):
        run_sweep(llm, task(llm), replace(SMALL, caches=("bicache", "bicache+elastic-cache")), sweep, 1)
    assert sweep.record.data["rows"] == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"taus": (0.9, 1.0)}, "tau must lie"),
        ({"tau": 0.0}, "tau must lie"),
        ({"caches": ("block-dual",)}, "must begin with it, got 'block-dual'"),
    ],
)
def test_bad_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SweepValues(**wrong)


def row(parameter: Parameter, value: float, speed: float, accuracy: float | None, **more: Any) -> dict[str, Any]:
    own = {"cache": "bicache", parameter: value, "ratio_to_none": speed, "work_ratio_to_none": speed}
    interval = None if accuracy is None else [accuracy - 0.1, accuracy + 0.1]
    quality = {"accuracy": accuracy, "accuracy_interval": interval, "agreement_with_none": 0.5}
    return {**own, **quality, "prefix_depth": 3.0, **more}


def test_what_the_reading_says_comes_from_the_rows() -> None:
    rows = [
        row("tau", 0.9, 2.0, 0.4, prefix_depth=5.0),
        row("tau", 0.95, 2.5, 0.8, prefix_depth=4.0),
        row("tau", 0.97, 1.5, 0.6),
    ]
    text = reading({"tau": rows, "refresh_interval": [row("refresh_interval", 8, 1.0, 0.5)]})
    assert "as tau grows from 0.9 to 0.97, throughput goes from 2.00 to 1.50 times" in text
    assert "(1.50 to 2.50 over all values)" in text
    assert "the depth goes from 5.0 to 3.0 layers" in text
    assert "lies between 40.0 % and 80.0 %, highest at tau = 0.95, with 95 % intervals that do not all overlap" in text
    assert "as R grows" not in text, "one point is no trend"


def test_a_reading_of_ties_and_of_work_without_answers() -> None:
    of_r = [row("refresh_interval", n, 1.0, None) for n in (8, 16)]
    text = reading({"tau": [row("tau", 0.9, 2.0, 0.5), row("tau", 0.95, 2.0, 0.45)], "refresh_interval": of_r})
    assert "highest at tau = 0.9, with 95 % intervals that all overlap" in text
    assert "agreement with no cache is 50.0 % throughout" in text
    assert "the depth goes" not in text
    assert reading({"tau": [], "refresh_interval": []}) == "A single point shows no trend."


def test_random_tokens_are_swept_too() -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))
    workload = random_workload(llm, 2, 1, 0, SamplingParams(max_tokens=4, ignore_eos=True), 40, 4)
    grid = replace(SMALL, taus=(0.9,), refresh_intervals=(), caches=("bicache+block-dual",))
    (found,) = run_sweep(llm, workload, grid, Sweep(None, "s", {}), 1)["tau"]
    assert found["accuracy"] is None
    assert 0 <= found["agreement_with_none"] <= 1

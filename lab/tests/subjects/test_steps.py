"""Steps by policy: against the traces of drift, against what usage counts, and what is refused."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from lab.tests.subjects.support import open_model, trace_drift, work

from remask.errors import ConfigError
from remask_lab.instruments.watch import Watcher
from remask_lab.subjects.steps import StepTrace, measure_steps, reading
from tests import goldens as masked
from tests.engine import kinds
from tests.goldens import uniform as goldens


@pytest.mark.parametrize(
    ("folder", "sampling"),
    [
        (masked.model_dir("llada"), {"block_length": 4}),
        (goldens.model_dir("gentle"), {"seed": 3, "block_length": 6, "steps_per_block": 4}),
    ],
)
def test_none_is_what_drift_is_measured_on(folder: Any, sampling: dict[str, Any]) -> None:
    llm = open_model(folder)
    ours = Watcher(llm).trace(work(llm, **sampling), StepTrace(llm.model))
    drift = trace_drift(llm, work(llm, **sampling))
    assert ours.entropy == pytest.approx([float(values.mean()) for values in drift.entropy])
    assert ours.change_rate == drift.change_rate
    block = drift.block
    expected = [
        (k[start : start + block].mean(), v[start : start + block].mean())
        for k, v, (before, start) in zip(drift.k_drift, drift.v_drift, pairwise(drift.starts), strict=True)
        if before == start
    ]
    np.testing.assert_allclose([pair[1:] for pair in ours.drift], expected, rtol=1e-4, atol=1e-7)
    assert all(0 < values.max() <= 1 for values in ours.probability)


def test_policies_side_by_side() -> None:
    llm = open_model(masked.model_dir("llada"))
    policies = [(name, llm.session.policy(name)) for name in ("none", "dkv-decode", "dllm-cache", "block-dual")]
    items = [work(llm, block_length=6), work(llm, block_length=6, max_tokens=6)]
    report = measure_steps(llm, items, policies, rounds=2)
    assert [curves.cache for curves in report.policies] == ["none", "dkv-decode", "dllm-cache", "block-dual"]
    none, decode, _, dual = report.policies
    assert none.passes == (12, 6)
    assert set(none.row_layers[6:]) == {23 * llm.loaded.config.layers}
    assert none.row_layers[0] == (23 + 17) / 2 * llm.loaded.config.layers
    assert len(none.k_drift) == 6
    assert np.isnan(none.k_drift[0]), "a block's first step follows another block"
    assert dual.row_layers[-1] == 6 * llm.loaded.config.layers
    for curves in report.policies:
        for item in items:
            (output,) = llm.session.run([item.with_policy(dict(policies)[curves.cache])])
            assert output.usage.forwards in curves.passes
        assert len(curves.milliseconds) == len(curves.row_layers) == max(curves.passes)
        assert min(curves.milliseconds) > 0
    table = np.array(none.trajectories)
    assert table.shape == (12, 12)
    assert np.isfinite(table[:6, 0]).all()
    assert np.isnan(table[6:, 0]).all(), "the second block is not predicted yet"
    told = reading(report)
    assert f"Under dkv-decode entropy goes from {decode.entropy[0]:.2f}" in told
    assert f"{sum(decode.row_layers) / sum(none.row_layers):.2f} of none's in all" in told


def test_a_leased_prefix_is_read_where_it_lives() -> None:
    llm = open_model(masked.model_dir("llada"))
    policy = llm.session.policy("bicache", {"depth": 1, "refresh_interval": 4})
    report = measure_steps(llm, [work(llm, block_length=6)], [("bicache", policy)], rounds=1)
    none, bicache = report.policies
    layers = llm.loaded.config.layers
    assert bicache.row_layers[:2] == (19 * layers + 4 * (layers - 1), 19 * layers)
    assert len(bicache.milliseconds) == 12, "the prefix-only pass is left out"
    assert np.isfinite(bicache.v_drift[1:]).all()
    assert bicache.settings == {"depth": 1, "refresh_interval": 4, "boundary": "stored"}
    assert none.entropy != bicache.entropy


def test_policies_begin_with_the_same_noise() -> None:
    llm = open_model(goldens.model_dir("gentle"))
    sampling: dict[str, Any] = {"block_length": 6, "steps_per_block": 3}
    prefix = llm.session.policy("block-prefix")
    none, cached = measure_steps(llm, [work(llm, **sampling)], [("block-prefix", prefix)], rounds=1).policies
    assert cached.entropy == pytest.approx(none.entropy, abs=1e-4), "this one is exact"
    assert cached.change_rate == none.change_rate


def test_a_pass_that_only_completes_a_page_is_no_step() -> None:
    found = kinds.checkpoint("sdar")
    llm = open_model(found.folder, page_size=found.block)
    item = work(llm, max_tokens=4 * found.block - 11)
    exact = llm.session.policy("exact")
    _, curves = measure_steps(llm, [item], [("exact", exact)], rounds=1).policies
    (output,) = llm.session.run([item.with_policy(exact)])
    assert len(curves.row_layers) == len(curves.milliseconds) == output.usage.forwards
    assert llm.engine.stats.steps == output.usage.forwards + 1, "there is such a pass"


def test_what_cannot_be_measured() -> None:
    llm = open_model(masked.model_dir("llada"))
    asked: list[tuple[list[Any], str]] = [
        ([work(llm, policy="dkv-decode")], "leave cache out"),
        ([work(llm, max_tokens=500)], "none: prompt of 11 tokens and max_tokens=500"),
        ([], "no request"),
    ]
    for items, message in asked:
        with pytest.raises(ConfigError, match=message):
            measure_steps(llm, items, [], rounds=1)

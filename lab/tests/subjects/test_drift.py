"""Traces of the engine's own passes: against the recorded diagnostics, and against the dense oracle."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lab.tests.subjects.support import PROMPT, open_model, trace_drift, work

from remask.cli.lines import as_request
from remask.errors import ConfigError, RemaskError
from remask_lab.instruments.attention import REGIONS, regions
from remask_lab.subjects.drift import DriftTracer, summarise
from tests import goldens as masked
from tests.engine import kinds
from tests.goldens import uniform as goldens
from tests.oracles import dense
from tests.oracles.drift import entropy, kv_drift
from tests.oracles.drift import regions as oracle_regions
from tests.oracles.uniform import Blocks


def close(actual: list[np.ndarray[Any, Any]], expected: torch.Tensor, atol: float) -> None:
    np.testing.assert_allclose(np.stack(actual), expected.numpy(), rtol=0, atol=atol)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("limits", [{}, {"page_size": 5, "max_row_layers": 7}])
def test_the_recorded_diagnostics(row: int, limits: dict[str, int]) -> None:
    llm, recorded = open_model(goldens.model_dir("unif"), **limits), goldens.diagnostics()
    run = goldens.Run(goldens.trace("T1_unif_b8"), "baseline", row)
    trace = trace_drift(llm, as_request(llm, run.request_line(), "0", {}))
    close(trace.k_drift, recorded["k_drift"][:, row], 1e-5)
    close(trace.v_drift, recorded["v_drift"][:, row], 1e-5)
    close(trace.attention, recorded["attn_mass"][:, row], 1e-5)
    close(trace.entropy, recorded["entropy"][:, row], 1e-4)
    report = summarise(llm, [trace])
    assert tuple(report.regions) == REGIONS
    for name in ("prompt", "rest_past", "previous"):
        assert report.regions[name].k_within == report.regions[name].v_within == 0, "clean rows see clean rows only"
        assert report.regions[name].k_drift > 0.01, "and change from block to block"
    assert sum(means.attention for means in report.regions.values()) == pytest.approx(1, abs=1e-6)
    within = [pair for pair, (before, after) in enumerate(pairwise(trace.starts)) if before == after]
    means = [trace.v_drift[pair][start : start + trace.block] for pair in within for start in [trace.starts[pair]]]
    np.testing.assert_allclose([moved.mean(axis=0) for moved in trace.block_v], means)
    assert all(more >= less for each in zip(*report.v_moved, strict=True) for more, less in pairwise(each))
    assert report.v_moved[0][0] == pytest.approx(report.v_moved[1][0]), "in the first layer V follows from the token"


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_masked_models_against_the_dense_oracle(family: str) -> None:
    llm = open_model(masked.model_dir(family))
    trace = trace_drift(llm, work(llm, block_length=4))
    (output,) = llm.session.run([work(llm, block_length=4)], trace=True)
    assert output.trace is not None
    model = dense.load(masked.model_dir(family))
    canvas = torch.tensor(PROMPT + [model.mask_id] * 12)
    states = []
    for step, event in enumerate(output.trace):
        one = model.forward(canvas)
        states.append(one)
        places = torch.arange(trace.starts[step], trace.starts[step] + 4)
        noisy = places[torch.tensor([p not in settled(output.trace[:step]) for p in places.tolist()])]
        logits = model.predictions(one.logits)[noisy]
        np.testing.assert_allclose(trace.entropy[step], entropy(logits, model.mask_id).numpy(), atol=1e-4)
        canvas[list(event.positions)] = torch.tensor(event.token_ids)
    assert trace.passes == len(states) > 1
    for number, (before, after) in enumerate(pairwise(states)):
        k, v = kv_drift(before.kv, after.kv)
        np.testing.assert_allclose(trace.k_drift[number], k.numpy(), atol=1e-5)
        np.testing.assert_allclose(trace.v_drift[number], v.numpy(), atol=1e-5)
    assert trace.change_rate == pytest.approx([len(event.positions) / 12 for event in output.trace])
    assert sum(trace.change_rate) == pytest.approx(1)


def settled(events: Any) -> set[int]:
    return {place for event in events for place in event.positions}


def test_regions_that_masked_canvases_have() -> None:
    llm = open_model(masked.model_dir("llada"))
    long, short = trace_drift(llm, work(llm, block_length=4)), trace_drift(llm, work(llm, max_tokens=4))
    report = summarise(llm, [long, short])
    assert list(report.regions) == ["prompt", "rest_past", "previous", "current", "next", "rest_future"]
    assert report.subject.passes == (12, 4)
    assert len(report.entropy) == len(report.attention["prompt"]) == 12
    assert report.attention["prompt"][0] == pytest.approx((long.attention[0][1] + short.attention[0][1]) / 2)
    assert report.attention["prompt"][5] == pytest.approx(long.attention[5][1])
    assert np.isnan(report.attention["previous"][3])
    assert report.attention["previous"][4] == pytest.approx(long.attention[4][REGIONS.index("previous")])
    assert sum(means.attention for means in report.regions.values()) == pytest.approx(1, abs=1e-6)
    single = summarise(llm, [short])
    assert list(single.regions) == ["prompt", "current"]


def test_block_causal_rows_exist_when_their_block_is_reached() -> None:
    found = kinds.checkpoint("sdar")
    llm = open_model(found.folder)
    trace = trace_drift(llm, work(llm))
    report = summarise(llm, [trace])
    assert list(report.regions) == ["prompt", "rest_past", "previous", "current"]
    for drift, start in zip(trace.k_drift, trace.starts, strict=False):
        assert np.isnan(drift[start + found.block :]).all()
        assert np.abs(drift[:start]).max(initial=0) < 1e-9, "what stands before a block never sees it"
    assert {mass.sum().round(5) for mass in trace.attention} == {1.0}


@pytest.mark.parametrize(("prompt", "response", "length", "canvas"), [(10, 32, 8, 64), (2, 9, 2, 14), (3, 6, 4, 9)])
def test_regions_are_the_oracles(prompt: int, response: int, length: int, canvas: int) -> None:
    blocks = Blocks(prompt, response, length, 1, canvas)
    for block in range(blocks.count):
        ours = regions(canvas, prompt, prompt + response, prompt + block * length, length)
        assert ours.tolist() == oracle_regions(blocks, block).tolist()


def test_a_prompt_in_the_current_block_is_current() -> None:
    names = [REGIONS[index] for index in regions(12, 6, 10, 4, 4)]
    assert names == ["prompt"] * 4 + ["current"] * 4 + ["next"] * 4


def test_a_tracer_serves_many_requests() -> None:
    llm = open_model(goldens.model_dir("gentle"))
    tracer = DriftTracer(llm)
    sampling: dict[str, Any] = {"seed": 3, "sampler": "ancestral", "temperature": 1.0, "steps_per_block": 3}
    first, second = tracer.trace_all(tracer.begin, [work(llm, block_length=8, **sampling)] * 2, progress=False)
    assert first.starts == second.starts == [11] * 3 + [19] * 3
    np.testing.assert_array_equal(np.stack(first.v_drift), np.stack(second.v_drift))
    assert sum(first.change_rate) > 0.5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "block-prefix"}, "leave cache out"),
    ({"cfg_scale": 1.0}, r"cfg_scale=1: drift is measured on one canvas"),
    ({"growing_canvas": True, "block_length": 2}, "that of a canvas of one length"),
    ({"correction_steps": 3}, "correction_steps=3: drift is that of blocks being denoised"),
    ({"max_tokens": 500}, "max_model_len"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_what_cannot_be_measured(settings: dict[str, Any], message: str) -> None:
    llm = open_model(masked.model_dir("llada"))
    with pytest.raises(ConfigError, match=message):
        trace_drift(llm, work(llm, **settings))
    with pytest.raises(ConfigError, match="no request"):
        trace_drift(llm)


def test_a_request_that_runs_out_of_time_is_no_measurement() -> None:
    llm = open_model(masked.model_dir("llada"))
    with pytest.raises(RemaskError, match="ended early: timeout"):
        trace_drift(llm, work(llm, deadline=1e-9))


def test_a_cache_that_is_exact_drifts_as_none_does_and_what_is_kept_stands_still() -> None:
    """`block-prefix` computes what `none` does on a uniform model; `uniform-cache` leaves other rows as they are."""
    llm = open_model(goldens.model_dir("unif"))
    run = goldens.Run(goldens.trace("T1_unif_b8"), "baseline", 0)
    item = as_request(llm, run.request_line(), "0", {})
    none, exact, cached = (
        trace_drift(llm, item, policy=llm.session.policy(name, settings))
        for name, settings in (("none", {}), ("block-prefix", {}), ("uniform-cache", {"refresh_next": 0}))
    )
    for drift, other in (
        (none.k_drift, exact.k_drift),
        (none.v_drift, exact.v_drift),
        (none.attention, exact.attention),
    ):
        np.testing.assert_allclose(np.stack(drift), np.stack(other), rtol=0, atol=1e-5)
    for number, (before, after) in enumerate(pairwise(cached.starts)):
        moved = cached.v_drift[number]
        if before == after:
            inside = slice(after, after + cached.block)
            assert np.delete(moved, np.r_[inside]).max() == 0, "only the block is computed"
            assert moved[inside].max() > 0
    report = summarise(llm, [none])
    pairs = np.stack(none.k_drift), np.stack(none.v_drift)
    assert (report.k_mean, report.v_mean) == pytest.approx([pair.mean() for pair in pairs])


def test_a_cache_that_leaves_out_rows_of_its_block_is_refused() -> None:
    llm = open_model(masked.model_dir("llada"))
    with pytest.raises(ConfigError, match="every pass computes its whole block, which this cache does not"):
        trace_drift(llm, work(llm), policy=llm.session.policy("dllm-cache", {}))

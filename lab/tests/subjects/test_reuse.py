"""Reuse in deep layers against a dense float64 BiCache on the same canvases; what is said of plain reuse."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab.tests.subjects.support import canvases

from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask.tasks import transit
from remask_lab.bench.workload import TaskChoice, chat_workload
from remask_lab.subjects.reuse import (
    ANOTHER,
    ONCE,
    PERIODIC,
    collapse_reading,
    measure_collapse,
    measure_reuse,
    reading,
    shares,
    summarise,
)
from tests import goldens
from tests.depth.models import open_model
from tests.oracles.bicache import lease, refresh_pass, refreshes
from tests.oracles.canvas import Canvas
from tests.oracles.dense import KV, DenseModel, load
from tests.sampling_fields import flat_params

PREFIX, DEPTH, INTERVAL = 20, 1, 2
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    ANOTHER: ("reuse", {}),
    ONCE: ("bicache", {"depth": DEPTH, "refresh_interval": None}),
    PERIODIC: ("bicache", {"depth": DEPTH, "refresh_interval": INTERVAL}),
}


def request() -> Request:
    params = SamplingParams(max_tokens=8, steps=4, ignore_eos=True)
    return Request("0", goldens.prompts()["s0a"], params, PREFIX)


def similarity(read: KV, fresh: KV, layer: int) -> float:
    pairs = (
        (side[layer, :PREFIX].flatten(), other[layer, :PREFIX].flatten())
        for side, other in zip((read.k, read.v), (fresh.k, fresh.v), strict=True)
    )
    return sum(float(F.cosine_similarity(a, b, dim=0)) for a, b in pairs) / 2


def expected(model: DenseModel, name: str, passes: list[torch.Tensor]) -> list[list[float]]:
    """[steps][layers]"""
    first = Canvas(passes[0][:-8].tolist(), 8, model.mask_id)
    leased = lease(model, first, [(0, PREFIX)])
    suffix = first.span(PREFIX, first.length)
    found = []
    for step, tokens in enumerate(passes):
        canvas = Canvas(tokens[:-8].tolist(), 8, model.mask_id)
        canvas.tokens[:] = tokens
        if name == ANOTHER:
            read = leased.kv
        elif refreshes(step, POLICIES[name][1]["refresh_interval"]):
            read = refresh_pass(model, canvas, leased, DEPTH, suffix, model.empty_kv(canvas.length), "stored").kv
        fresh = model.forward(tokens).kv
        found.append([similarity(read, fresh, layer) for layer in range(model.layers)])
    return found


@pytest.mark.parametrize("model", ["llada", "llada_gqa", "dream"])
def test_settings_are_like_a_dense_bicache(model: str) -> None:
    folder = goldens.model_dir(model)
    llm = open_model(str(folder))
    report = measure_reuse(llm, [request()], DEPTH, INTERVAL)
    assert (report.steps, report.depth) == (4, (DEPTH,))
    for name, (cache, config) in POLICIES.items():
        passes = canvases(llm, request(), prefix_length=PREFIX, cache=cache, cache_config=config)
        dense = np.array(expected(load(folder), name, passes))
        np.testing.assert_allclose(np.array(report.similarity[name]).T, dense, atol=1e-5)
        np.testing.assert_allclose(report.deep[name], dense[:, DEPTH:].mean(axis=1), atol=1e-5)
        assert report.deep_mean[name] == pytest.approx(dense[:, DEPTH:].mean(), abs=1e-5)


def test_requests_of_different_length_and_depth() -> None:
    long, short = np.array([[1.0, 1.0], [0.8, 0.6]]), np.array([[1.0], [0.4]])
    seen = {ANOTHER: [short, short], ONCE: [long, short], PERIODIC: [long, long]}
    report = summarise(seen, [1, 0], 1)
    assert report.deep[ONCE] == pytest.approx((np.mean([0.8, 0.7]), 0.6))
    assert report.deep[PERIODIC] == pytest.approx((np.mean([0.8, 0.9]), np.mean([0.6, 0.8])))
    assert math.isnan(report.deep[ANOTHER][1])
    text = reading(report)
    assert "above depth 0 to 1 (of 2)" in text
    assert "Best is refreshed, then computed once, then another request's." in text
    assert "goes from 0.750 in the first step to 0.600 in step 2." in text


def test_short_requests_never_refresh_again() -> None:
    seen = {name: [np.array([[1.0, 1.0], [0.8, 0.6]])] for name in POLICIES}
    assert "No request lasts longer than one refresh interval" in reading(summarise(seen, [1], 2))


def test_depths_without_both_kinds_of_layers() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    layers = llm.model.config.layers
    for depth, message in ((0, "no shallow layers"), (layers, "no deep ones"), (layers + 1, "exceeds")):
        with pytest.raises(ConfigError, match=message):
            measure_reuse(llm, [request()], depth)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM("bundled-transit", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=2))


def test_the_bundled_task_is_judged_by_part(bundled: LLM) -> None:
    params = flat_params(transit.SAMPLING)
    none, reuse, bicache = measure_collapse(
        bundled, chat_workload(bundled, TaskChoice("transit"), 2, 1, 0, params), {"depth": 2}, 1
    )
    assert [row["cache"] for row in (none, reuse, bicache)] == ["none", "reuse", "bicache"]
    assert shares(none) == {"accuracy": 1, "rules": 1, "format": 1, "agreement": 1}
    assert (reuse["prefix_depth"], bicache["prefix_depth"]) == (bundled.loaded.config.layers, 2)


def test_a_response_that_is_cut_says_nothing_of_caches(bundled: LLM) -> None:
    params = SamplingParams(max_tokens=2, steps=2)
    with pytest.raises(ConfigError, match=r"'none', without any cache, answers 0\.0 % of the questions"):
        measure_collapse(bundled, chat_workload(bundled, TaskChoice("transit"), 2, 1, 0, params), {"depth": 2}, 1)


def row(accuracy: float, rules: float, form: float) -> dict[str, Any]:
    return {
        "cache": "reuse",
        "ratio_to_none": 2.0,
        "accuracy": accuracy,
        "accuracy_interval": [accuracy - 0.1, accuracy + 0.1],
        "parts": {"rules": rules, "format": form},
        "agreement_with_none": 0.5,
    }


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ((0.9, 1.0, 0.9), "no accuracy is lost"),
        ((0.75, 0.8, 0.9), "a loss within the 95 % interval of the difference"),
        ((0.65, 0.8, 0.9), "a loss of 15.0 points, beyond"),
        ((0.1, 0.8, 0.2), "accuracy collapses, and of the two parts of the system prompt the format suffers most"),
        ((0.1, 0.1, 0.8), "accuracy collapses, and of the two parts of the system prompt the rules suffer most"),
    ],
)
def test_the_reading_weighs_the_loss(after: tuple[float, float, float], said: str) -> None:
    text = collapse_reading([row(0.8, 0.9, 0.9), row(*after)])
    assert said in text
    assert text.startswith("reuse runs at 2.00 times the speed of no cache; accuracy goes from 80.0 %")


def test_answers_without_parts_have_accuracy_alone() -> None:
    whole = {**row(0.8, 0.9, 0.9), "parts": {}}
    assert collapse_reading([whole, {**row(0.1, 0.9, 0.9), "parts": {}}]).endswith(
        "80.0 % to 10.0 %: accuracy collapses."
    )

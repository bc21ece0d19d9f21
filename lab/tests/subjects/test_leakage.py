"""Attention leakage and the bound of appendix B: against dense float64 attention, and on models of random weights."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.depth.conversations import RandomPrompts
from remask.depth.rule import ProfileSettings
from remask.errors import ConfigError
from remask_lab.subjects.leakage import (
    DEVIATION,
    LEAKAGE,
    LEAST_NORM,
    QUANTITIES,
    SHIFT,
    SIMILARITY,
    VALUE_NORM,
    Constants,
    lower_bound,
    measure_leakage,
    reading,
    summarise,
)
from tests import goldens
from tests.depth.models import open_model
from tests.oracles.dense import DenseModel, load

CANVAS, PREFIX, MASKS = 40, 32, 4
SETTINGS = ProfileSettings(ratios=(80,), samples=1, canvas=CANVAS, response=MASKS)


def attention(model: DenseModel, states: Tensor, k: Tensor, layer: int) -> Tensor:
    """Probabilities of the prefix rows, [prefix, heads, T]."""
    x = model.norm(states[layer], model.weights[layer]["attn_norm"])
    places = torch.arange(len(x))
    q = model.rotate(model.project(layer, "q", x), places)[:PREFIX]
    keys = model.rotate(k, places).repeat_interleave(model.heads // model.kv_heads, 1)
    weights: Tensor = (torch.einsum("nhd,thd->nht", q, keys) / model.head_size**0.5).softmax(-1)
    return weights


def dense_quantities(model: DenseModel, tokens: list[int]) -> dict[str, list[float]]:
    canvas = torch.tensor(tokens)
    within, alone = model.forward(canvas), model.forward(canvas[:PREFIX]).kv
    found: dict[str, list[float]] = {name: [] for name in ("leakage", "deviation", "value_norm", "quotient", "norm")}
    for layer in range(model.layers):
        k, v = within.kv.k[layer], within.kv.v[layer]
        weights = attention(model, within.states, k, layer)
        leaked = weights[..., PREFIX:].sum(-1)
        values = v.repeat_interleave(model.heads // model.kv_heads, 1)
        full = torch.einsum("nht,thd->nhd", weights, values)
        inner = torch.einsum("nht,thd->nhd", weights[..., :PREFIX], values[:PREFIX]) / (1 - leaked)[..., None]
        deviation = (full - inner).norm(dim=-1)
        assert (deviation <= 2 * leaked * v.norm(dim=-1).max() + 1e-12).all(), "lemma 1"
        a, b = torch.stack([k[:PREFIX], v[:PREFIX]]), torch.stack([alone.k[layer], alone.v[layer]])
        found["leakage"].append(float(leaked.mean()))
        found["deviation"].append(float(deviation.mean()))
        found["value_norm"].append(float(v.norm(dim=-1).max()))
        found["quotient"].append(float((a - b).norm() / PREFIX**0.5 / deviation.mean()))
        found["norm"].append(float(min(a.norm(), b.norm()) / PREFIX**0.5))
    return found


@pytest.mark.parametrize("name", ["llada", "llada_gqa", "dream"])
def test_what_is_measured_is_what_dense_attention_does(name: str) -> None:
    folder = goldens.model_dir(name)
    llm = open_model(str(folder))
    prompts = RandomPrompts(llm.loaded.config)
    report = measure_leakage(llm, prompts, SETTINGS, steps=1)
    drawn = list(prompts.draw(random.Random("0:0"), CANVAS).tokens)
    expected = dense_quantities(
        load(folder), [*drawn[:PREFIX], *drawn[-(CANVAS - PREFIX - MASKS) :], *[llm.model.config.mask_id] * MASKS]
    )
    row = report.ratios[80]
    np.testing.assert_allclose(row.leakage, expected["leakage"], rtol=1e-4)
    np.testing.assert_allclose(row.greatest_leakage, expected["leakage"], rtol=1e-4)
    np.testing.assert_allclose(row.deviation, expected["deviation"], rtol=1e-3)
    np.testing.assert_allclose(report.constants.value_norm, expected["value_norm"], rtol=1e-4)
    np.testing.assert_allclose(report.constants.least_norm, expected["norm"], rtol=1e-4)
    np.testing.assert_allclose(report.constants.stability, expected["quotient"], rtol=1e-3, atol=1e-4)
    # With one measurement C is its own quotient, so the sharper bound is lemma 3 alone.
    shift = np.array(expected["quotient"]) * expected["deviation"]
    np.testing.assert_allclose(row.deviation_bound, 1 - shift**2 / (2 * np.array(expected["norm"]) ** 2), atol=1e-4)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_the_bounds_hold_in_every_layer_and_at_every_ratio(name: str) -> None:
    llm = open_model(name, dummy=True)
    for tensor in llm.model.weights.tensors():
        if tensor.dim() == 2:
            tensor.mul_(8)  # attention far from uniform
    settings = ProfileSettings(tau=0.9, ratios=(20, 50, 80, 90), samples=3, canvas=60, response=6)
    report = measure_leakage(llm, RandomPrompts(llm.loaded.config), settings, steps=3)
    assert (report.samples, report.steps) == (3, 3)
    for row in report.ratios.values():
        similarity, sharper, bound = (np.array(values) for values in (row.similarity, row.deviation_bound, row.bound))
        assert (bound <= sharper + 1e-6).all()
        assert (sharper <= similarity + 1e-5).all()
        assert row.guaranteed_depth <= row.deviation_depth <= row.depth <= row.mean_depth
        assert row.guaranteed_depth >= 1, "layer 1 never shifts"
    assert min(report.ratios[20].similarity) < 0.95, "the prefix does move"


def test_lemma_3_and_the_formula() -> None:
    torch.manual_seed(0)
    for _ in range(100):
        u = torch.randn(8, dtype=torch.float64)
        v = u + torch.rand(1, dtype=torch.float64) * torch.randn(8, dtype=torch.float64)
        constants = Constants((1.0,), (float(min(u.norm(), v.norm())),), (2.0,))
        least = lower_bound(constants, np.array([float((u - v).norm()) / 2]))
        assert float(F.cosine_similarity(u, v, dim=0)) >= least[0] - 1e-12
    assert lower_bound(Constants((9.0,), (2.0,), (3.0,)), np.array([0.5]))[0] == pytest.approx(1 - 1.5**2 / 8)


def trace(
    leakage: float, deviation: float, shift: float, similarity: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """One step of two layers, of which the first never shifts."""
    step = np.zeros((1, len(QUANTITIES), 2))
    step[:, LEAKAGE], step[:, DEVIATION], step[:, VALUE_NORM], step[:, LEAST_NORM] = leakage, deviation, 1.0, 1.0
    step[0, SHIFT] = (0.0, shift)
    step[0, SIMILARITY] = (1.0, similarity)
    return step


def test_constants_come_from_all_ratios_and_phi_from_its_own() -> None:
    measured = {50: [trace(0.4, 0.4, 0.4, 0.9)], 90: [trace(0.1, 0.1, 0.05, 0.999), trace(0.05, 0.1, 0.05, 0.998)]}
    report = summarise(measured, 0.97, "made")
    assert report.constants.stability == (0.0, 1.0)
    low, high = report.ratios[50], report.ratios[90]
    assert low.bound == pytest.approx((1, 1 - 0.8**2 / 2))
    assert low.deviation_bound == pytest.approx((1, 1 - 0.4**2 / 2))
    assert high.bound == pytest.approx((1, 1 - 0.2**2 / 2))
    assert (low.depth, low.guaranteed_depth, low.deviation_depth) == (1, 1, 1)
    assert (high.depth, high.guaranteed_depth, high.deviation_depth) == (2, 2, 2)
    assert high.leakage == pytest.approx((0.075, 0.075))
    text = reading(report)
    assert "goes from 40.0 % to 7.5 % (mean over layers), falling all the way" in text
    assert "would give 50 % and 10 %" in text
    assert "at least 1 (lowest r) to 2 (highest r) of 2 layers" in text
    assert "The bound reaches the measured depth at every ratio." in text


def test_a_reading_of_one_ratio_and_of_a_loose_bound() -> None:
    text = reading(summarise({90: [trace(0.4, 0.4, 0.4, 0.99)]}, 0.97, "made"))
    assert "At r = 90 % prefix rows give 40.0 % of their attention" in text
    assert "the bound guarantees" not in text
    assert "falls short of the measured depth by 1.0 layers" in text
    risen = {50: [trace(0.1, 0.1, 0.1, 0.99)], 90: [trace(0.2, 0.1, 0.1, 0.99)]}
    assert "not falling all the way" in reading(summarise(risen, 0.97, "made"))


def test_bad_settings() -> None:
    llm = open_model(str(goldens.model_dir("llada")))
    prompts = RandomPrompts(llm.loaded.config)
    with pytest.raises(ConfigError, match="leave official out"):
        measure_leakage(llm, prompts, ProfileSettings(official=True))
    with pytest.raises(ConfigError, match="steps must be at least 1, got 0"):
        measure_leakage(llm, prompts, SETTINGS, steps=0)

"""Similarity of features: against the recorded diagnostics, and against the dense oracle's own outputs."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab.tests.subjects.support import PROMPT, open_model, work
from torch import Tensor

from remask.cli.lines import as_request
from remask_lab.subjects.features import (
    FEATURES,
    FeatureTrace,
    measure_features,
    pick_count,
    reading,
    summarise,
    watcher,
)
from tests import goldens as masked
from tests.engine import kinds
from tests.goldens import uniform as goldens
from tests.oracles.dense import DenseModel


class Recording(DenseModel):
    """Keeps the outputs of attention and FFN, layer after layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.outputs: list[list[Tensor]] = [[], []]

    def attention(self, layer: int, x: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.outputs[0].append(super().attention(layer, x, positions, k, v))
        return self.outputs[0][-1]

    def feed_forward(self, layer: int, h: Tensor) -> Tensor:
        self.outputs[1].append(super().feed_forward(layer, h))
        return self.outputs[1][-1]


@pytest.mark.parametrize("row", [0, 1])
def test_similarities_equal_the_recorded_ones(row: int) -> None:
    llm, recorded = open_model(goldens.model_dir("unif")), goldens.diagnostics()
    run = goldens.Run(goldens.trace("T1_unif_b8"), "baseline", row)
    report = measure_features(llm, [as_request(llm, run.request_line(), "0", {})])
    for name in ("k", "v"):
        expected = 1 - recorded[f"{name}_drift"][:, row].numpy()
        np.testing.assert_allclose(np.array(report.maps[name]), expected, rtol=0, atol=1e-5)
        assert report.means[name].prompt == pytest.approx(float(expected[:, :10].mean()), abs=1e-5)
        assert np.mean(report.means[name].prompt_layers) == pytest.approx(report.means[name].prompt)


@pytest.mark.parametrize("family", ["llada", "llada_gqa", "dream"])
def test_all_four_features_against_the_dense_oracle(family: str) -> None:
    llm = open_model(masked.model_dir(family))
    trace = watcher(llm).trace(work(llm, block_length=4), FeatureTrace())
    (output,) = llm.session.run([work(llm, block_length=4)], trace=True)
    model = Recording(masked.model_dir(family))
    canvas = torch.tensor(PROMPT + [model.mask_id] * 12)
    passes = []
    assert output.trace is not None
    for event in output.trace:
        model.outputs = [[], []]
        kv = model.forward(canvas).kv
        passes.append([kv.k.flatten(2), kv.v.flatten(2), *(torch.stack(part) for part in model.outputs)])
        canvas[list(event.positions)] = torch.tensor(event.token_ids)
    assert trace.passes == len(passes) == len(trace.moved) + 1
    expected = [
        torch.stack([1 - F.cosine_similarity(a, b, dim=-1) for a, b in zip(before, after, strict=True)])
        for before, after in pairwise(passes)
    ]
    np.testing.assert_allclose(np.stack(trace.moved), torch.stack(expected).numpy(), rtol=0, atol=2e-5)
    report = summarise(llm, [trace])
    response = torch.stack(expected)[..., len(PROMPT) :].transpose(0, 1).flatten(1)
    for pair in report.foresight:
        both = response[[FEATURES.index(pair.early), FEATURES.index(pair.late)]]
        assert pair.correlation == pytest.approx(float(torch.corrcoef(both)[0, 1]), abs=1e-3)
    assert report.chance == 3 / 12
    assert response.shape[1] < 2000, "few enough for all of them to be in the sample"
    np.testing.assert_allclose(np.sort(report.sample["v"]), np.sort(response[1].numpy()), atol=2e-5)


def test_overlap_of_what_moves_most() -> None:
    llm = open_model(masked.model_dir("llada"))
    trace = watcher(llm).trace(work(llm), FeatureTrace())
    moved = np.zeros((4, llm.loaded.config.layers, len(PROMPT) + 12), dtype=np.float32)
    ranks = np.arange(12)
    moved[:, :, len(PROMPT) :] = np.stack([ranks, ranks, ranks, ranks[::-1]])[:, None]
    trace.moved = [moved]
    foresight = {(pair.early, pair.late): pair for pair in summarise(llm, [trace], ratio=0.5).foresight}
    assert foresight["v", "attention"].overlap == 1
    assert foresight["v", "attention"].correlation == pytest.approx(1)
    assert foresight["v", "ffn"].overlap == 0
    assert foresight["k", "ffn"].layers == pytest.approx((-1,) * llm.loaded.config.layers)


def test_rows_that_appear_later_are_compared_from_then_on() -> None:
    found = kinds.checkpoint("sdar")
    report = measure_features(open_model(found.folder), [work(open_model(found.folder))])
    table = np.array(report.maps["v"])
    assert np.isnan(table[0]).any()
    assert (np.nan_to_num(table, nan=1)[:, : len(PROMPT) // found.block * found.block] > 1 - 1e-6).all()
    assert np.isfinite(report.means["ffn"].response)


def test_the_reading_follows_from_the_numbers() -> None:
    llm = open_model(masked.model_dir("llada"))
    report = measure_features(llm, [work(llm), work(llm, seed=1)])
    told = reading(report)
    assert report.requests == 2
    assert f"K {report.means['k'].prompt:.4f}" in told
    assert all(f"{pair.correlation:.2f}" in told for pair in report.foresight)
    single = measure_features(llm, [work(llm, steps=1)])
    assert "too few" in reading(single)
    assert single.sample == dict.fromkeys(FEATURES, ())
    assert np.isnan(single.chance)


def test_as_many_are_picked_as_dllm_cache_picks_but_one_at_least() -> None:
    assert [pick_count(12, ratio) for ratio in (0.01, 0.25, 0.3, 1.0)] == [1, 3, 3, 12]

"""Establishes the diagnostics against those recorded for an uncached trace."""

from itertools import pairwise

import pytest
import torch

from tests.goldens import uniform as goldens
from tests.oracles import gidd, uniform
from tests.oracles.drift import REGIONS, attention_mass, drift, entropy, kv_drift, regions
from tests.oracles.recorded import close
from tests.oracles.uniform import Blocks, Step, Uncached
from tests.oracles.uniform_sampling import schedule


@pytest.mark.parametrize("row", [0, 1])
def test_drift_attention_mass_and_entropy(row: int) -> None:
    trace, recorded = goldens.trace("T1_unif_b8"), goldens.diagnostics()
    given, model = trace.parameters, gidd.load(goldens.model_dir(trace.model))
    tokens = trace.canvas(row)
    blocks = Blocks(given["prompt_length"], given["max_length"], given["block_length"], given["steps"], len(tokens))
    grid, pick = schedule(given["noise_schedule"], given["steps"]), uniform.greedy(model, given["tokens_per_step"])
    steps: list[Step] = list(
        uniform.generate(model, tokens, blocks, Uncached(model, blocks), grid, given["min_length"], pick)
    )
    assert len(steps) == len(recorded["entropy"])
    for number, step in enumerate(steps):
        close(entropy(step.out.logits[step.start : step.stop], model.mask_id), recorded["entropy"][number, row], 1e-4)
        close(attention_mass(step.out.attention, blocks, step.block), recorded["attn_mass"][number, row], 1e-5)
    for number, (before, after) in enumerate(pairwise(steps)):
        moved_k, moved_v = kv_drift(before.out.kv, after.out.kv)
        close(moved_k, recorded["k_drift"][number, row], 1e-5)
        close(moved_v, recorded["v_drift"][number, row], 1e-5)
        if before.block == after.block:
            assert float(torch.stack([moved_k, moved_v])[:, : before.start].abs().max()) < 1e-12


def test_regions_of_a_canvas() -> None:
    blocks = Blocks(prompt=2, response=9, length=2, steps=1, canvas=14)
    names = [REGIONS[index] for index in regions(blocks, 2).tolist()]
    future = ["current", "next", "rest_future"]
    expected = [name for name in ("prompt", "rest_past", "previous", *future, "trailing") for _ in range(2)]
    expected[10:] = ["rest_future"] * 2 + ["trailing"] * 2
    assert names == expected
    assert REGIONS[int(regions(blocks, 0)[2])] == "current"


def test_drift_is_one_minus_the_cosine_over_all_heads() -> None:
    before = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]], [[[1.0, 0.0], [0.0, 1.0]]]])
    after = torch.tensor([[[[0.0, 0.0], [3.0, 0.0]]], [[[2.0, 0.0], [0.0, 2.0]]]])
    torch.testing.assert_close(drift(before, after), torch.tensor([0.5]))


def test_entropy_leaves_mask_out() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, 0.0, 0.0], [9e3, 0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(entropy(logits, 2), torch.tensor([4.0, 1.0]).log())

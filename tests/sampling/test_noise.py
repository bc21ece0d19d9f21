import math

import numpy as np
import pytest
import torch

from remask.sampling.noise import Noise, sigmoid
from tests.goldens import uniform as goldens

MASK, VOCAB = 3, 50


def noise_of(shift: float, vocab: int = VOCAB) -> Noise:
    return Noise(shift, -9.0, 9.0, vocab, MASK)


def test_mixing_distributions_are_the_recorded_ones() -> None:
    common, tensors = goldens.sampling("torch_steps")
    recorded = {key: pi.numpy() for key, pi in tensors.items() if key.startswith("pi.")}
    assert len(recorded) == 20
    for key, expected in recorded.items():
        shift, log_snr = map(float, key.removeprefix("pi.nt").split(".ls"))
        noise = Noise(shift, -9.0, 9.0, common["vocab_size"], common["mask_token_id"])
        every = np.arange(noise.vocab)
        np.testing.assert_allclose(noise.probability(every, log_snr), expected, rtol=0, atol=1e-7)


def test_the_share_of_uniform_tokens_on_a_fresh_canvas() -> None:
    for shift, expected in goldens.sampling("torch_steps")[0]["prior_uniform_probability_by_noise_type"].items():
        assert noise_of(float(shift)).uniform_share(-9.0) == pytest.approx(expected, abs=1e-7)


def test_pure_noise_is_exact_at_every_level() -> None:
    every = np.arange(VOCAB)
    for log_snr in (-9.0, 0.0, 9.0):
        uniform, masks = (noise_of(shift).probability(every, log_snr) for shift in (1000.0, -1000.0))
        assert uniform[MASK] == 0
        assert np.delete(uniform, MASK).tolist() == [1 / (VOCAB - 1)] * (VOCAB - 1)
        assert masks[MASK] == 1
        assert masks.sum() == 1
    assert noise_of(-1000.0).only_masks
    assert not noise_of(1000.0).only_masks
    assert not noise_of(-15.0).only_masks, "hybrid noise is masks alone at its noisiest only"


def test_a_canvas_of_uniform_noise_holds_every_token_but_the_mask() -> None:
    drawn = noise_of(1000.0).draw(20_000, seed=1)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[MASK] == 0
    assert counts.argmin() == MASK
    expected = 20_000 / (VOCAB - 1)
    assert (abs(np.delete(counts, MASK) - expected) < 6 * math.sqrt(expected)).all()


@pytest.mark.parametrize("mask", [0, VOCAB - 1])
def test_the_mask_may_be_any_token(mask: int) -> None:
    drawn = Noise(1000.0, -9.0, 9.0, VOCAB, mask).draw(2_000, seed=1)
    assert set(drawn.tolist()) == set(range(VOCAB)) - {mask}


def test_a_canvas_of_masks_and_one_of_both() -> None:
    assert (noise_of(-1000.0).draw(100, seed=1) == MASK).all()
    drawn = noise_of(9.0).draw(20_000, seed=1)  # at log-SNR -9 one half each
    assert abs((drawn == MASK).mean() - 0.5) < 0.02


def test_draws_depend_on_the_seed_alone() -> None:
    noise = noise_of(9.0)
    assert noise.draw(64, seed=5).tolist() == noise.draw(64, seed=5).tolist() != noise.draw(64, seed=6).tolist()


@pytest.mark.parametrize("x", [-1009.0, -701.0, -699.0, -100.0, -9.0, -0.5, 0.0, 0.5, 9.0, 17.0, 1009.0])
def test_sigmoid_is_float32s(x: float) -> None:
    assert sigmoid(x) == pytest.approx(float(torch.tensor(x).sigmoid()), rel=1e-6, abs=1e-37)
    assert sigmoid(1000.0) == 1
    assert sigmoid(-1000.0) == 0

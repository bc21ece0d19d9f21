"""The terms of the bound that `train_uniform.py --loss bound` minimises, against their enumeration."""

import numpy as np
import pytest
import torch
from training.noise_bound import chain, divergences

from remask.denoising.noise import Noise
from tests.oracles import bound

VOCAB, MASK = 6, 5
SHIFTS = {"uniform": 1000.0, "hybrid": 0.5, "masks": -1000.0}


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("noise", SHIFTS)
def test_long_chains_keep_their_digits_and_gradients(noise: str, kind: str) -> None:
    """Steps of a long chain differ by little: their divergences still sum to what the enumeration says."""
    steps, exact = 400, bound.chain(400, SHIFTS[noise], VOCAB, MASK, -9.0, 9.0, kind)
    levels = chain(Noise(SHIFTS[noise], -9.0, 9.0, VOCAB, MASK), steps, kind)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(steps, VOCAB))).float().requires_grad_()
    places = torch.arange(1, steps + 1)
    noisy = torch.tensor([int(rng.choice(VOCAB, p=exact.marginal(int(place))[2])) for place in places])
    found = divergences(logits, torch.full((steps,), 2), noisy, levels.at(places), levels.at(places - 1), MASK)
    barred = logits.detach().double().masked_fill(torch.arange(VOCAB) == MASK, -torch.inf).softmax(-1).numpy()
    wanted = [
        bound.step_divergence(exact, int(place), [2], [int(noisy[row])], barred[row : row + 1])
        for row, place in enumerate(places)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-12)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()

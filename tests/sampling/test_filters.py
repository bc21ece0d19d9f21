"""Filters and draws against their definitions, a row at a time."""

import math

import torch
from torch import Tensor

from remask.sampling.filters import Draws, draw, top_k, top_p
from tests.goldens import uniform as goldens

LOGITS = torch.tensor([[2.0, 1.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.0, 0.0, 0.0]])


def kept(logits: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def test_top_k_keeps_ties_of_the_last() -> None:
    assert kept(top_k(LOGITS, 1)) == [[0], [1]]
    assert kept(top_k(LOGITS, 2)) == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert top_k(LOGITS, None) is top_k(LOGITS, 5) is LOGITS


def test_top_p_keeps_the_token_that_crosses() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for share, count in ((0.1, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert kept(top_p(shares, share)) == [list(range(count))]
    assert top_p(LOGITS, None) is top_p(LOGITS, 1.0) is LOGITS


def test_top_k_comes_before_top_p() -> None:
    """Of three equal tokens and a tail top-k leaves the three, of which top-p 0.5 needs two; not the other way."""
    shares = torch.tensor([[0.2, 0.2, 0.2, *[0.1] * 4]]).log()
    assert len(kept(top_p(top_k(shares, 3), 0.5))[0]) == 2
    assert len(kept(top_k(top_p(shares, 0.5), 3))[0]) == 3


def test_recorded_filters() -> None:
    """The original's order for GIDD: temperature, top-k, top-p."""
    tensors = goldens.sampling("torch_steps")[1]
    found = [case for case in goldens.cases("torch_steps") if case["name"].startswith("filter.")]
    assert len(found) == 8
    for case in found:
        logits, temperature = tensors["filter.logits"].flatten(0, -2), case["temperature"]
        if temperature == 0:
            continue
        share = top_p(top_k(logits / temperature, case["top_k"] or None), case["top_p"]).softmax(-1)
        expected = tensors[f"{case['name']}.probs"].flatten(0, -2)
        torch.testing.assert_close(share, expected, rtol=0, atol=1e-5)


def test_draws_follow_the_softmax_and_their_seed() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(20_000, -1)
    drawn = draw(logits, Draws(3))
    counts = drawn.bincount(minlength=4)
    assert counts[3] == 0
    for count, share in zip(counts.tolist(), (0.5, 0.3, 0.2), strict=False):
        assert abs(count - 20_000 * share) < 6 * math.sqrt(20_000 * share)
    assert torch.equal(drawn, draw(logits, Draws(3)))
    assert not torch.equal(drawn, draw(logits, Draws(4)))


def test_inputs_stay_as_they_are() -> None:
    before = LOGITS.clone()
    top_k(LOGITS, 2)
    top_p(LOGITS, 0.5)
    draw(LOGITS, Draws(1))
    assert torch.equal(LOGITS, before)

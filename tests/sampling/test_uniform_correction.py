"""Corrections of complete responses: which positions change, when it is over, and what a decoder tells meanwhile."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.errors import ConfigError
from remask.sampling.decoder import Predictions
from remask.sampling.filters import Draws
from remask.sampling.uniform import UniformDecoder
from remask.sampling.uniform_correction import Correction
from remask.sampling.uniform_score import NoisyRows, read_noisy
from tests.goldens import uniform as goldens
from tests.sampling.test_uniform import EOS, HYBRID, MASK, MASKS, decoder, decoding

NOTHING: list[int] = []


def take(
    correction: Correction,
    current: list[int],
    tokens: Sequence[int],
    scores: Sequence[float],
    places: Sequence[int] | None = None,
) -> list[int]:
    """One step; the positions that it changes have changed in `current`."""
    positions = np.array([10 + place for place in (range(len(current)) if places is None else places)])
    values = np.array(scores, dtype=np.float32)
    changed = correction.choose(np.array(current), positions, np.array(tokens), values)
    kept = dict(zip(positions.tolist(), tokens, strict=True))
    for position in changed.tolist():
        current[position - 10] = kept.get(position, current[position - 10])
    return [int(position) for position in changed]


def test_positions_that_a_pass_leaves_out_keep_their_proposals() -> None:
    correction, current = Correction(range(10, 14), 9, 1), [1, 2, 3, 4]
    assert take(correction, current, [7, 2, 3, 8], [0.6, 0.9, 0.9, 0.5]) == [10]
    assert take(correction, current, [7, 2], [0.9, 0.9], places=[0, 1]) == [13], "proposed by the pass before"
    current[3] = 8
    assert take(correction, current, [3, 8], [0.9, 0.9], places=[2, 3]) == NOTHING
    assert not correction.finished, "a part of the scope is no proof of a fixed point"
    assert not correction.changed_blocks(2, 20).any()
    assert take(correction, current, [7, 2, 3, 8], [0.9] * 4) == NOTHING
    assert correction.finished
    assert correction.steps == 4


def test_the_last_step_ends_it_whatever_it_changes() -> None:
    correction = Correction(range(10, 12), 2, 1)
    assert take(correction, [1, 2], [7, 7], [0.9, 0.8]) == [10]
    assert not correction.finished
    assert take(correction, [7, 2], [7, 7], [0.9, 0.8]) == [11]
    assert correction.finished


def test_it_ends_where_the_share_of_argmaxes_has_not_grown() -> None:
    """Two positions take turns in being wrong: no fixed point, and no more right tokens than before."""
    correction, current = Correction(range(10, 13), 99, 1, patience=2), [1, 5, 6]
    shares = []
    for argmax, proposal in (
        ((1, 2, 3), (1, 2, 6)),
        ((1, 2, 3), (1, 2, 3)),
        ((1, 2, 4), (1, 2, 4)),
        ((9, 2, 4), (9, 2, 4)),
    ):
        correction.record_argmax(np.arange(10, 13), np.array(argmax))
        take(correction, current, proposal, [0.5] * 3)
        shares.append((sum(a == b for a, b in zip(current, argmax, strict=True)), correction.finished))
    assert shares == [(2, False), (3, False), (3, False), (3, True)], "grown twice, then not for two steps"


def recorded() -> Iterator[tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]]:
    """Of each recorded step: the case, logits [L, V], and tokens before it, proposals and tokens after it, [L] each."""
    mask = goldens.sampling("gidd_v1")[0]["mask_token_id"]
    for case, tensors in goldens.cases("gidd_v1", "correct"):
        logits = tensors["logits"].clone()
        logits[..., mask] = -torch.inf
        for row in zip(logits, tensors["z"], tensors["proposal"], tensors["z_next"], strict=True):
            yield case, *row


def corrected(correction: Correction, case: dict[str, Any], logits: Tensor, current: Tensor, proposal: Tensor) -> Any:
    """The positions that a step changes whose draws are those that were recorded."""
    chances = (logits / case["temp"]).softmax(-1).gather(1, proposal[:, None])[:, 0].float()
    return correction.choose(current.numpy(), np.arange(len(current)), proposal.numpy(), chances.numpy())


def test_patience_counts_the_original_s_share() -> None:
    """The share of a recorded step of the original is what decides here: it grows, or one step of patience is over."""
    told = 0
    for case, logits, current, proposal, after in recorded():
        right = int((after == logits.argmax(-1)).sum())
        for most in (right - 1, right):
            correction = Correction(range(len(current)), 9, case["tokens_per_step"], patience=1)
            correction._max_argmax_count = most
            correction.record_argmax(np.arange(len(current)), logits.argmax(-1).numpy())
            corrected(correction, case, logits, current, proposal)
            assert correction.finished == (right <= most)
            told += 1
    assert told >= 8


def test_touched_blocks_stand_on_the_response_grid_and_end_with_the_canvas() -> None:
    correction = Correction(range(10, 20), 9, 2)
    take(correction, [1] * 10, [7, *[1] * 7, 7, 1], [0.9] * 10)
    assert np.flatnonzero(correction.changed_blocks(4, 21)).tolist() == [10, 11, 12, 13, 18, 19, 20]


def test_recorded_steps_of_the_original() -> None:
    """Its draws are forced: what is proposed where, and with which probability, decides as there."""
    compared = 0
    for case, logits, current, proposal, after in recorded():
        correction = Correction(range(len(current)), 9, case["tokens_per_step"])
        changed = torch.from_numpy(corrected(correction, case, logits, current, proposal))
        assert torch.equal(current.scatter(0, changed, proposal[changed]), after)
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_proposals_are_drawn_and_weighed_at_their_temperature(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12).expand(20_000, -1) * 0.3
    rows = NoisyRows(np.zeros(len(logits), dtype=np.int64), banned=(EOS,), banned_rows=len(logits))
    tokens, chances = read_noisy(logits, rows, MASK, temperature, None, None, Draws(5))
    allowed = logits[0].clone()
    allowed[[MASK, EOS]] = -torch.inf
    expected = (allowed / (temperature or 1)).softmax(-1)
    torch.testing.assert_close(chances, expected[tokens.long()])
    if temperature == 0:
        assert set(tokens.tolist()) == {int(allowed.argmax())}
        return
    counts = torch.bincount(tokens.long(), minlength=12)
    assert not counts[[MASK, EOS]].any()
    kept = expected > 0
    surprise = ((counts - expected * len(logits)).square()[kept] / (expected * len(logits))[kept]).sum()
    assert surprise < 40, "chi-square of 9 degrees of freedom exceeds that once in 100,000 draws"


def walk_to_the_end(walk: UniformDecoder) -> list[tuple[int, range, int]]:
    """Steps in which every pass proposes what stands there: step of the block, block, how many become final."""
    told = []
    while not walk.finished:
        positions = np.arange(walk.block.start, walk.block.stop)
        current = walk.canvas.tokens[positions]
        sure, best = np.ones(len(positions), dtype=np.float32), current[None].astype(np.float32)
        written = walk.choose(Predictions(positions, current, sure, numbers=best))
        assert not len(written)
        told.append((walk.block_step, walk.block, len(walk.outcome(written).final)))
        walk.advance()
    return told


def test_nothing_is_final_before_the_last_correction() -> None:
    walk = decoder(block_length=4, steps_per_block=1, max_tokens=6, correction_steps=5)
    assert (walk.context.corrections, walk.context.touched) == (0, None)
    assert walk_to_the_end(walk) == [
        (0, range(5, 9), 0),
        (0, range(9, 13), 0),
        (0, range(5, 11), 6),
    ], "the response alone is corrected, not what the last block holds beyond it"
    assert (walk.step, walk.context.corrections) == (3, 1)
    assert walk.context.sees is not None
    assert walk.context.sees.tolist() == [5] * 5 + [32] * 27


def test_none_are_taken_unless_asked_for() -> None:
    for given in ({}, {"correction_steps": 0}):
        walk = decoder(block_length=8, steps_per_block=1, **given)
        assert (walk.context.corrections, len(walk.outcome(np.empty(0, dtype=np.int64)).final)) == (None, 8)
        walk.advance()
        assert walk.finished


def test_mask_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match="correction_steps=3: this model's noise is masks alone"):
        decoding(shift=MASKS, correction_steps=3)
    assert decoding(shift=HYBRID, correction_steps=3).params.uniform.correction_steps == 3


def test_proposals_take_their_own_temperature() -> None:
    for given, expected in ((None, 0.1), (0.0, 0.0), (1e-9, 0.0), (0.7, 0.7)):
        own = {"correction_steps": 1, "correction_temperature": given, "min_tokens": 2}
        walk = decoder(block_length=8, steps_per_block=1, temperature=1.0, top_k=3, **own)
        walk.advance()
        group = walk.group(slice(0, 8), np.arange(5, 13))
        assert (group.temperature, group.top_k, group.top_p) == (expected, None, None)
        assert group.noisy is not None
        assert (group.noisy.weights, group.noisy.transition, group.noisy.banned_rows) == (None, None, 2)

"""Decoding under a block-causal mask: its blocks, its rules, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from remask.core.sampling import SamplingDefaults, SamplingParams
from remask.errors import ConfigError
from remask.sampling.block_causal import BlockCausalDecoding

MASK = 39


def decoding(prompt: int = 5, block: int | None = 4, **sampling: Any) -> BlockCausalDecoding:
    params = SamplingParams(**{"max_tokens": 6, **sampling})
    return BlockCausalDecoding.of([1] * prompt, params, SamplingDefaults(), block, MASK, 0)


def chosen(confidence: list[float], known: int = 0, step: int = 0, **sampling: Any) -> list[int]:
    """Offsets that a step of a block of 8 takes whose first `known` positions the prompt fills."""
    one = decoding(known or 8, 8, **sampling)
    walk = one.decoder(one.canvas(), "all")
    walk.block_step = step
    first = 0 if known else 8
    positions = np.flatnonzero(walk._canvas.noisy[first : first + 8]) + first
    values = np.array(confidence, dtype=np.float32)[positions - first]
    return [int(position) - first for position in walk.choose(positions, positions, values)]


FALLING = [0.9, 0.2, 0.8, 0.3, 0.7, 0.1, 0.6, 0.5]


def test_blocks_stand_on_an_absolute_grid() -> None:
    one = decoding()
    canvas = one.canvas()
    assert (one.length, len(canvas), canvas.end) == (12, 12, 11)
    assert canvas.tokens.tolist() == [1] * 5 + [MASK] * 7
    assert one.decoder(canvas, "all").sees.tolist() == [4] * 4 + [8] * 4 + [12] * 4
    walk = one.decoder(canvas, "all")
    assert (walk.block, walk.finished, walk.order) == (range(4, 8), False, None)
    canvas.settle(np.arange(5, 8), 0)
    walk.advance()
    assert (walk.block, walk.block_step, walk.step) == (range(8, 12), 0, 1)
    canvas.settle(np.arange(8, 12), 1)
    walk.advance()
    assert (walk.block, walk.finished) == (range(8, 12), True)
    assert not one.ordered
    assert one.whole_blocks


@pytest.mark.parametrize(("prompt", "first"), [(1, range(4)), (3, range(4)), (4, range(4, 8)), (8, range(8, 12))])
def test_the_first_block_is_the_one_that_the_prompt_ends_in(prompt: int, first: range) -> None:
    one = decoding(prompt)
    assert one.decoder(one.canvas(), "all").block == first


def test_a_request_may_name_another_block() -> None:
    assert decoding(block_length=3).block == 3
    assert decoding(block=None, block_length=3).length == 12


def test_fixed_counts() -> None:
    assert chosen(FALLING, steps_per_block=3) == [0, 2, 4]
    assert chosen(FALLING, steps_per_block=3, step=2) == [0, 2]
    assert chosen(FALLING, steps_per_block=20) == [0]
    assert chosen(FALLING, steps_per_block=2, step=5) == [0], "one by one after the schedule"
    assert chosen(FALLING, known=6, steps_per_block=1) == [6, 7], "no more than there are"


def test_a_threshold_is_strict_and_has_two_fallbacks() -> None:
    exact = [0.5, 0.25, 0.75, 0.5, 0.75, 0.0, 0.0, 0.0]
    assert chosen(exact, threshold=0.5, steps_per_block=8) == [2, 4]
    assert chosen(exact, threshold=0.5, steps_per_block=2) == [0, 2, 3, 4], (
        "too few: the best ones, the sure among them"
    )
    assert chosen(exact, threshold=0.5, steps_per_block=2, fallback="leftmost") == [0, 1, 2, 3]
    assert chosen(FALLING, known=5, threshold=0.99, steps_per_block=2, fallback="leftmost") == [5, 6, 7]


def test_sequential_is_a_window() -> None:
    assert chosen(FALLING, remasking="sequential", steps_per_block=4) == [0, 1]
    assert chosen(FALLING, known=7, remasking="sequential", steps_per_block=4) == [7]


def test_entropies_are_bounded_in_sum() -> None:
    certain = [-value for value in (0.3, 0.1, 0.2, 0.6, 9, 9, 9, 9)]  # confidences are negative entropies
    rule: dict[str, Any] = {"remasking": "entropy_bounded"}
    assert chosen(certain, **rule) == [1, 2], "the default bound is 0.35"
    assert chosen(certain, **rule, eb_threshold=0.65) == [0, 1, 2]
    assert chosen(certain, **rule, eb_threshold=0.0) == [1], "one always goes"
    assert chosen(certain, **rule, eb_threshold=99.0) == list(range(8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": None}, r"block_length is not in the model's config.json: give the one that it was trained with"),
        ({"remasking": "sequential", "threshold": 0.5}, "remasking 'sequential' does not rank by"),
        ({"remasking": "entropy_bounded", "threshold": 0.5}, "remasking 'entropy_bounded' does not rank by"),
        ({"fallback": "leftmost"}, "set threshold, too"),
        ({"eb_threshold": 0.3}, "eb_threshold is for remasking 'entropy_bounded'"),
    ],
)
def test_bad_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoding(**given)

"""Decoding under a block-causal mask: its blocks, its rules, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from remask.errors import ConfigError
from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.block_causal import BlockCausalDecoding, EditingDecoder

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
    positions = np.flatnonzero(walk.canvas.noisy[first : first + 8]) + first
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
    assert not one.ends_within(stop_written=True)


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


def step(
    walk: EditingDecoder, canvas: Canvas, tokens: list[int], confidence: list[float]
) -> tuple[list[int], list[int]]:
    """One step whose pass predicts `tokens` at the noisy positions of the block; positions written and edited."""
    noisy = np.flatnonzero(canvas.noisy[walk.block.start : walk.block.stop]) + walk.block.start
    predicted, sure = np.array(tokens), np.array(confidence, dtype=np.float32)
    written = walk.choose(noisy, predicted, sure)
    edited = walk.edited(written)
    final = walk.final(written)
    canvas.write(written, predicted[np.isin(noisy, written)])
    canvas.settle(final, walk.step)
    walk.advance()
    return written.tolist(), edited.tolist()


def editing(prompt: int = 5, **sampling: Any) -> tuple[EditingDecoder, Canvas]:
    one = decoding(prompt, **{"remasking": "joint_threshold", "max_tokens": 7, **sampling})
    canvas = one.canvas()
    walk = one.decoder(canvas, "all")
    assert isinstance(walk, EditingDecoder)
    return walk, canvas


def test_tokens_are_replaced_until_a_step_changes_none() -> None:
    walk, canvas = editing(threshold=0.5, edit_threshold=0.8)
    assert step(walk, canvas, [7, 8, 9], [0.6, 0.5, 0.4]) == ([5], []), "the threshold is strict"
    assert step(walk, canvas, [6, 8, 9], [0.8, 0.7, 0.2]) == ([6], []), "so is that of edits"
    assert step(walk, canvas, [6, 8, 9], [0.9, 0.9, 0.2]) == ([5, 7], [5]), "one mask at least, and an edit beside it"
    assert canvas.noisy[5:8].all(), "the block is not done: its last token has not been seen by any pass"
    assert step(walk, canvas, [6, 8, 9], [0.9, 0.9, 0.9]) == ([], [])
    assert canvas.tokens[5:8].tolist() == [6, 8, 9]
    assert (walk.block, walk.block_step, walk.finished) == (range(8, 12), 0, False)
    assert step(walk, canvas, [1, 2, 3, 4], [0.9] * 4) == ([8, 9, 10, 11], [])
    assert step(walk, canvas, [1, 2, 3, 4], [0.9] * 4) == ([], [])
    assert walk.finished


@pytest.mark.parametrize("post", [0, 1, 3])
def test_a_block_is_done_after_so_many_steps_without_masks(post: int) -> None:
    walk, canvas = editing(max_post_steps=post, edit_threshold=0)
    step(walk, canvas, [1, 2, 3], [0.99] * 3)
    for number in range(post):
        assert canvas.noisy[5], "tokens that swing are edited"
        assert step(walk, canvas, [number % 2 + 10, 2, 3], [0.1] * 3) == ([5], [5])
    assert walk.block == range(8, 12)
    assert not canvas.noisy[:8].any()


def test_so_many_masks_are_filled_at_least() -> None:
    walk, canvas = editing(4, min_transfer=2, threshold=0.5)
    assert step(walk, canvas, [1, 2, 3, 4], [0.9, 0.1, 0.3, 0.2]) == ([4, 6], [])
    assert step(walk, canvas, [1, 2, 3, 4], [0.9, 0.6, 0.3, 0.7]) == ([5, 7], [])


def test_the_token_to_the_left_within_the_block_is_penalised() -> None:
    walk, canvas = editing(6, penalty_lambda=2.0)
    canvas.tokens[5] = 17
    group = walk.group(slice(0, 2), np.array([6, 7]))
    assert group.penalty is not None
    assert (group.penalty.tokens.tolist(), group.penalty.size) == ([17, MASK], 2.0)
    first = editing(4, penalty_lambda=1.0)[0].group(slice(0, 4), np.arange(4, 8)).penalty
    assert first is not None
    assert first.tokens.tolist() == [-1, MASK, MASK, MASK], "the block's first row loses nothing"
    assert editing(penalty_lambda=0.0)[0].group(slice(0, 3), np.arange(5, 8)).penalty is None
    logits = torch.zeros(2, 40)
    group.penalty.apply(logits)
    assert logits.nonzero().tolist() == [[0, 17], [1, MASK]]
    assert logits.sum() == -4


def test_the_work_of_edits_is_counted_beforehand() -> None:
    one = decoding(remasking="joint_threshold", max_post_steps=3)
    assert (one.total_steps, one.passes(skips=False)) == (2 * (4 + 3), 7 + 2 * 3)
    assert decoding(remasking="joint_threshold").max_post_steps == 16
    assert decoding().max_post_steps == 0


def test_a_block_may_be_left_early() -> None:
    early = decoding(early_stop=True)
    assert early.ends_within(stop_written=True)
    assert not early.ends_within(stop_written=False), "the authors look for the end after steps that wrote one"


@pytest.mark.parametrize(
    "field",
    [{"steps": 4}, {"steps_per_block": 4}, {"fallback": "leftmost"}, {"factor": 0.5}, {"eb_threshold": 0.1}],
    ids=str,
)
def test_what_editing_has_no_use_for_is_refused_by_name(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=f"'joint_threshold' has no {name}, got {name}="):
        SamplingParams(remasking="joint_threshold", **field)


@pytest.mark.parametrize("name", ["edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda"])
def test_fields_of_edits_need_a_rule_that_edits(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=1 is for remasking 'joint_threshold': set both, or neither"):
        SamplingParams.from_mapping({name: 1})


def test_an_early_stop_is_refused_where_tokens_may_still_change() -> None:
    with pytest.raises(ConfigError, match="early_stop ends a block whose tokens"):
        SamplingParams(remasking="joint_threshold", early_stop=True)

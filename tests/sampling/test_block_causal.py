"""Decoding under a block-causal mask: its blocks, its rules, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

from remask.errors import ConfigError
from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingDefaults
from remask.sampling.block_causal import BlockCausalDecoding, EditingDecoder
from remask.sampling.decoder import Predictions
from tests.sampling_fields import flat_params

MASK = 39


def decoding(prompt: int = 5, block: int | None = 4, **sampling: Any) -> BlockCausalDecoding:
    params = flat_params(**{"max_tokens": 6, **sampling})
    return BlockCausalDecoding.of([1] * prompt, params, SamplingDefaults(), block, MASK, 0)


def chosen(confidence: list[float], known: int = 0, step: int = 0, **sampling: Any) -> list[int]:
    """Offsets that a step of a block of 8 takes whose first `known` positions the prompt fills."""
    one = decoding(known or 8, 8, **sampling)
    walk = one.decoder(one.canvas(), "all")
    walk.block_step = step
    first = 0 if known else 8
    positions = np.flatnonzero(walk.canvas.noisy[first : first + 8]) + first
    values = np.array(confidence, dtype=np.float32)[positions - first]
    return [int(position) - first for position in walk.choose(Predictions(positions, positions, values))]


def test_blocks_stand_on_an_absolute_grid() -> None:
    one = decoding()
    canvas = one.canvas()
    assert (one.length, len(canvas), canvas.end) == (12, 12, 11)
    assert canvas.tokens.tolist() == [1] * 5 + [MASK] * 7
    walk = one.decoder(canvas, "all")
    assert walk.context.sees is not None
    assert walk.context.sees.tolist() == [4] * 4 + [8] * 4 + [12] * 4
    assert (walk.block, walk.finished, walk.context.order) == (range(4, 8), False, None)
    canvas.settle(np.arange(5, 8), 0)
    walk.advance()
    assert (walk.block, walk.block_step, walk.step) == (range(8, 12), 0, 1)
    canvas.settle(np.arange(8, 12), 1)
    walk.advance()
    assert (walk.block, walk.finished) == (range(8, 12), True)
    assert not one.ordered
    assert not one.may_stop_within_block(stop_written=True)


def test_a_request_may_name_another_block() -> None:
    assert decoding(block_length=3).block_length == 3
    assert decoding(block=None, block_length=3).length == 12


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
        *(
            ({"remasking": rule, "threshold": 0.5, "fallback": "leftmost"}, f"remasking '{rule}' counts by itself")
            for rule in ("bound", "cumulative")
        ),
        ({"eb_threshold": 0.3}, "eb_threshold is for remasking 'entropy_bounded'"),
    ],
)
def test_bad_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoding(**given)


def editing(prompt: int = 5, **sampling: Any) -> tuple[EditingDecoder, Canvas]:
    one = decoding(prompt, **{"remasking": "joint_threshold", "max_tokens": 7, **sampling})
    canvas = one.canvas()
    walk = one.decoder(canvas, "all")
    assert isinstance(walk, EditingDecoder)
    return walk, canvas


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
    assert (one.total_steps, one.max_passes(skips=False)) == (2 * (4 + 3), 7 + 2 * 3)
    assert decoding(remasking="joint_threshold").max_post_steps == 16
    assert decoding().max_post_steps == 0


def test_a_block_may_be_left_early() -> None:
    early = decoding(early_stop=True)
    assert early.may_stop_within_block(stop_written=True)
    assert not early.may_stop_within_block(stop_written=False), (
        "the authors look for the end after steps that wrote one"
    )


@pytest.mark.parametrize(
    "field",
    [{"sub_block_length": 4}, {"fallback": "leftmost"}, {"factor": 0.5}, {"eb_threshold": 0.1}],
    ids=str,
)
def test_what_editing_has_no_use_for_is_refused_by_name(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ConfigError, match=rf"'joint_threshold' has no [\w.]*{name}, got [\w.]*{name}="):
        flat_params(remasking="joint_threshold", **field)


@pytest.mark.parametrize("name", ["steps", "steps_per_block"])
def test_a_rule_without_a_schedule_takes_no_steps(name: str) -> None:
    asked: dict[str, Any] = {name: 4, "remasking": "joint_threshold"}
    with pytest.raises(ConfigError, match=f"'joint_threshold' follows no schedule, so {name}=4 has no part"):
        flat_params(asked)


@pytest.mark.parametrize("name", ["edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda"])
def test_fields_of_edits_need_a_rule_that_edits(name: str) -> None:
    """Whoever names no rule has that of the model's family, so its decoding refuses them."""
    message = f"^remasking.{name}=1 is for remasking 'joint_threshold'.*, and this is '.*': set both, or neither"
    with pytest.raises(ConfigError, match=message):
        flat_params({name: 1, "remasking": "sequential"})
    with pytest.raises(ConfigError, match=message):
        decoding(**{name: 1})


def test_an_early_stop_is_refused_where_tokens_may_still_change() -> None:
    with pytest.raises(ConfigError, match="early_stop ends a block whose tokens"):
        flat_params(remasking="joint_threshold", early_stop=True)

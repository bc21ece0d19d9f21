"""Blocks of a response and their steps; the blocks that a decoding names are those that its decoder goes through."""

from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.denoising.noise import Noise
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Canvas, Hole, Template
from remask.request.sampling_params import SamplingDefaults, SamplingParams
from remask.sampling.block_causal import BlockCausalDecoding
from remask.sampling.blocks import Blocks, LinearSchedule, even_blocks, hole_blocks, ragged_blocks
from remask.sampling.decoder import Decoder, Decoding, Predictions
from remask.sampling.masked import MaskedDecoding
from remask.sampling.uniform import UniformDecoding
from tests.oracles.a2d import linear_counts
from tests.sampling_fields import flat_params


def test_max_tokens_must_be_whole_blocks() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens=10 is not a multiple of block_length=4; use max_tokens=12"):
        even_blocks(SamplingParams(max_tokens=10, block_length=4))
    with pytest.raises(ConfigError, match="use max_tokens=8"):
        even_blocks(SamplingParams(max_tokens=4, block_length=8))


def test_steps_must_be_shared_evenly_among_blocks() -> None:
    with pytest.raises(ConfigError, match=r"steps=6 cannot be shared evenly among 4 blocks .* a multiple of 4"):
        even_blocks(SamplingParams(max_tokens=16, block_length=4, steps=6))


@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 80))
def test_blocks_and_steps(max_tokens: int, block: int, steps: int | None) -> None:
    fits = max_tokens % block == 0 and (steps is None or steps % (max_tokens // block) == 0)
    params = SamplingParams(max_tokens=max_tokens, block_length=block, steps=steps)
    if not fits:
        with pytest.raises(ConfigError):
            even_blocks(params)
        return
    blocks = even_blocks(params)
    assert blocks.length == block
    assert blocks.count * blocks.length == max_tokens
    assert set(blocks.steps) == {(steps or max_tokens) // blocks.count}
    assert blocks.total_steps == (steps or max_tokens)


def test_one_block_is_the_default() -> None:
    assert even_blocks(SamplingParams(max_tokens=12, steps=5)) == Blocks(12, (range(12),), (5,))


def test_steps_may_be_given_per_block() -> None:
    assert even_blocks(SamplingParams(max_tokens=12, block_length=4, steps_per_block=3)) == Blocks(
        4, (range(4), range(4, 8), range(8, 12)), (3, 3, 3)
    )


def test_an_order_has_a_list_per_block() -> None:
    with pytest.raises(ConfigError, match="2 blocks, got 1 lists"):
        even_blocks(flat_params(max_tokens=4, block_length=2, remasking="order", order=[[3, 4]]))


@given(st.lists(st.booleans(), min_size=2, max_size=40).filter(any), st.integers(1, 12), st.data())
def test_steps_of_a_canvas_with_holes_are_all_taken(holes: list[bool], length: int, data: st.DataObject) -> None:
    """One a block or more, and the rest in proportion to what each has to fill."""
    places = [place for place, is_open in enumerate(holes) if is_open]
    template = Template(tuple(OPEN if each else 7 for each in holes), tuple(Hole(n, n + 1) for n in places))
    blocks = hole_blocks(SamplingParams(max_tokens=len(holes), block_length=length), template)
    masks = [sum(holes[block.start : block.stop]) for block in blocks.ranges]
    assert blocks.steps == tuple(masks), "a step for each"
    steps = data.draw(st.integers(len(masks), 3 * len(holes)))
    shared = hole_blocks(SamplingParams(max_tokens=len(holes), block_length=length, steps=steps), template)
    assert shared.total_steps == steps
    left = steps - len(masks)
    for taken, count in zip(shared.steps, masks, strict=True):
        assert abs(taken - 1 - left * count / sum(masks)) < 1


MASK, PROMPT = 3, [1] * 5


class Make(Protocol):
    def __call__(self, **sampling: Any) -> Decoding: ...


def masked(**sampling: Any) -> Decoding:
    return MaskedDecoding.of(PROMPT, flat_params(**sampling), SamplingDefaults(), MASK, 0, blockwise=True)


def block_causal(**sampling: Any) -> Decoding:
    return BlockCausalDecoding.of(PROMPT, flat_params(**sampling), SamplingDefaults(), 4, MASK, 0)


def uniform(**sampling: Any) -> Decoding:
    return UniformDecoding.of(PROMPT, flat_params(**sampling), Noise(1000.0, -9.0, 9.0, 40, MASK), (2,), 64, 0)


def step(canvas: Canvas, decoder: Decoder) -> None:
    """One step in which the model is sure of token 9 everywhere."""
    positions = np.array([place for place in decoder.block if canvas.noisy[place]], dtype=np.int64)
    sure = np.ones(len(positions), dtype=np.float32)
    chosen = decoder.choose(Predictions(positions, np.full(len(positions), 9), sure))
    canvas.write(chosen, np.full(len(chosen), 9))
    canvas.settle(decoder.outcome(chosen).final, decoder.step)
    decoder.advance()


@pytest.mark.parametrize("make", [masked, block_causal, uniform])
@pytest.mark.parametrize(("tokens", "length"), [(8, 4), (8, 8), (8, 1), (8, 2)])
def test_a_decoder_goes_through_the_named_blocks(make: Make, tokens: int, length: int) -> None:
    decoding = make(max_tokens=tokens, block_length=length)
    canvas = decoding.canvas()
    decoder = decoding.decoder(canvas, "all")
    seen: list[range] = []
    for _ in range(decoding.total_steps):
        if decoder.finished:
            break
        if not seen or seen[-1] != decoder.block:
            seen.append(decoder.block)
        step(canvas, decoder)
    assert decoder.finished
    assert decoding.block_ranges == seen
    assert set(range(5, 5 + tokens)) <= {place for block in seen for place in block}


def test_the_last_block_of_a_uniform_model_may_reach_beyond_the_response() -> None:
    assert uniform(max_tokens=6, block_length=4).block_ranges == [range(5, 9), range(9, 13)]


def test_the_first_block_of_a_block_causal_model_may_begin_in_the_prompt() -> None:
    assert block_causal(max_tokens=6).block_ranges == [range(4, 8), range(8, 12)]


@given(st.integers(1, 300), st.integers(1, 3000))
def test_the_linear_schedule_runs_no_idle_step(masks: int, steps: int) -> None:
    schedule, step, counts, left = LinearSchedule(steps), 0, list[int](), masks
    while left:
        step = schedule.next_busy_step(step, left)
        counts.append(schedule.count(step, left))
        left -= counts[-1]
        step += 1
    assert counts == linear_counts(masks, steps)
    assert step <= steps


def test_the_linear_schedule_of_many_steps_is_not_walked_through() -> None:
    schedule = LinearSchedule(2**30)
    first = schedule.next_busy_step(0, 8)
    assert 2**30 - 2000 < first < 2**30
    assert schedule.count(first, 8)


def test_ragged_blocks_share_steps_rounded_up() -> None:
    assert ragged_blocks(SamplingParams(max_tokens=10, block_length=4, steps=7)) == Blocks(
        4, (range(4), range(4, 8), range(8, 10)), (3, 3, 3)
    )
    assert ragged_blocks(SamplingParams(max_tokens=6, block_length=8)) == Blocks(8, (range(6),), (8,))
    assert ragged_blocks(SamplingParams(max_tokens=6, block_length=3, steps_per_block=2)).steps == (2, 2)
    with pytest.raises(ConfigError, match="order must hold one list per block: 3 blocks, got 1 lists"):
        ragged_blocks(flat_params(max_tokens=5, block_length=2, remasking="order", order=[[3, 4]]))

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.request.sampling_params import SamplingParams
from remask.sampling.blocks import Blocks, even_blocks, hole_blocks


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
        even_blocks(SamplingParams(max_tokens=4, block_length=2, remasking="order", order=[[3, 4]]))


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

"""Blocks of a masked response, the steps of each, and how many positions a step transfers."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.request.sampling_params import SamplingParams

GROWING_BLOCK = 32
"""Positions by which a growing canvas grows by default, as in iLLaDA's own code."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a response, which are denoised one after the other.

    Attributes:
        length: positions of a block; the last one may be shorter.
        ranges: positions of each block, counted from the start of the response.
        steps: scheduled steps of each block.
    """

    length: int
    ranges: tuple[range, ...]
    steps: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.ranges)

    @property
    def total_steps(self) -> int:
        """Steps of all blocks."""
        return sum(self.steps)


def blocks_for(
    params: SamplingParams, template: Template | None, *, growing: bool = False, ragged: bool = False
) -> Blocks:
    """Return the blocks of a response. Raises `ConfigError` if the response or the steps cannot be divided.

    The last block of a `growing` canvas may be shorter, and then has fewer steps. The last of `ragged` blocks may be
    shorter, but has as many steps as the others.
    """
    if ragged and template is None:
        return ragged_blocks(params)
    if growing:
        params = replace(params, block_length=params.block_length or GROWING_BLOCK)
        return hole_blocks(params, Template.plain(params.max_tokens))
    return even_blocks(params) if template is None else hole_blocks(params, template)


def even_blocks(params: SamplingParams) -> Blocks:
    """Return blocks of equal length with equal shares of the steps.

    Raises `ConfigError` if the response or the steps cannot be divided evenly.
    """
    length = params.block_length or params.max_tokens
    if params.max_tokens % length:
        raise ConfigError(
            f"max_tokens={params.max_tokens} is not a multiple of block_length={length}; "
            f"use max_tokens={-(-params.max_tokens // length) * length} or another block_length"
        )
    count = params.max_tokens // length
    if params.steps is not None and params.steps % count:
        raise ConfigError(
            f"steps={params.steps} cannot be shared evenly among {count} blocks "
            f"(max_tokens / block_length); use a multiple of {count}"
        )
    _check_orders(params, count)
    steps = params.steps_per_block or (params.steps or params.max_tokens) // count
    return Blocks(length, tuple(range(i * length, (i + 1) * length) for i in range(count)), (steps,) * count)


def ragged_blocks(params: SamplingParams) -> Blocks:
    """Return blocks of equal length, but for a shorter last one, with equal shares of the steps, rounded up.

    Raises `ConfigError` if the request's order has another number of blocks.
    """
    starts = range(0, params.max_tokens, params.block_length or params.max_tokens)
    _check_orders(params, len(starts))
    steps = params.steps_per_block or (starts.step if params.steps is None else -(-params.steps // len(starts)))
    ranges = tuple(range(start, min(start + starts.step, params.max_tokens)) for start in starts)
    return Blocks(starts.step, ranges, (steps,) * len(starts))


def hole_blocks(params: SamplingParams, template: Template) -> Blocks:
    """Return the blocks of a response with a `template`, without blocks that it fixes. The last may be shorter.

    By default a block has a step for each of its open positions. If the request sets `steps`, blocks share them in
    proportion to their open positions, and have at least one each. Raises `ConfigError` if there are fewer steps than
    blocks.
    """
    length = params.block_length or len(template)
    candidates = [range(start, min(start + length, len(template))) for start in range(0, len(template), length)]
    open_counts = np.add.reduceat(~template.pinned, [block.start for block in candidates], dtype=np.int64).tolist()
    ranges = tuple(block for block, count in zip(candidates, open_counts, strict=True) if count)
    mask_counts = [count for count in open_counts if count]
    _check_orders(params, len(ranges))
    if params.steps_per_block is not None:
        return Blocks(length, ranges, (params.steps_per_block,) * len(ranges))
    if params.steps is None:
        return Blocks(length, ranges, tuple(mask_counts))
    extra = params.steps - len(ranges)  # steps beyond one for each block
    total_masks = sum(mask_counts)
    if extra < 0:
        raise ConfigError(
            f"steps={params.steps} is less than the {len(ranges)} blocks of the canvas that hold positions to be "
            f"filled; use {len(ranges)} or more"
        )
    shares = [extra * cumulative // total_masks for cumulative in accumulate(mask_counts, initial=0)]
    return Blocks(length, ranges, tuple(1 + after - before for before, after in pairwise(shares)))


def _check_orders(params: SamplingParams, count: int) -> None:
    """Raise `ConfigError` if the request has an order, but not one list for each of `count` blocks."""
    if params.remasking.order is not None and len(params.remasking.order) != count:
        raise ConfigError(
            f"order must hold one list per block: {count} blocks, got {len(params.remasking.order)} lists"
        )


_ERROR = 2**-20  # bounds the float32 rounding errors of a share, and of a time


def even_count(mask_count: int, steps: int, step: int) -> int:
    """Return how many positions `step` transfers in LLaDA's schedule: an even share of `mask_count`.

    The first steps transfer one more each, until the remainder is used up.
    """
    return mask_count // steps + int(step < mask_count % steps)


class TimeSchedule:
    """Dream's schedule: times fall linearly from 1 to `eps`; a step transfers the share by which time falls in it.

    All arithmetic is float32, as in the original, because it decides how products round down.
    """

    def __init__(self, steps: int, eps: float) -> None:
        self.steps = steps
        self._end_time = float(np.float32(eps))
        self._increment = float((np.float32(eps) - np.float32(1)) / np.float32(steps))  # negative

    def time(self, index: int) -> np.float32:
        """Return the time before step `index`, from 1 at index 0 to `eps` at index `steps`, as by PyTorch's linspace.

        PyTorch counts the first half from the start and the second from the end. Each product and its sum are rounded
        once, as by a fused multiply-add.
        """
        if index < (self.steps + 1) // 2:
            return np.float32(1 + self._increment * index)
        return np.float32(self._end_time - self._increment * (self.steps - index))

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        if step >= self.steps - 1:
            return np.float32(1)
        return np.float32(1 - self.time(step + 1) / self.time(step))

    def count(self, step: int, mask_count: int) -> int:
        """Return how many positions `step` transfers when `mask_count` are masked, rounded down."""
        return int(np.float32(mask_count) * self.share(step))

    def next_busy_step(self, step: int, mask_count: int) -> int:
        """Return the first step from `step` on that transfers any of `mask_count` masked positions, 1 or more.

        A step transfers something once the time is below about `mask_count` times its decrement. Only the steps around
        that time, where rounding decides, are tried one by one. Their number grows with the square of `mask_count`, and
        with the number of steps only from millions on.
        """
        decrement = -self._increment
        last_step = self.steps - 1
        if decrement == 0:
            return max(step, last_step)
        if mask_count * _ERROR < 1:
            idle_steps = (1 - decrement * mask_count * (1 + mask_count * _ERROR)) / decrement - self.steps * _ERROR - 2
            step = max(step, min(int(idle_steps), last_step))
        while not self.count(step, mask_count):
            step += 1
        return step


class LinearSchedule:
    """A2D's schedule: with k steps left a step transfers 1 / k of the masks, rounded, halves to even.

    All arithmetic but the product is float32, as in the original, because it decides how halves round. Steps whose
    share rounds to 0 are idle, and the last one transfers all remaining masks.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        steps_left = self.steps - step
        one = np.float32(1)
        before, after = (one - (one - np.float32(steps / self.steps)) for steps in (steps_left, steps_left - 1))
        return one if steps_left <= 1 or not before else one - after / before

    def count(self, step: int, mask_count: int) -> int:
        """Return how many positions `step` transfers when `mask_count` are masked."""
        return round(mask_count * float(self.share(step)))

    def next_busy_step(self, step: int, mask_count: int) -> int:
        """Return the first step from `step` on that transfers any of `mask_count` masks; `step` if there are none."""
        if mask_count:
            # Rounding moves the step at which a share reaches a half by less than one step in a million.
            earliest = self.steps - 2 * mask_count - 2 - self.steps // 2**20
            step = max(step, earliest)
            while step < self.steps and not self.count(step, mask_count):
                step += 1
        return step

"""Blocks of a masked response, the steps of each, and how many positions a step transfers."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.request.sampling_params import SamplingParams

GROWING_BLOCK = 32
"""Positions that a growing canvas gets at a time, unless the request says otherwise. So it is in iLLaDA's own code."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Places of a response that are denoised together, block after block.

    Attributes:
        length: places of a block; the last one may be shorter.
        ranges: the places of each block, counted from the start of the response.
        steps: scheduled steps of each.
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
    """Return the blocks of a response. Raises `ConfigError` where the response or the steps cannot be divided.

    Those by which a canvas is `growing` are cut as those of a template without fixed parts: the last may be shorter.
    So it may be where they are `ragged`; each then has as many steps as the others.
    """
    if ragged and template is None:
        return ragged_blocks(params)
    if growing:
        params = replace(params, block_length=params.block_length or GROWING_BLOCK)
        return hole_blocks(params, Template.plain(params.max_tokens))
    return even_blocks(params) if template is None else hole_blocks(params, template)


def even_blocks(params: SamplingParams) -> Blocks:
    """Return blocks of equal length with equal shares of the steps.

    Raises `ConfigError` where the response or the steps cannot be divided evenly.
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
    """Return blocks of equal length, the last maybe shorter, with equal steps: those asked for, shared and rounded up.

    Raises `ConfigError` on an order of other blocks.
    """
    every = range(0, params.max_tokens, params.block_length or params.max_tokens)
    _check_orders(params, len(every))
    steps = params.steps_per_block or (every.step if params.steps is None else -(-params.steps // len(every)))
    ranges = tuple(range(start, min(start + every.step, params.max_tokens)) for start in every)
    return Blocks(every.step, ranges, (steps,) * len(every))


def hole_blocks(params: SamplingParams, template: Template) -> Blocks:
    """Return the blocks of a response with fixed parts: those that hold a place of a hole, the last maybe shorter.

    A block takes a step for each place to be denoised. A number of steps is shared in proportion to these, and at
    least one step each. Raises `ConfigError` where there are fewer.
    """
    length, is_open = params.block_length or len(template), ~template.pinned
    every = [range(start, min(start + length, len(template))) for start in range(0, len(template), length)]
    counts = np.add.reduceat(is_open, [block.start for block in every], dtype=np.int64).tolist()
    ranges = tuple(block for block, count in zip(every, counts, strict=True) if count)
    masks = [count for count in counts if count]
    _check_orders(params, len(ranges))
    if params.steps_per_block is not None:
        return Blocks(length, ranges, (params.steps_per_block,) * len(ranges))
    if params.steps is None:
        return Blocks(length, ranges, tuple(masks))
    left, total = params.steps - len(ranges), sum(masks)
    if left < 0:
        raise ConfigError(
            f"steps={params.steps} is less than the {len(ranges)} blocks of the canvas that hold positions to be "
            f"filled; use {len(ranges)} or more"
        )
    shared = accumulate(masks, initial=0)
    return Blocks(length, ranges, tuple(1 + left * b // total - left * a // total for a, b in pairwise(shared)))


def _check_orders(params: SamplingParams, count: int) -> None:
    if params.remasking.order is not None and len(params.remasking.order) != count:
        raise ConfigError(
            f"order must hold one list per block: {count} blocks, got {len(params.remasking.order)} lists"
        )


_ERROR = 2**-20  # bounds what float32 leaves uncertain of a share, and of a time


def even_count(masks: int, steps: int, step: int) -> int:
    """Return what `step` transfers in LLaDA's schedule: `masks` shared evenly, the remainder in the first steps."""
    return masks // steps + (step < masks % steps)


class TimeSchedule:
    """Dream's schedule: times fall linearly from 1 to `eps`; a step transfers the share by which time falls in it.

    All arithmetic is float32, as in the original: it decides how products round down. Nothing is stored per step.
    """

    def __init__(self, steps: int, eps: float) -> None:
        self.steps, self._last = steps, float(np.float32(eps))
        self._step = float((np.float32(eps) - np.float32(1)) / np.float32(steps))

    def time(self, index: int) -> np.float32:
        """Return the time before step `index`, from 1 at index 0 to `eps` at index `steps`, as PyTorch's linspace.

        That counts the first half from the start and the second from the end. Each product and its sum are rounded
        once, as a fused multiply-add does.
        """
        if index < (self.steps + 1) // 2:
            return np.float32(1 + self._step * index)
        return np.float32(self._last - self._step * (self.steps - index))

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        if step >= self.steps - 1:
            return np.float32(1)
        return np.float32(1 - self.time(step + 1) / self.time(step))

    def count(self, step: int, masks: int) -> int:
        """Return how many positions `step` transfers when `masks` are masked, rounded down."""
        return int(np.float32(masks) * self.share(step))

    def busy(self, step: int, masks: int) -> int:
        """Return the first step from `step` on that transfers any of `masks` masked positions, 1 or more.

        A step transfers something once the time has fallen to about `masks` times what it falls by in one step. Only
        the steps around that time, where rounding decides, are looked at one by one. Their number grows with the
        square of `masks`, and with the number of steps only from millions on.
        """
        fall, last_step = -self._step, self.steps - 1
        if fall == 0:
            return max(step, last_step)
        if masks * _ERROR < 1:
            idle = (1 - fall * masks * (1 + masks * _ERROR)) / fall - self.steps * _ERROR - 2
            step = max(step, min(int(idle), last_step))
        while not self.count(step, masks):
            step += 1
        return step


class LinearSchedule:
    """A2D's schedule: a step transfers the share of the masks that is 1 of the steps left, rounded, halves to even.

    All arithmetic but the product is float32, as in the original: it decides how halves round. Steps whose share rounds
    to nothing are idle, and the last one transfers all that is left.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def share(self, step: int) -> np.float32:
        """Return the share of the masked positions that `step` transfers; 1 in the last step."""
        left, one = self.steps - step, np.float32(1)
        before, after = (one - (one - np.float32(steps / self.steps)) for steps in (left, left - 1))
        return one if left <= 1 or not before else one - after / before

    def count(self, step: int, masks: int) -> int:
        """Return how many positions `step` transfers when `masks` are masked."""
        return round(masks * float(self.share(step)))

    def busy(self, step: int, masks: int) -> int:
        """Return the first step from `step` on that transfers any of `masks` masked positions; `step` where none is."""
        if masks:
            # What is rounded moves the place where a share reaches a half by less than a step in a million.
            step = max(step, self.steps - 2 * masks - 2 - (self.steps >> 20))
            while step < self.steps and not self.count(step, masks):
                step += 1
        return step

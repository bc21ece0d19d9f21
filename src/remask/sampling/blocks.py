"""Blocks of a masked response, and the steps of each."""

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


def blocks_for(params: SamplingParams, template: Template | None, *, growing: bool = False) -> Blocks:
    """Return the blocks of a response. Raises `ConfigError` where the response or the steps cannot be divided.

    Those by which a canvas is `growing` are cut as those of a template without fixed parts: the last may be shorter.
    """
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
    if params.order is not None and len(params.order) != count:
        raise ConfigError(f"order must hold one list per block: {count} blocks, got {len(params.order)} lists")

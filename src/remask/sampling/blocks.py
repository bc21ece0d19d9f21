"""Blocks of a masked response, and the steps of each."""

from dataclasses import dataclass

from remask.core.sampling import SamplingParams
from remask.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Blocks:
    """`count` blocks of `length` positions, each denoised in `steps` scheduled steps."""

    length: int
    count: int
    steps: int


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
    if params.order is not None and len(params.order) != count:
        raise ConfigError(f"order must hold one list per block: {count} blocks, got {len(params.order)} lists")
    return Blocks(length, count, params.steps_per_block or (params.steps or params.max_tokens) // count)

"""Sampling parameters of a request that leaves some to the server."""

from collections.abc import Mapping
from typing import Any

from remask.core.sampling import SamplingParams
from remask.sampling.blocks import even_blocks

# Parameters that a body and the server's defaults may both hold, under the same names.
NAMES = (
    "steps",
    "steps_per_block",
    "block_length",
    "remasking",
    "eps",
    "threshold",
    "factor",
    "temperature",
    "top_k",
    "top_p",
    "cfg_scale",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "order",
    "slowfast",
    "fallback",
    "sub_block_length",
    "eb_threshold",
    "sampler",
    "tokens_per_step",
    "schedule",
    "canvas_length",
    "initial_canvas",
    "min_tokens",
    "correction_steps",
    "correction_temperature",
    "correction_tokens",
)
_CHOICES = frozenset(
    ("remasking", "threshold", "factor", "eps")
)  # ways to choose tokens; a request's own replaces the server's

_STEPS = frozenset(("steps", "steps_per_block"))  # ways to say how many steps, likewise


def fit(defaults: Mapping[str, Any], own: Mapping[str, Any], room: int) -> SamplingParams:
    """`own` parameters, and `defaults` for the rest, which are made to fit them.

    What a request says is taken as it is, and refused where it contradicts itself. The server's defaults give way: a
    default `max_tokens` to the `room` beside the prompt, a default `block_length` to the longest one below it that
    `max_tokens` is a multiple of, and default `steps` keep their number per token. Raises `ConfigError`.
    """
    replaced = [names for names in (_CHOICES, _STEPS) if own.keys() & names]
    kept = {name: value for name, value in defaults.items() if not any(name in names for names in replaced)}
    merged = {**kept, **own}
    if "max_tokens" not in own:
        merged["max_tokens"] = _length(merged, merged.get("block_length", 1), room)
    length = merged["max_tokens"]
    if length >= 1:  # else nothing fits it, and its error is the one to tell
        if "block_length" in kept and "block_length" not in own:
            merged["block_length"] = _divisor(length, kept["block_length"])
        if "steps" in kept:
            block = merged.get("block_length", length)
            merged["steps"] = _steps(SamplingParams.from_mapping(defaults), length, block)
    return SamplingParams.from_mapping(merged)


def _length(merged: Mapping[str, Any], block: int, room: int) -> int:
    """The default response length, or as much of it as there is room for, in whole blocks where there is one."""
    most = min(int(merged.get("max_tokens", SamplingParams().max_tokens)), max(room, 1))
    return most - most % block if 1 <= block <= most else most


def _divisor(length: int, most: int) -> int:
    """The largest divisor of `length` that is at most `most`."""
    return next(block for block in range(min(length, most), 0, -1) if length % block == 0)


def _steps(usual: SamplingParams, length: int, block: int) -> int:
    """Steps for `length` tokens in blocks of `block`, at the usual number per token."""
    if not 1 <= block <= length:
        return 1
    blocks = even_blocks(usual)
    return max(1, round(block * blocks.steps / blocks.length)) * (length // block)

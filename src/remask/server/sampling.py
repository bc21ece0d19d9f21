"""Sampling parameters of a request that leaves some to the server."""

from collections.abc import Mapping
from typing import Any

from remask.core.sampling import SamplingParams

# Parameters that a body and the server's defaults may both hold, under the same names.
NAMES = (
    "steps",
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
)
_CHOICES = ("remasking", "threshold", "factor", "eps")  # ways to choose tokens; a request's own replaces the server's


def fit(defaults: Mapping[str, Any], own: Mapping[str, Any], room: int) -> SamplingParams:
    """`own` parameters, and `defaults` for the rest, which are made to fit them.

    What a request says is taken as it is, and refused where it contradicts itself. The server's defaults give way: a
    default `max_tokens` to the `room` beside the prompt, a default `block_length` to the longest one below it that
    `max_tokens` is a multiple of, and default `steps` keep their number per token. Raises `ConfigError`.
    """
    kept = {name: value for name, value in defaults.items() if not (name in _CHOICES and _chooses(own))}
    merged = {**kept, **own}
    if "max_tokens" not in own:
        usual = int(merged.get("max_tokens", SamplingParams().max_tokens))
        block = own.get("block_length", merged.get("block_length", 1))
        most = min(usual, max(room, 1))
        merged["max_tokens"] = max(most - most % block, min(block, usual)) if _whole(block) else most
    length = merged["max_tokens"]
    if not _whole(length):
        return SamplingParams.from_mapping(merged)
    if "block_length" not in own and "block_length" in merged:
        merged["block_length"] = _divisor(length, merged["block_length"])
    if "steps" not in own and "steps" in defaults:
        block = merged.get("block_length") or length
        if _whole(block):
            usual = SamplingParams.from_mapping(defaults)
            share = usual.steps_per_block / usual.block
            merged["steps"] = max(1, round(block * share)) * max(1, length // block)
    return SamplingParams.from_mapping(merged)


def _chooses(own: Mapping[str, Any]) -> bool:
    return any(name in own for name in _CHOICES)


def _whole(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _divisor(length: int, most: int) -> int:
    """The largest divisor of `length` that is at most `most`."""
    return next(block for block in range(min(length, most), 0, -1) if length % block == 0)

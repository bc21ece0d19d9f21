"""The sampling parameters of a request that leaves some of them out: a server's defaults, then the model's own."""

from collections.abc import Mapping
from typing import Any

from remask.checks.fields import declared
from remask.checks.values import POSITIONS
from remask.plan.canvas import Template
from remask.request.sampling_params import SamplingParams
from remask.request.uniform_presets import PRESET_FIELDS
from remask.sampling.blocks import blocks_for, even_blocks, hole_blocks


def fit(
    defaults: Mapping[str, Any],
    own: Mapping[str, Any],
    room: int,
    template: Template | None = None,
    *,
    growing: bool = False,
) -> SamplingParams:
    """Return a request's `own` parameters, with `defaults` for the rest, which are made to fit them.

    What a request sets is taken as it is, and refused where it contradicts itself. The defaults give way: a default
    `max_tokens` to the `room` beside the prompt, a default `block_length` to the longest one below it that
    `max_tokens` is a multiple of, and default `steps` keep their number per token. Defaults of one group of declared
    fields are dropped where the request sets another field of the group. None leaves a field out. The
    response of a `template`, of `max_tokens` places, need not be a multiple of its block, and its steps follow the
    places that are filled. The same goes for a canvas that grows, as it does where nobody sets `growing_canvas` and the
    model's family is `growing`; a default `growing_canvas` gives way to a `template`. Raises `ConfigError`.
    """
    defaults, own = _given(defaults), _given(own)
    merged, kept = _layered(defaults, own), _kept(defaults, own)
    if template is not None and "growing_canvas" not in own:  # such a canvas has its length
        merged.pop("growing_canvas", None)
    if "max_tokens" not in own:
        merged["max_tokens"] = _length(merged, merged.get("block_length", 1), room)
    length = merged["max_tokens"]
    if length >= 1:  # else nothing fits it, and its error is the one to report
        if template is None and merged.get("growing_canvas", growing):
            template = Template.plain(length)
        if "block_length" in kept and "block_length" not in own:
            most = kept["block_length"]
            merged["block_length"] = _divisor(length, most) if template is None else min(length, most)
        if "steps" in kept:
            block = merged.get("block_length", length)
            usual = SamplingParams.from_mapping(defaults)
            merged["steps"] = _steps(usual, length, block) if template is None else _shared(usual, template, block)
    return SamplingParams.from_mapping(merged)


def overlaid(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults that are `own` and, for the rest, `defaults` as far as they fit them. Raises `ConfigError`."""
    params = fit(defaults, own, POSITIONS)
    return {name: getattr(params, name) for name in _layered(_given(defaults), _given(own))}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set, after a check of each by itself. Unknown ones are refused with the whole."""
    found = {name: value for name, value in values.items() if value is not None}
    known = declared(SamplingParams)
    for name in found.keys() & known.keys():
        known[name].check(name, found[name])
    return found


def _layered(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**_kept(defaults, own), **own}


def _kept(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults whose group of declared fields `own` does not choose for itself.

    A preset and the fields that it sets give way to each other too.
    """
    groups = {name: field.group for name, field in declared(SamplingParams).items() if field.group is not None}
    replaced = {groups[name] for name in own if name in groups}
    left = {name: value for name, value in defaults.items() if groups.get(name) not in replaced}
    if "preset" in own:
        return {name: value for name, value in left.items() if name not in PRESET_FIELDS}
    if any(name in own for name in PRESET_FIELDS):
        left.pop("preset", None)
    return left


def _length(merged: Mapping[str, Any], block: int, room: int) -> int:
    """Return the default response length, or as much of it as fits into `room`, in whole blocks where one fits."""
    most = min(int(merged.get("max_tokens", SamplingParams().max_tokens)), max(room, 1))
    return most - most % block if 1 <= block <= most else most


def _divisor(length: int, most: int) -> int:
    """Return the largest divisor of `length` that is at most `most`."""
    return next(block for block in range(min(length, most), 0, -1) if length % block == 0)


def _steps(usual: SamplingParams, length: int, block: int) -> int:
    """Return the steps for `length` tokens in blocks of `block`, at the usual number per token."""
    if not 1 <= block <= length:
        return 1
    blocks = even_blocks(usual)
    return max(1, round(block * blocks.steps[0] / blocks.length)) * (length // block)


def _shared(usual: SamplingParams, template: Template, block: int) -> int:
    """Return the steps for the places of a template that are filled, at the usual number per token."""
    if block < 1:
        return 1
    blocks = hole_blocks(SamplingParams(block_length=block), template)
    usual_blocks = blocks_for(usual, None, growing=bool(usual.growing_canvas))
    return max(blocks.count, round(template.open_places * usual_blocks.steps[0] / usual_blocks.length))

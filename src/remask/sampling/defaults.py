"""The sampling parameters of a request: those that it leaves out, and which have a meaning on its kind of model."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from remask.checks import ModelKind, in_words
from remask.checks.fields import by_group, by_path, paths
from remask.checks.values import POSITIONS
from remask.denoising.rules import RULES, names_on
from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.request.sampling_groups import PRESET_FIELDS
from remask.request.sampling_params import DIFFUSION, SamplingParams, fits_mode
from remask.sampling.blocks import Blocks, blocks_for, hole_blocks


def fit(
    defaults: Mapping[str, Any],
    own: Mapping[str, Any],
    room: int,
    template: Template | None = None,
    *,
    growing: bool = False,
    whole: bool = True,
    ragged: bool = False,
    modes: bool = False,
) -> SamplingParams:
    """Return a request's `own` parameters, with `defaults` for the rest, which are made to fit them.

    What a request sets is taken as it is, and refused where it contradicts itself. The defaults give way: a default
    `max_tokens` to `min_tokens` and to the `room` beside the prompt, a default `min_tokens` to `max_tokens`, a default
    `block_length` to the longest one below it that `max_tokens` is a multiple of, and default `steps` keep their number
    per token. Defaults of a range, and of a part of a block, give way to its other end, and to the block. Defaults of
    one choice are dropped where the request sets another field of it, thresholds where it sets `steps`, and those of
    other modes than its own, of a model that has `modes`. A default `block_length` stays where the model's responses
    need not be `whole` blocks, or where the last one may be shorter (`ragged`).
    None leaves a field out. The response of a `template`, of `max_tokens` places, need not be a multiple of its block,
    and its steps follow the places that are filled. The same goes for a canvas that grows, as it does where nobody sets
    `growing_canvas` and the model's family is `growing`; a default `growing_canvas` gives way to a `template`. Raises
    `ConfigError`.
    """
    defaults, own = _given(defaults), _given(own)
    if modes:
        defaults = _of_mode(defaults, own.get("mode") or defaults.get("mode") or DIFFUSION)
    merged, kept = _layered(defaults, own), _kept(defaults, own)
    if template is not None and "blocks.growing_canvas" not in own:  # such a canvas has its length
        merged.pop("blocks.growing_canvas", None)
    if "max_tokens" not in own:
        merged["max_tokens"] = _length(merged, 1 if ragged else merged.get("block_length", 1), room)
    length = merged["max_tokens"]
    if "min_tokens" in kept and "min_tokens" not in own:
        merged["min_tokens"] = min(kept["min_tokens"], length)
    if length >= 1:  # else nothing fits it, and its error is the one to report
        if template is None and merged.get("blocks.growing_canvas", growing):
            template = Template.plain(length)
        if whole and not ragged and "block_length" in kept and "block_length" not in own:
            most = kept["block_length"]
            merged["block_length"] = _divisor(length, most) if template is None else min(length, most)
        if "steps" in kept:
            block = merged.get("block_length", length)
            grows = defaults.get("blocks.growing_canvas", growing)
            usual = blocks_for(_made(defaults), None, growing=grows, ragged=ragged)
            steps = _steps(usual, length, block, ragged=ragged)
            merged["steps"] = steps if template is None else _shared(usual, template, block)
    _give_way(merged, own)
    return _made(merged)


def overlaid(
    defaults: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    growing: bool = False,
    whole: bool = True,
    ragged: bool = False,
) -> dict[str, Any]:
    """Return defaults that are `own` and, for the rest, `defaults` as far as they fit them; see `fit`."""
    params = fit(defaults, own, POSITIONS, growing=growing, whole=whole, ragged=ragged)
    return by_group(
        SamplingParams, {path: attrgetter(path)(params) for path in _layered(_given(defaults), _given(own))}
    )


def of_mode(values: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """What of `values` has a meaning on a request in `mode`; None: all. Raises `ConfigError` on bad groups."""
    given = by_path(SamplingParams, values)
    return by_group(SamplingParams, given if mode is None else _of_mode(given, mode))


def _of_mode(given: Mapping[str, Any], mode: str) -> dict[str, Any]:
    return {path: value for path, value in given.items() if fits_mode(path, mode)}


def _made(values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters that have these values by path."""
    return SamplingParams.from_mapping(by_group(SamplingParams, values))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set by path, after a check of each. Unknown ones are refused with the whole."""
    found, known = by_path(SamplingParams, values), paths(SamplingParams)
    for path in found.keys() & known.keys():
        known[path].check(path, found[path])
    return found


def _layered(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**_kept(defaults, own), **own}


def _kept(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of choices that `own` does not make for itself.

    A preset and the fields that it sets give way to each other too, and thresholds, which bound no number of steps, to
    `steps`.
    """
    choices = {path: field.choice for path, field in paths(SamplingParams).items() if field.choice is not None}
    replaced = {choices[path] for path in own if path in choices}
    left = {path: value for path, value in defaults.items() if choices.get(path) not in replaced}
    if "steps" in own:
        left = {path: value for path, value in left.items() if path not in _UNBOUNDED}
    if "uniform.preset" in own:
        return {path: value for path, value in left.items() if path not in PRESET_FIELDS}
    if any(path in own for path in PRESET_FIELDS):
        left.pop("uniform.preset", None)
    return left


_UNBOUNDED = ("threshold", "remasking.factor")
"""Fields under which a masked model takes as many steps as it needs."""


def _length(merged: Mapping[str, Any], block: int, room: int) -> int:
    """Return the default response length, or as much of it as fits into `room`, in whole blocks where one fits.

    It is at least `min_tokens`, where that fits.
    """
    least = int(merged.get("min_tokens", 0))
    usual = max(int(merged.get("max_tokens", SamplingParams().max_tokens)), least + -least % max(block, 1))
    most = min(usual, max(room, 1))
    return most - most % block if 1 <= block <= most and most - most % block >= least else most


def _divisor(length: int, most: int) -> int:
    """Return the largest divisor of `length` that is at most `most`."""
    return next(block for block in range(min(length, most), 0, -1) if length % block == 0)


def _steps(usual: Blocks, length: int, block: int, *, ragged: bool) -> int:
    """Return the steps for `length` tokens in blocks of `block`, at the usual number per token.

    The last of `ragged` blocks, which may be shorter, has as many as others.
    """
    if block < 1 or (block > length and not ragged):
        return 1
    return max(1, round(block * usual.steps[0] / usual.length)) * (-(-length // block) if ragged else length // block)


# Fields of which the first is at most the second. A default that contradicts a request gives way.
_ORDERED = (("speculation.draft_window", "speculation.max_draft_window"), ("renoising.t_min", "renoising.t_max"))
_PART = "blocks.sub_block_length"


def _give_way(merged: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Make defaults of `merged` fit what a request's `own` parameters set: in an order, or as a part of a block."""
    for least, most in _ORDERED:
        if least in merged and most in merged and merged[least] > merged[most]:
            if least not in own:
                merged[least] = merged[most]
            elif most not in own:
                merged[most] = merged[least]
    if _PART in merged and _PART not in own and "block_length" in own:
        merged[_PART] = _divisor(merged["block_length"], merged[_PART])


def _shared(usual: Blocks, template: Template, block: int) -> int:
    """Return the steps for the places of a template that are filled, at the usual number per token."""
    if block < 1:
        return 1
    blocks = hole_blocks(SamplingParams(block_length=block), template)
    return max(blocks.count, round(template.open_places * usual.steps[0] / usual.length))


_WHY = dict.fromkeys(
    ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "Tokens are written over again here, so none has been used up; logit_bias and stop work on every model. ",
)


def check_fields(params: SamplingParams, kind: ModelKind) -> None:
    """Raise `ConfigError` where a parameter is set that has no meaning on a model of this kind."""
    fields = paths(SamplingParams)
    for name, field in fields.items():
        if kind not in field.kinds and attrgetter(name)(params) != field.default:
            own = ", ".join(name for name, other in fields.items() if kind in other.kinds and not other.for_all)
            raise ConfigError(
                f"{name} is for {in_words(field.kinds)} models, and this one is {in_words((kind,))}; "
                f"leave it out. {_WHY.get(name, '')}Parameters of such models alone: {own}"
            )
    rule = params.remasking.rule
    if rule is not None and kind not in RULES.get(rule).kinds:
        fitting = ", ".join(names_on(kind))
        raise ConfigError(f"remasking {rule!r} is not defined on {in_words((kind,))} models; use {fitting}")

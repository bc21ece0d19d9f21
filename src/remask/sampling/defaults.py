"""The sampling parameters of a request: defaults for those that it leaves out, and checks for its kind of model."""

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


def fit_defaults(
    defaults: Mapping[str, Any],
    requested: Mapping[str, Any],
    room: int,
    template: Template | None = None,
    *,
    growing: bool = False,
    whole: bool = True,
    ragged: bool = False,
    modes: bool = False,
) -> SamplingParams:
    """Return the `requested` parameters, with `defaults` for all others, adapted to fit them.

    Requested values are never changed. None unsets a field. Raises `ConfigError` if requested values contradict each
    other, or a value is wrong. Defaults are adapted as follows:

    - `max_tokens` is raised to `min_tokens`, and lowered to the `room` beside the prompt (in tokens).
    - `min_tokens` is lowered to `max_tokens`.
    - `block_length` becomes the largest length up to the default that divides `max_tokens`. It stays if responses need
      not be `whole` blocks, or the last block may be shorter (`ragged`).
    - `steps` keep their number per token.
    - One end of a range is moved to a requested other end, and a sub-block to a length that divides the block.
    - Dropped are: fields of a choice of which the request sets another field, thresholds if it sets `steps`, a fallback
      without a threshold, and fields of other modes if the model has `modes`.

    A `template` has `max_tokens` positions. Its length need not be a multiple of the block, and its steps are in
    proportion to the positions to be filled. A growing canvas (by default if the family is `growing`) is treated alike;
    a default `growing_canvas` is dropped if there is a `template`.
    """
    defaults_by_path = _fields_by_path(defaults)
    requested_by_path = _fields_by_path(requested)
    if modes:
        mode = requested_by_path.get("mode") or defaults_by_path.get("mode") or DIFFUSION
        defaults_by_path = _fields_of_mode(defaults_by_path, mode)
    usable = _applicable_defaults(defaults_by_path, requested_by_path)
    merged = {**usable, **requested_by_path}
    if template is not None and "blocks.growing_canvas" not in requested_by_path:
        merged.pop("blocks.growing_canvas", None)
    if "max_tokens" not in requested_by_path:
        merged["max_tokens"] = _default_length(merged, 1 if ragged else merged.get("block_length", 1), room)
    length = merged["max_tokens"]
    if "min_tokens" in usable and "min_tokens" not in requested_by_path:
        merged["min_tokens"] = min(usable["min_tokens"], length)
    if length >= 1:  # otherwise max_tokens itself is refused below
        if template is None and merged.get("blocks.growing_canvas", growing):
            template = Template.plain(length)
        if whole and not ragged and "block_length" in usable and "block_length" not in requested_by_path:
            limit = usable["block_length"]
            merged["block_length"] = _largest_divisor(length, limit) if template is None else min(length, limit)
        if "steps" in usable:
            block_length = merged.get("block_length", length)
            grows = defaults_by_path.get("blocks.growing_canvas", growing)
            default_blocks = blocks_for(_params_of(defaults_by_path), None, growing=grows, ragged=ragged)
            if template is None:
                merged["steps"] = _default_steps(default_blocks, length, block_length, ragged=ragged)
            else:
                merged["steps"] = _template_steps(default_blocks, template, block_length)
    _reconcile(merged, requested_by_path)
    return _params_of(merged)


def overlay_defaults(
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    growing: bool = False,
    whole: bool = True,
    ragged: bool = False,
) -> dict[str, Any]:
    """Return new defaults: the `overrides`, and `defaults` for all others, as `fit_defaults` adapts them."""
    params = fit_defaults(defaults, overrides, POSITIONS, growing=growing, whole=whole, ragged=ragged)
    defaults_by_path = _fields_by_path(defaults)
    overrides_by_path = _fields_by_path(overrides)
    fields = {**_applicable_defaults(defaults_by_path, overrides_by_path), **overrides_by_path}
    return by_group(SamplingParams, {path: attrgetter(path)(params) for path in fields})


def restrict_to_mode(values: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Return the `values` that have a meaning in `mode` (None: all). Raises `ConfigError` on bad groups."""
    fields = by_path(SamplingParams, values)
    return by_group(SamplingParams, fields if mode is None else _fields_of_mode(fields, mode))


def _fields_of_mode(fields: Mapping[str, Any], mode: str) -> dict[str, Any]:
    return {path: value for path, value in fields.items() if fits_mode(path, mode)}


def _params_of(values: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters with these values by path. Raises `ConfigError`."""
    return SamplingParams.from_mapping(by_group(SamplingParams, values))


def _fields_by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set fields by path. Raises `ConfigError` on bad values; unknown names are refused by `_params_of`."""
    fields = by_path(SamplingParams, values)
    declarations = paths(SamplingParams)
    for path in fields.keys() & declarations.keys():
        declarations[path].check(path, fields[path])
    return fields


def _applicable_defaults(defaults: Mapping[str, Any], requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults without those that a requested field excludes.

    Fields of one choice exclude each other, and so do a preset and the fields that it sets, and `steps` and thresholds.
    """
    choices = {path: field.choice for path, field in paths(SamplingParams).items() if field.choice is not None}
    requested_choices = {choices[path] for path in requested if path in choices}
    usable = {path: value for path, value in defaults.items() if choices.get(path) not in requested_choices}
    if "steps" in requested:
        usable = {path: value for path, value in usable.items() if path not in _STEP_FREE_FIELDS}
    if "uniform.preset" in requested:
        return {path: value for path, value in usable.items() if path not in PRESET_FIELDS}
    if any(path in requested for path in PRESET_FIELDS):
        usable.pop("uniform.preset", None)
    return usable


_STEP_FREE_FIELDS = ("threshold", "remasking.factor")
"""Fields under which a masked model takes as many steps as it needs."""


def _default_length(merged: Mapping[str, Any], block_length: int, room: int) -> int:
    """Return the default response length, cut to `room` and to whole blocks if possible.

    It is at least `min_tokens`, if these fit into `room`.
    """
    min_tokens = int(merged.get("min_tokens", 0))
    default = int(merged.get("max_tokens", SamplingParams().max_tokens))
    length = min(max(default, min_tokens + -min_tokens % max(block_length, 1)), max(room, 1))
    if not 1 <= block_length <= length:
        return length
    whole_blocks = length - length % block_length
    return whole_blocks if whole_blocks >= min_tokens else length


def _largest_divisor(length: int, limit: int) -> int:
    """Return the largest divisor of `length` that is at most `limit`."""
    return next(divisor for divisor in range(min(length, limit), 0, -1) if length % divisor == 0)


def _default_steps(default_blocks: Blocks, length: int, block_length: int, *, ragged: bool) -> int:
    """Return the steps for `length` tokens in blocks of `block_length`, at the default number per token.

    The last of `ragged` blocks, which may be shorter, has as many steps as others.
    """
    if block_length < 1 or (block_length > length and not ragged):
        return 1
    block_steps = max(1, round(block_length * default_blocks.steps[0] / default_blocks.length))
    return block_steps * (-(-length // block_length) if ragged else length // block_length)


# Pairs of fields. The first of a pair is at most the second.
_ORDERED_FIELDS = (("speculation.draft_window", "speculation.max_draft_window"), ("renoising.t_min", "renoising.t_max"))
_SUB_BLOCK = "blocks.sub_block_length"
_FALLBACK = "remasking.fallback"  # of a threshold


def _reconcile(merged: dict[str, Any], requested: Mapping[str, Any]) -> None:
    """Change defaults in `merged` that contradict a requested end of a range, block length or rule."""
    for lower, upper in _ORDERED_FIELDS:
        if lower in merged and upper in merged and merged[lower] > merged[upper]:
            if lower not in requested:
                merged[lower] = merged[upper]
            elif upper not in requested:
                merged[upper] = merged[lower]
    if _SUB_BLOCK in merged and _SUB_BLOCK not in requested and "block_length" in requested:
        merged[_SUB_BLOCK] = _largest_divisor(merged["block_length"], merged[_SUB_BLOCK])
    has_no_threshold = merged.get("threshold") is None or "remasking.rule" in requested
    if has_no_threshold and _FALLBACK in merged and _FALLBACK not in requested:
        del merged[_FALLBACK]


def _template_steps(default_blocks: Blocks, template: Template, block_length: int) -> int:
    """Return the steps for the positions of a template to be filled, at the default number per token."""
    if block_length < 1:
        return 1
    blocks = hole_blocks(SamplingParams(block_length=block_length), template)
    return max(blocks.count, round(template.open_places * default_blocks.steps[0] / default_blocks.length))


_REASONS = dict.fromkeys(
    ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "Tokens are written over again here, so none has been used up; logit_bias and stop work on every model. ",
)


def check_fields(params: SamplingParams, kind: ModelKind) -> None:
    """Raise `ConfigError` if a parameter is set that has no meaning on a model of this kind."""
    fields = paths(SamplingParams)
    for name, field in fields.items():
        if kind not in field.kinds and attrgetter(name)(params) != field.default:
            names = ", ".join(other for other, spec in fields.items() if kind in spec.kinds and not spec.for_all)
            raise ConfigError(
                f"{name} is for {in_words(field.kinds)} models, and this one is {in_words((kind,))}; "
                f"leave it out. {_REASONS.get(name, '')}Parameters of such models alone: {names}"
            )
    rule = params.remasking.rule
    if rule is not None and kind not in RULES.get(rule).kinds:
        fitting = ", ".join(names_on(kind))
        raise ConfigError(f"remasking {rule!r} is not defined on {in_words((kind,))} models; use {fitting}")

"""Sampling parameters: how one request is denoised. Each is declared here, and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, Self

from remask.checks import ModelKind
from remask.checks.fields import (
    Grouped,
    by_group,
    by_path,
    check,
    declare,
    declared,
    documented,
    grouped,
    optional,
    parse,
    paths,
    unknown_name_error,
)
from remask.checks.values import LARGEST, POSITIONS, Biases, Choice, Flag, ListOf, Real, Text, Whole
from remask.denoising.rules import REMASKING, RULES, Knobs, Remasking
from remask.errors import ConfigError
from remask.request.sampling_groups import (
    ANCESTRAL,
    COUNT,
    TEMPERATURE,
    TOKEN,
    UNIFORM_PRESETS,
    BlockParams,
    RemaskingParams,
    RenoisingParams,
    SpeculationParams,
    UniformParams,
)

_MASKED: tuple[ModelKind, ...] = ("masked",)
_ABSORBING: tuple[ModelKind, ...] = ("masked", "block_causal")  # a token that is written stays
_STEPS = Whole(1, 2**30)
AR, DIFFUSION, SPECULATION = MODES = ("ar", "diffusion", "linear_speculation")
_MODE_BY_FIELD = {
    **dict.fromkeys(("block_length", "steps_per_block", "threshold", "remasking"), DIFFUSION),
    "speculation": SPECULATION,
}
"""The mode that a parameter, or a group of them, is for. All others are for every mode."""
PARAMETER = "sampling parameter"  # in errors

_RULES_BY_SETTING = {
    name: tuple(owner.name for owner in REMASKING.values() if name in owner.settings)
    for rule in REMASKING.values()
    for name in rule.settings
}
"""The names of the rules that take a setting, by the setting's name."""
_UNAVAILABLE_TO_EDITS = ("blocks.sub_block_length", "remasking.fallback", "remasking.factor", "remasking.eb_threshold")


class _KnownNames:
    """A declared class that refuses an unknown keyword as `parse` does, before its `__init__` raises `TypeError`."""

    __slots__ = ()

    def __new__(cls, *_args: object, **values: object) -> Self:
        names = declared(cls)
        for name in values:
            if name not in names:
                raise unknown_name_error(cls, PARAMETER, name, names)
        return object.__new__(cls)


@documented
@dataclass(frozen=True, slots=True)
class SamplingParams(_KnownNames):
    """How one request is denoised. `None` leaves a choice to the model family.

    Every value is checked when the parameters are made, so that a bad one fails before anything is computed:
    `ConfigError` names the field, the value and what is allowed.
    """

    max_tokens: int = declare(128, COUNT, "Response positions on the canvas.")
    steps: int | None = optional(
        "masked",
        _STEPS,
        "Denoising steps in total, shared evenly among the blocks; by default one per token.",
        choice="steps",
    )
    steps_per_block: int | None = declare(
        None, _STEPS, "Denoising steps of each block, in place of `steps`.", choice="steps"
    )
    block_length: int | None = declare(
        None,
        COUNT,
        "Positions denoised together, left to right (semi-autoregressive); by default the whole response, the block "
        "that a block-causal model was trained with, 32 positions of a growing canvas, or up to 128 of a uniform "
        "model.",
    )
    mode: str | None = optional(
        "block_causal",
        Choice(MODES),
        "How Nemotron-Labs-Diffusion writes: from left to right, by blocks (the default), or from left to right with "
        "drafts of whole blocks, which gives the tokens of `ar`.",
    )
    threshold: float | None = declare(
        None,
        Real(0, 1),
        "Transfer every noisy position at least this confident, and always the best one.",
        kinds=_ABSORBING,
        choice="rule",
    )
    temperature: float = declare(0.0, TEMPERATURE, "0 is greedy, and so is anything below 1e-5.")
    top_k: int | None = declare(None, COUNT, "Keep the k most probable tokens; null keeps all.")
    top_p: float | None = declare(
        None, Real(0, 1, above=True), "Keep the smallest set of tokens of this total probability; null keeps all."
    )
    min_p: float = declare(
        0.0,
        Real(0, 1),
        "Keep the tokens that have at least this share of the most probable one's probability; 0 keeps all.",
    )
    logit_bias: Mapping[int, float] | None = declare(
        None,
        Biases(1024, 100),
        "What is added to the logits of some tokens, by token id, at every position that is predicted.",
    )
    repetition_penalty: float = declare(
        1.0,
        Real(0.01, 100),
        "Logits of tokens in the prompt and in the response so far are divided by this where they are positive, and "
        "else multiplied; 1 changes nothing.",
        kinds=_ABSORBING,
    )
    frequency_penalty: float = declare(
        0.0,
        Real(-2, 2),
        "What the logit of a token loses for each time that it stands in the response so far.",
        kinds=_ABSORBING,
    )
    presence_penalty: float = declare(
        0.0, Real(-2, 2), "What the logit of a token loses once it stands in the response so far.", kinds=_ABSORBING
    )
    cfg_scale: float = declare(0.0, Real(0, 1000), "Scale of classifier-free guidance; 0 is off.", kinds=_MASKED)
    seed: int | None = declare(
        None, Whole(-LARGEST, LARGEST), "Fixes what the request draws, whatever else is in the batch; null draws one."
    )
    stop: Sequence[str] = declare(
        (), ListOf(Text(256), "such texts", 16, single=True), "Texts that end the response; they are not part of it."
    )
    include_stop_str_in_output: bool = declare(
        False, Flag(), "The stop text that ended the response is the end of its text."
    )
    stop_token_ids: Sequence[int] = declare(
        (), ListOf(TOKEN, "token ids", 4096), "Tokens that end the response and stay part of it."
    )
    ignore_eos: bool = declare(
        False, Flag(), "Treat the model's own end tokens as ordinary ones; `stop_token_ids` still stop."
    )
    min_tokens: int | None = declare(
        None,
        Whole(0, POSITIONS),
        "The first so many tokens of the response are no end tokens: none of the model's own, also with `ignore_eos`, "
        "and, but on uniform models, none of `stop_token_ids`. A default `max_tokens` is as large.",
    )
    remasking: Grouped[RemaskingParams] = grouped(
        RemaskingParams,
        "remasking field",
        "Which noisy positions become final in a step: the name of a rule, or an object of it and its settings.",
        text_field="rule",
    )
    uniform: Grouped[UniformParams] = grouped(
        UniformParams,
        "uniform field",
        "The sampler of uniform models: the name of a preset, or an object of settings.",
        text_field="preset",
    )
    speculation: Grouped[SpeculationParams] = grouped(
        SpeculationParams, "speculation field", "How mode `linear_speculation` drafts."
    )
    renoising: Grouped[RenoisingParams] = grouped(
        RenoisingParams, "renoising field", "How DiffusionGemma denoises a canvas."
    )
    blocks: Grouped[BlockParams] = grouped(BlockParams, "blocks field", "How blocks follow each other, and end.")

    def __post_init__(self) -> None:
        check(self)
        self._expand_preset()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.steps is not None and self.steps_per_block is not None:
            raise ConfigError("steps and steps_per_block say the same thing in two ways; set one of them")
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}, the places of the response; "
                "raise max_tokens, or lower min_tokens"
            )
        self._check_remasking()
        if self.remasking.rule is not None:
            self.check_rule(RULES.get(self.remasking.rule))
        self._check_correction()
        self._check_steps()

    @property
    def greedy(self) -> bool:
        """Whether tokens are taken by argmax."""
        return is_greedy(self.temperature)

    @property
    def uses_threshold(self) -> bool:
        """Whether positions are chosen by a threshold or a factor of the request, not by a schedule."""
        return self.threshold is not None or self.remasking.factor is not None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the prompt or the response has already are made less likely."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    @property
    def knobs(self) -> Knobs:
        """The parameters that remasking rules read."""
        remasking = self.remasking
        return Knobs(self.threshold, remasking.eb_threshold, remasking.min_transfer, remasking.rule_config)

    def _expand_preset(self) -> None:
        """Set the parameters of `uniform.preset`. Raises `ConfigError` if the request gives one another value."""
        preset = self.uniform.preset
        if preset is None:
            return
        value: Any
        for path, value in UNIFORM_PRESETS[preset].items():
            group, _, name = path.rpartition(".")
            if group and self.uniform.sampler in ANCESTRAL:  # these samplers change every position in every step
                continue
            requested = attrgetter(path)(self)
            if requested not in (None, value):
                raise ConfigError(
                    f"preset {preset!r} sets {path}={value}, got {path}={requested}; leave one of them out"
                )
            if group:
                object.__setattr__(self, group, replace(self.uniform, **{name: value}))
            else:
                object.__setattr__(self, name, value)

    def _check_remasking(self) -> None:
        remasking = self.remasking
        if self.threshold is not None and remasking.factor is not None:
            raise ConfigError("threshold and remasking.factor are two rules for the same choice; set one of them")
        if remasking.rule == "confidence_threshold" and self.threshold is None:
            raise ConfigError("remasking 'confidence_threshold' needs threshold, a probability from 0 to 1")
        if (remasking.order is not None) != (remasking.rule == "order"):
            raise ConfigError(
                "remasking.order and remasking.rule='order' go together: one list of canvas positions per block"
            )

    def check_rule(self, rule: Remasking) -> None:
        """Raise `ConfigError` if a parameter is set that has no meaning under `rule`."""
        for name, rule_names in _RULES_BY_SETTING.items():
            value = getattr(self.remasking, name)
            if value is not None and name not in rule.settings:
                raise ConfigError(
                    f"remasking.{name}={value} is for remasking {' and '.join(map(repr, rule_names))}, and this is "
                    f"{rule.name!r}: set both, or neither"
                )
        if not rule.edits:
            return
        for path in _UNAVAILABLE_TO_EDITS:
            value = attrgetter(path)(self)
            if value is not None:
                raise ConfigError(f"remasking {rule.name!r} has no {path}, got {path}={value!r}; leave it out")
        if self.has_penalties:
            raise ConfigError(
                f"remasking {rule.name!r} may replace every token of a block, its own at each position, so what "
                "stands there already cannot be penalized; leave the penalties out, or use another rule"
            )
        if self.blocks.early_stop:
            raise ConfigError(
                f"blocks.early_stop ends a block whose tokens remasking {rule.name!r} may still edit; leave one of "
                "them out"
            )

    def _check_correction(self) -> None:
        for name in ("correction_temperature", "correction_tokens", "correction_patience"):
            value = getattr(self.uniform, name)
            if value is not None and not self.uniform.correction_steps:
                raise ConfigError(
                    f"uniform.{name}={value} is of correction steps, and none are asked for; set correction_steps to 1 "
                    "or more"
                )

    @property
    def uses_steps(self) -> bool:
        """Whether the remasking rule uses the number of steps; see `Remasking.uses_steps`."""
        return self.remasking.rule is None or RULES.get(self.remasking.rule).uses_steps

    def _check_steps(self) -> None:
        if self.uses_steps:
            return
        for name in ("steps", "steps_per_block"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"remasking {self.remasking.rule!r} follows no schedule, so {name}={value} has no part in it; "
                    f"leave {name} out"
                )

    def non_defaults(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults, as JSON-like values."""
        fields = paths(SamplingParams)
        values = by_path(SamplingParams, {name: getattr(self, name) for name in declared(SamplingParams)})
        non_defaults = {path: _to_json(value) for path, value in values.items() if value != fields[path].default}
        return by_group(SamplingParams, non_defaults)

    @classmethod
    def from_mapping(cls, values: object) -> "SamplingParams":
        """Build parameters from JSON-like values. Raises `ConfigError` on unknown names and values of a wrong type."""
        return parse(cls, values, "sampling", PARAMETER)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a model family is decoded by default.

    Attributes:
        remasking: the rule if the request names none. A threshold or factor that this rule does not take selects
            `low_confidence`.
        time_schedule: rules that know Dream's time schedule follow it even if the request sets no `remasking.eps`.
        growing_canvas: whether a response without fixed parts is decoded on a growing canvas.
        schedule: how many positions a step transfers. "even": the masks of a block are shared evenly, the first steps
            taking the remainder (LLaDA); on block-causal models all positions of a block are shared, fixed ones too,
            and at least as many must exceed a threshold (SDAR). "masks": only masks are shared, on block-causal models
            too, and a threshold (met by equal confidences) replaces the schedule (Stable-DiffCoder). "linear": as
            "masks", but a step transfers its share of the remaining masks, rounded (A2D), and the last block may be
            shorter.
        blocks_from_prompt: blocks of a block-causal model are counted from the end of the prompt, so the prompt's first
            one may be short (A2D). Else they are cut at multiples of their length from the start of the canvas.
        whole_blocks: the last block of a block-causal model is filled up with masks behind the response (SDAR).
        opens_blocks: on a block-causal model whose rows predict the next position, the pass that commits the text
            before a block gives the block its first token (Fast-dLLM v2). Otherwise that token is denoised like others.

    Raises `UnknownNameError` when made, if `remasking` is not the name of a rule.
    """

    remasking: str = "low_confidence"
    time_schedule: bool = False
    growing_canvas: bool = False
    schedule: Literal["even", "masks", "linear"] = "even"
    blocks_from_prompt: bool = False
    whole_blocks: bool = True
    opens_blocks: bool = False

    def __post_init__(self) -> None:
        Choice(RULES).check("remasking", self.remasking)


def _to_json(value: Any) -> Any:
    """Return `value` with names of mappings as texts and tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else value


def merge_sampling(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects of sampling parameters. If several have a field, also one of a group, the last value is used.

    None unsets a field or a group. A field of a group may be named by its path: `{"uniform.tokens_per_step": 3}`.
    Raises `ConfigError` on groups that are not allowed.
    """
    merged: dict[str, Any] = {}
    for values in layers:
        null_paths = {name for name, value in values.items() if value is None}
        for group, members in values.items():
            if isinstance(members, Mapping):
                null_paths |= {f"{group}.{name}" for name, value in members.items() if value is None}
        merged = {path: value for path, value in merged.items() if not null_paths & {path, path.partition(".")[0]}}
        merged |= by_path(SamplingParams, values)
    return by_group(SamplingParams, merged)


def fits_mode(path: str, mode: str) -> bool:
    """Whether the parameter at `path` has a meaning in `mode`, on a model that has several modes."""
    return _MODE_BY_FIELD.get(path.partition(".")[0], mode) == mode


def is_greedy(temperature: float) -> bool:
    """Whether `temperature` counts as 0. Below 1e-5, logits divided by it might overflow."""
    return temperature < 1e-5

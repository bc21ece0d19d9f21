"""Sampling parameters: how one request is denoised. Each is declared here, and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from remask.checks.fields import Nested, check, declare, parse
from remask.checks.kinds import ModelKind
from remask.checks.values import (
    LARGEST,
    LIST,
    POSITIONS,
    AnyOf,
    Biases,
    Choice,
    Flag,
    ListOf,
    Real,
    Registered,
    Text,
    Whole,
)
from remask.errors import ConfigError
from remask.remasking.rules import RULES
from remask.remasking.slowfast import PRESETS, SlowFastKnobs
from remask.request.uniform_presets import ANCESTRAL, PRESET_FIELDS
from remask.request.uniform_presets import PRESETS as UNIFORM_PRESETS

_MASKED: tuple[ModelKind, ...] = ("masked",)
_UNIFORM: tuple[ModelKind, ...] = ("uniform",)
_BLOCK_CAUSAL: tuple[ModelKind, ...] = ("block_causal",)
_RULED: tuple[ModelKind, ...] = ("masked", "block_causal")
# What no model and no operator can widen. Tighter limits depend on both, and are checked by the engine.
_COUNT = Whole(1, POSITIONS)
_STEPS = Whole(1, 2**30)
_EDITS = Whole(0, 2**30)
_TOKEN = Whole(0, POSITIONS)
_TEMPERATURE = Real(0, 1000)
_NATS = Real(0, 1e6)
MOST_STATES = 32  # of a block, that one pass computes
AUTO_STATES: Final = "auto"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is denoised. `None` leaves a choice to the model family.

    Every value is checked when the parameters are made, so that a bad one fails before anything is computed:
    `ConfigError` names the field, the value and what is allowed.
    """

    max_tokens: int = declare(128, _COUNT, "Response positions on the canvas.")
    steps: int | None = declare(
        None,
        _STEPS,
        "Denoising steps in total, shared evenly among the blocks; by default one per token.",
        kinds=_MASKED,
        group="steps",
    )
    steps_per_block: int | None = declare(
        None, _STEPS, "Denoising steps of each block, in place of `steps`.", group="steps"
    )
    block_length: int | None = declare(
        None,
        _COUNT,
        "Positions denoised together, left to right (semi-autoregressive); by default the whole response, the block "
        "that a block-causal model was trained with, 32 positions of a growing canvas, or up to 128 of a uniform "
        "model.",
    )
    growing_canvas: bool | None = declare(
        None,
        Flag(),
        "The canvas is the prompt, what is decoded and one block of masks; the next block is appended once this one is "
        "done, up to `max_tokens`. By default so for iLLaDA, and not for all others.",
        kinds=_MASKED,
    )
    remasking: str | None = declare(
        None,
        Registered(RULES),
        "The rule that chooses which noisy positions become final in a step; by default `entropy` for Dream, "
        "`low_confidence` for all others.",
        kinds=_RULED,
        group="rule",
    )
    eps: float | None = declare(
        None,
        Real(0, 1, above=True),
        "End of Dream's time schedule; setting it selects that schedule.",
        kinds=_MASKED,
        group="rule",
    )
    threshold: float | None = declare(
        None,
        Real(0, 1),
        "Transfer every noisy position at least this confident, and always the best one.",
        kinds=_RULED,
        group="rule",
    )
    factor: float | None = declare(
        None, Real(0, 1e6), "Fast-dLLM's factor rule in place of a threshold.", kinds=_MASKED, group="rule"
    )
    temperature: float = declare(0.0, _TEMPERATURE, "0 is greedy, and so is anything below 1e-5.")
    top_k: int | None = declare(None, _COUNT, "Keep the k most probable tokens; null keeps all.")
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
        Real(0, 100, above=True),
        "Logits of tokens in the prompt and in the response so far are divided by this where they are positive, and "
        "else multiplied; 1 changes nothing.",
        kinds=_BLOCK_CAUSAL,
    )
    frequency_penalty: float = declare(
        0.0,
        Real(-2, 2),
        "What the logit of a token loses for each time that it stands in the response so far.",
        kinds=_BLOCK_CAUSAL,
    )
    presence_penalty: float = declare(
        0.0,
        Real(-2, 2),
        "What the logit of a token loses once it stands in the response so far.",
        kinds=_BLOCK_CAUSAL,
    )
    cfg_scale: float = declare(0.0, Real(0, 1000), "Scale of classifier-free guidance; 0 is off.", kinds=_MASKED)
    seed: int | None = declare(
        None, Whole(0, LARGEST), "Makes the request reproducible whatever else is in the batch; null draws one."
    )
    stop: Sequence[str] = declare(
        (),
        ListOf(Text(256), "such texts", 16, single=True),
        "Texts that end the response; they are not part of it.",
    )
    include_stop_str_in_output: bool = declare(
        False, Flag(), "The stop text that ended the response is the end of its text."
    )
    stop_token_ids: Sequence[int] = declare(
        (), ListOf(_TOKEN, "token ids", 4096), "Tokens that end the response and stay part of it."
    )
    ignore_eos: bool = declare(
        False, Flag(), "Treat the model's own end tokens as ordinary ones; `stop_token_ids` still stop."
    )
    order: Sequence[Sequence[int]] | None = declare(
        None,
        ListOf(
            ListOf(Whole(0, POSITIONS), "canvas positions", LIST),
            "lists of canvas positions, one per block",
            LIST,
            together=LIST,
        ),
        "For remasking `order`: per block, its positions on the canvas in decoding order.",
        kinds=_MASKED,
    )
    fallback: str | None = declare(
        None,
        Choice(("confidence", "leftmost")),
        "Which positions are transferred where too few reach the threshold; by default the most confident.",
        kinds=_BLOCK_CAUSAL,
    )
    sub_block_length: int | None = declare(
        None,
        _COUNT,
        "Length of the parts of a block that are completed from left to right (Fast-dLLM v2).",
        kinds=_BLOCK_CAUSAL,
    )
    eb_threshold: float | None = declare(
        None,
        _NATS,
        "For remasking `entropy_bounded`: bound of the summed entropies in nats; by default 0.35.",
        kinds=_BLOCK_CAUSAL,
    )
    edit_threshold: float | None = declare(
        None,
        Real(0, 1),
        "For remasking `joint_threshold`: tokens of the block are replaced by others that are more probable than this; "
        "by default 0.9, and 1 never edits.",
        kinds=_BLOCK_CAUSAL,
        group="rule",
    )
    max_post_steps: int | None = declare(
        None,
        _EDITS,
        "For remasking `joint_threshold`: at most so many steps edit a block that has no masks left; by default 16.",
        kinds=_BLOCK_CAUSAL,
        group="rule",
    )
    min_transfer: int | None = declare(
        None,
        _COUNT,
        "For remasking `joint_threshold`: masks that a step fills at least; by default 1.",
        kinds=_BLOCK_CAUSAL,
        group="rule",
    )
    penalty_lambda: float | None = declare(
        None,
        Real(0, 1e6),
        "For remasking `joint_threshold`: what the token now to the left, within the block, loses on its logit; by "
        "default 0.",
        kinds=_BLOCK_CAUSAL,
        group="rule",
    )
    early_stop: bool = declare(
        False,
        Flag(),
        "After a step that writes an end token, end the response within the block if all before the first one is "
        "final; the tokens stay the same.",
        kinds=_BLOCK_CAUSAL,
    )
    preset: str | None = declare(
        None,
        Choice(tuple(UNIFORM_PRESETS)),
        "Settings of the Uniform-Cache thesis: sets `steps_per_block`, `block_length` and, for the adaptive sampler, "
        "`tokens_per_step`.",
        kinds=_UNIFORM,
    )
    sampler: str | None = declare(
        None,
        Choice(("adaptive", *ANCESTRAL)),
        "`adaptive`, the default, changes the `tokens_per_step` positions that gain most. `ancestral` draws every "
        "position of the block anew, from the posterior with the predicted distribution in the clean token's place "
        "(GIDD's code); `ancestral_marginal` from the posteriors of all clean tokens, weighed by their prediction "
        "(equation 2.4 of the Uniform-Cache thesis).",
        kinds=_UNIFORM,
    )
    tokens_per_step: int | None = declare(
        None, _COUNT, "Positions that a step of the adaptive sampler may change; by default 1.", kinds=_UNIFORM
    )
    schedule: str | None = declare(
        None, Choice(("cosine", "linear")), "How noise falls over a block; by default `cosine`.", kinds=_UNIFORM
    )
    canvas_length: int | None = declare(
        None,
        _COUNT,
        "Positions of the canvas, prompt included; by default the model's. What stands after the response is noise "
        "that is attended to and never changed.",
        kinds=_UNIFORM,
    )
    initial_canvas: Sequence[int] | None = declare(
        None,
        ListOf(_TOKEN, "token ids", LIST),
        "Token ids of the canvas after the prompt; null draws them.",
        kinds=_UNIFORM,
    )
    min_tokens: int | None = declare(
        None, Whole(0, POSITIONS), "The first end token of the response may stand after so many tokens.", kinds=_UNIFORM
    )
    correction_steps: int | None = declare(
        None,
        Whole(0, 2**30),
        "Once the response is complete, at most so many further steps replace tokens that the model judges unlikely "
        "(GIDD's self-correction); by default none.",
        kinds=_UNIFORM,
    )
    correction_temperature: float | None = declare(
        None, _TEMPERATURE, "Temperature of the draw of replacements; by default 0.1, and 0 is greedy.", kinds=_UNIFORM
    )
    correction_tokens: int | None = declare(
        None, _COUNT, "Positions that one correction step may change; by default 1.", kinds=_UNIFORM
    )
    correction_patience: int | None = declare(
        None,
        _EDITS,
        "End the correction once the share of tokens that are the most probable ones has not grown for so many steps; "
        "by default 32, and 0 never.",
        kinds=_UNIFORM,
    )
    revision_tokens: int | None = declare(
        None,
        Whole(0, POSITIONS),
        "Tokens of completed blocks that the first step of each later block may replace; by default 0. Models without "
        "structured attention only.",
        kinds=_UNIFORM,
    )
    speculate: int | str | None = declare(
        None,
        AnyOf((Whole(1, MOST_STATES), Choice((AUTO_STATES,)))),
        "Compute so many states of the block in a pass, the present one and likely later ones, and go on at once where "
        "they come true (FreeDave); `auto` chooses by what passes take. The tokens stay the same.",
        kinds=_MASKED,
    )
    slowfast: SlowFastKnobs | None = declare(
        None, Nested(SlowFastKnobs, "slowfast knob", tuple(PRESETS)), "Knobs of remasking `slowfast`.", kinds=_MASKED
    )

    def __post_init__(self) -> None:
        check(self)
        self._expand_preset()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.steps is not None and self.steps_per_block is not None:
            raise ConfigError("steps and steps_per_block say the same thing in two ways; set one of them")
        self._check_rules()
        self._check_edits()
        self._check_correction()
        self._check_slowfast()

    @property
    def greedy(self) -> bool:
        """Whether tokens are taken by argmax."""
        return is_greedy(self.temperature)

    @property
    def penalizes(self) -> bool:
        """Whether tokens that stand in the response, or in the prompt, are less likely to come again."""
        return bool(self.frequency_penalty or self.presence_penalty) or self.repetition_penalty != 1

    def _expand_preset(self) -> None:
        if self.preset is None:
            return
        for name in PRESET_FIELDS:
            if name == "tokens_per_step" and self.sampler in ANCESTRAL:
                continue
            own, set_by = getattr(self, name), getattr(UNIFORM_PRESETS[self.preset], name)
            if own not in (None, set_by):
                raise ConfigError(
                    f"preset {self.preset!r} sets {name}={set_by}, got {name}={own}; leave one of them out"
                )
            object.__setattr__(self, name, set_by)

    def _check_rules(self) -> None:
        if self.threshold is not None and self.factor is not None:
            raise ConfigError("threshold and factor are two rules for the same choice; set one of them")
        if self.remasking == "confidence_threshold" and self.threshold is None:
            raise ConfigError("remasking 'confidence_threshold' needs threshold, a probability from 0 to 1")
        if (self.order is not None) != (self.remasking == "order"):
            raise ConfigError("order and remasking='order' go together: one list of canvas positions per block")

    def _check_edits(self) -> None:
        if self.remasking == "joint_threshold":
            for name in ("steps", "steps_per_block", "sub_block_length", "fallback", "factor", "eb_threshold"):
                value = getattr(self, name)
                if value is not None:
                    raise ConfigError(f"remasking 'joint_threshold' has no {name}, got {name}={value!r}; leave it out")
            if self.penalizes:
                raise ConfigError(
                    "remasking 'joint_threshold' may replace every token of a block, its own at each position, so what "
                    "stands there already cannot be penalized; leave the penalties out, or use another rule"
                )
            if self.early_stop:
                raise ConfigError(
                    "early_stop ends a block whose tokens remasking 'joint_threshold' may still edit; leave one of "
                    "them out"
                )
            return
        for name in ("edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(f"{name}={value} is for remasking 'joint_threshold': set both, or neither")

    def _check_correction(self) -> None:
        for name in ("correction_temperature", "correction_tokens", "correction_patience"):
            value = getattr(self, name)
            if value is not None and not self.correction_steps:
                raise ConfigError(
                    f"{name}={value} is of correction steps, and none are asked for; set correction_steps to 1 or more"
                )

    def _check_slowfast(self) -> None:
        if self.slowfast is not None and not isinstance(self.slowfast, SlowFastKnobs):
            object.__setattr__(self, "slowfast", SlowFastKnobs.from_mapping(self.slowfast))
        if self.remasking != "slowfast":
            if self.slowfast is not None:
                raise ConfigError("slowfast holds the knobs of remasking='slowfast'; set both, or neither")
            return
        for name in ("steps", "steps_per_block"):
            value = getattr(self, name)
            if value is not None:
                raise ConfigError(
                    f"remasking 'slowfast' follows no schedule, so {name}={value} has no part in it; leave {name} out"
                )
        if self.slowfast is None:
            object.__setattr__(self, "slowfast", SlowFastKnobs())

    @classmethod
    def from_mapping(cls, values: object) -> "SamplingParams":
        """Parameters from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        return parse(cls, values, "sampling", "sampling parameter")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model family's defaults of sampling parameters.

    Attributes:
        remasking: the rule where the request names none. A threshold or factor that this rule does not work with
            selects `low_confidence`.
        time_schedule: rules that know Dream's time schedule follow it also where the request sets no `eps`.
        growing_canvas: whether a response without fixed parts is decoded on a growing canvas.

    Raises `UnknownNameError` when made, where `remasking` is not the name of a rule.
    """

    remasking: str = "low_confidence"
    time_schedule: bool = False
    growing_canvas: bool = False

    def __post_init__(self) -> None:
        Registered(RULES).check("remasking", self.remasking)


def is_greedy(temperature: float) -> bool:
    """Whether `temperature` counts as 0, as those do that float32 cannot divide by."""
    return temperature < 1e-5

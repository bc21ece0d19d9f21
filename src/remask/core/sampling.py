"""Sampling parameters: how one request is denoised, checked as they are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from remask.core.checks import listed, real, whole
from remask.core.slowfast import SlowFastKnobs
from remask.errors import ConfigError, UnknownNameError

REMASKING = (
    "low_confidence",
    "random",
    "entropy",
    "topk_margin",
    "maskgit_plus",
    "origin",
    "order",
    "confidence_threshold",
    "sequential",
    "entropy_bounded",
    "slowfast",
)
SAMPLERS = ("adaptive", "ancestral")
SCHEDULES = ("cosine", "linear")
FALLBACKS = ("confidence", "leftmost")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is denoised. `None` leaves a choice to the model family.

    Every value is checked here, so that a bad one fails before anything is computed.

    Attributes:
        max_tokens: response positions on the canvas.
        steps: denoising steps in total, shared evenly among the blocks; default one per token.
        steps_per_block: denoising steps of each block, in place of `steps`.
        block_length: positions denoised together, left to right (semi-autoregressive); default the whole response, the
            block that a block-causal model was trained with, or up to 128 positions of a uniform model.
        remasking: which candidates stay masked: by `low_confidence` (largest probability first), `random`, `entropy`,
            `topk_margin`, Dream's `maskgit_plus` and `origin`, an explicit `order`, `confidence_threshold`
            (Fast-dLLM's rule for Dream), or `slowfast` (SlowFast sampling); on block-causal models `low_confidence`,
            `sequential` or `entropy_bounded`. Default `entropy` for Dream, `low_confidence` for all others.
        eps: end of Dream's time schedule, in (0, 1); setting it selects that schedule.
        threshold: transfer every candidate at least this confident (and always the best one).
        factor: Fast-dLLM's factor rule in place of a threshold.
        temperature: 0 is greedy, and so is anything below 1e-5.
        top_k: keep the k most probable tokens; None keeps all.
        top_p: keep the smallest set of tokens of this total probability; None keeps all.
        cfg_scale: classifier-free guidance; 0 is off.
        seed: makes the request reproducible whatever else is in the batch; None draws one.
        stop: texts that end the response; they are not part of it.
        stop_token_ids: tokens that end the response; kept in `token_ids`.
        ignore_eos: treat the model's own end tokens as ordinary ones. `stop_token_ids` still stop.
        order: for `remasking="order"`: per block, its positions on the canvas in decoding order.
        fallback: where too few candidates pass the threshold of a block-causal model: the most "confidence"-worthy are
            taken, or the "leftmost" in their place.
        sub_block_length: parts of a block-causal block that are completed from left to right (Fast-dLLM v2).
        eb_threshold: for `remasking="entropy_bounded"`: bound of the summed entropies, in nats.
        sampler: of uniform models: "adaptive" changes the `tokens_per_step` positions that gain most, "ancestral" draws
            every position of the block from the exact posterior.
        tokens_per_step: positions that a step of the adaptive sampler may change.
        schedule: of a uniform model's noise over a block, "cosine" or "linear".
        canvas_length: positions of a uniform model's canvas, prompt included; default the model's. What stands after
            the response is noise that is attended to and never changed.
        initial_canvas: token ids of a uniform model's canvas after the prompt; drawn where it is not given.
        min_tokens: the first end token of a uniform model's response may stand after so many tokens.
        correction_steps: of uniform models: once the response is complete, at most so many further steps replace tokens
            that the model judges unlikely (GIDD's self-correction); None or 0 takes none.
        correction_temperature: of the replacements' draw; default 0.1, 0 is greedy.
        correction_tokens: positions that one correction step may change; default 1.
        slowfast: for `remasking="slowfast"`: its knobs, or an object of them; None takes the defaults.
    """

    max_tokens: int = 128
    steps: int | None = None
    steps_per_block: int | None = None
    block_length: int | None = None
    remasking: str | None = None
    eps: float | None = None
    threshold: float | None = None
    factor: float | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    cfg_scale: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    order: Sequence[Sequence[int]] | None = None
    fallback: str | None = None
    sub_block_length: int | None = None
    eb_threshold: float | None = None
    sampler: str | None = None
    tokens_per_step: int | None = None
    schedule: str | None = None
    canvas_length: int | None = None
    initial_canvas: Sequence[int] | None = None
    min_tokens: int | None = None
    correction_steps: int | None = None
    correction_temperature: float | None = None
    correction_tokens: int | None = None
    slowfast: SlowFastKnobs | None = None

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, low=1)
        for name in (
            "steps",
            "steps_per_block",
            "block_length",
            "top_k",
            "tokens_per_step",
            "canvas_length",
            "sub_block_length",
            "correction_tokens",
        ):
            whole(name, getattr(self, name), low=1, optional=True)
        whole("min_tokens", self.min_tokens, low=0, optional=True)
        whole("correction_steps", self.correction_steps, low=0, optional=True)
        real("correction_temperature", self.correction_temperature, low=0.0, optional=True)
        whole("seed", self.seed, low=0, optional=True)
        real("temperature", self.temperature, low=0.0)
        real("cfg_scale", self.cfg_scale, low=0.0)
        real("threshold", self.threshold, low=0.0, high=1.0, optional=True)
        real("factor", self.factor, low=0.0, optional=True)
        real("top_p", self.top_p, low=0.0, high=1.0, above=True, optional=True)
        real("eps", self.eps, low=0.0, high=1.0, above=True, optional=True)
        real("eb_threshold", self.eb_threshold, low=0.0, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        for name, known in (
            ("remasking", REMASKING),
            ("sampler", SAMPLERS),
            ("schedule", SCHEDULES),
            ("fallback", FALLBACKS),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UnknownNameError(name, str(value), known)
        if self.steps is not None and self.steps_per_block is not None:
            raise ConfigError("steps and steps_per_block say the same thing in two ways; set one of them")
        self._check_tokens()
        self._check_rules()
        self._check_correction()
        self._check_slowfast()

    @property
    def greedy(self) -> bool:
        """Whether tokens are taken by argmax."""
        return is_greedy(self.temperature)

    def _check_tokens(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for text in listed("stop", self.stop, "texts"):
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must hold texts that are not empty, got {text!r}")
        for name in ("stop_token_ids", "initial_canvas"):
            for token in listed(name, getattr(self, name) or (), "token ids"):
                whole(name, token, low=0)

    def _check_rules(self) -> None:
        if self.threshold is not None and self.factor is not None:
            raise ConfigError("threshold and factor are two rules for the same choice; set one of them")
        if self.remasking == "confidence_threshold" and self.threshold is None:
            raise ConfigError("remasking 'confidence_threshold' needs threshold, a probability from 0 to 1")
        if (self.order is not None) != (self.remasking == "order"):
            raise ConfigError("order and remasking='order' go together: one list of canvas positions per block")
        for block in listed("order", self.order or (), "lists, one per block"):
            for position in listed("order", block, "lists of canvas positions"):
                whole("order", position, low=0)

    def _check_correction(self) -> None:
        for name in ("correction_temperature", "correction_tokens"):
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
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"sampling must be an object of sampling parameters, got {type(values).__name__}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError("sampling parameter", str(name), known)
        return cls(**{name: value for name, value in values.items() if value is not None})


def is_greedy(temperature: float) -> bool:
    """Whether `temperature` counts as 0, as those do that float32 cannot divide by."""
    return temperature < 1e-5

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
    "slowfast",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is denoised. `None` leaves a choice to the model family.

    Every value is checked here, so that a bad one fails before anything is computed.

    Attributes:
        max_tokens: response positions on the canvas.
        steps: denoising steps in total, shared evenly among the blocks; default one per token.
        block_length: positions denoised together, left to right (semi-autoregressive); default the whole response.
        remasking: which candidates stay masked: by `low_confidence` (largest probability first), `random`, `entropy`,
            `topk_margin`, Dream's `maskgit_plus` and `origin`, an explicit `order`, `confidence_threshold`
            (Fast-dLLM's rule for Dream), or `slowfast` (SlowFast sampling). Default `low_confidence` for LLaDA,
            `entropy` for Dream.
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
        slowfast: for `remasking="slowfast"`: its knobs, or an object of them; None takes the defaults.
    """

    max_tokens: int = 128
    steps: int | None = None
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
    slowfast: SlowFastKnobs | None = None

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, low=1)
        for name in ("steps", "block_length", "top_k"):
            whole(name, getattr(self, name), low=1, optional=True)
        whole("seed", self.seed, low=0, optional=True)
        real("temperature", self.temperature, low=0.0)
        real("cfg_scale", self.cfg_scale, low=0.0)
        real("threshold", self.threshold, low=0.0, high=1.0, optional=True)
        real("factor", self.factor, low=0.0, optional=True)
        real("top_p", self.top_p, low=0.0, high=1.0, above=True, optional=True)
        real("eps", self.eps, low=0.0, high=1.0, above=True, optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        if self.remasking is not None and self.remasking not in REMASKING:
            raise UnknownNameError("remasking", str(self.remasking), REMASKING)
        self._check_stops()
        self._check_blocks()
        self._check_rules()
        self._check_slowfast()

    @property
    def greedy(self) -> bool:
        """Whether tokens are taken by argmax. Temperatures that float32 cannot divide by count as 0."""
        return self.temperature < 1e-5

    @property
    def block(self) -> int:
        """Positions per block, with the default filled in."""
        return self.block_length or self.max_tokens

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.max_tokens // self.block

    @property
    def steps_per_block(self) -> int:
        """Scheduled steps of each block."""
        return (self.steps or self.max_tokens) // self.blocks

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for text in listed("stop", self.stop, "texts"):
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop must hold texts that are not empty, got {text!r}")
        for token in listed("stop_token_ids", self.stop_token_ids, "token ids"):
            whole("stop_token_ids", token, low=0)

    def _check_blocks(self) -> None:
        if self.max_tokens % self.block:
            raise ConfigError(
                f"max_tokens={self.max_tokens} is not a multiple of block_length={self.block}; "
                f"use max_tokens={-(-self.max_tokens // self.block) * self.block} or another block_length"
            )
        if self.steps is not None and self.steps % self.blocks:
            raise ConfigError(
                f"steps={self.steps} cannot be shared evenly among {self.blocks} blocks "
                f"(max_tokens / block_length); use a multiple of {self.blocks}"
            )

    def _check_rules(self) -> None:
        if self.threshold is not None and self.factor is not None:
            raise ConfigError("threshold and factor are two rules for the same choice; set one of them")
        if self.remasking == "confidence_threshold" and self.threshold is None:
            raise ConfigError("remasking 'confidence_threshold' needs threshold, a probability from 0 to 1")
        if (self.order is not None) != (self.remasking == "order"):
            raise ConfigError("order and remasking='order' go together: one list of canvas positions per block")
        if self.order is None:
            return
        if len(listed("order", self.order, "lists, one per block")) != self.blocks:
            raise ConfigError(f"order must hold one list per block: {self.blocks} blocks, got {len(self.order)} lists")
        for block in self.order:
            for position in listed("order", block, "lists of canvas positions"):
                whole("order", position, low=0)

    def _check_slowfast(self) -> None:
        if self.slowfast is not None and not isinstance(self.slowfast, SlowFastKnobs):
            object.__setattr__(self, "slowfast", SlowFastKnobs.from_mapping(self.slowfast))
        if self.remasking != "slowfast":
            if self.slowfast is not None:
                raise ConfigError("slowfast holds the knobs of remasking='slowfast'; set both, or neither")
            return
        if self.steps is not None:
            raise ConfigError(
                f"remasking 'slowfast' follows no schedule, so steps={self.steps} has no part in it; leave steps out"
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

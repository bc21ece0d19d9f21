"""Decoding of models that write one canvas of uniform diffusion after the other (DiffusionGemma).

A canvas begins as random tokens. Each step draws a token of every position, keeps those whose entropies fit a budget
(EB-Sampler, arXiv 2505.24857), and replaces the others by new random tokens. A canvas is done after its last step, or
once its most probable tokens are stable and their mean entropy is low; it then becomes these tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.errors import ConfigError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import (
    Confidence,
    Decoder,
    Decoding,
    Outcome,
    Positions,
    Predictions,
    StepContext,
    Tokens,
    blocks_of,
)
from remask.sampling.device_reads import DrawnTokens
from remask.sampling.rows import RowGroup, Signal

# The defaults of transformers' implementation.
STEPS = 48
ENTROPY_BOUND = 0.1  # nats
T_MAX, T_MIN = 0.8, 0.4
STABILITY_THRESHOLD = 1  # steps
CONFIDENCE_THRESHOLD = 0.005  # nats
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class CanvasDecoding(Decoding):
    """One request. Canvases follow the prompt; the last one may reach beyond the response.

    Attributes:
        params: its sampling parameters.
        canvas_length: positions of a canvas.
        vocab_size: number of tokens that noise is drawn from.
        has_form: the response has a form, so the most probable tokens of that form are kept, and none are drawn.
    """

    params: SamplingParams
    canvas_length: int
    vocab_size: int
    has_form: bool

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        canvas_length: int,
        vocab_size: int,
        seed: int,
        template: Template | None,
        *,
        has_form: bool,
    ) -> "CanvasDecoding":
        """Return the decoding on a model of `vocab_size` tokens that was trained on canvases of `canvas_length`.

        Raises `ConfigError` on parameters that have no meaning here or contradict each other.
        """
        if template is not None:
            raise ConfigError(
                "canvas: a canvas of this model is denoised as a whole, every token of it; leave fixed parts of the "
                "response out, or use a masked model"
            )
        for name in ("mode", "threshold", "remasking", "blocks", "speculation"):
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise ConfigError(f"{name} is for models that fill masks, and this one has none; leave it out")
        if params.block_length not in (None, canvas_length):
            raise ConfigError(
                f"block_length={params.block_length}: this model writes canvases of {canvas_length}; leave it out"
            )
        decoding = cls(prompt, seed, params, canvas_length, vocab_size, has_form)
        first, last = decoding.temperature(0), decoding.temperature(decoding.steps)
        if first < last:
            raise ConfigError(f"renoising.t_max={first:g} is below t_min={last:g}; temperatures fall over a canvas")
        return decoding

    @property
    def block_length(self) -> int:
        """1: final rows do not depend on later ones, so pages are shared token by token."""
        return 1

    @property
    def length(self) -> int:
        return self.block_ranges[-1].stop

    @property
    def block_ranges(self) -> list[range]:
        return blocks_of(self.canvas_length, len(self.prompt), len(self.prompt) + self.params.max_tokens)

    @property
    def steps(self) -> int:
        """Steps of a canvas, at most."""
        return self.params.steps_per_block or STEPS

    @property
    def total_steps(self) -> int:
        return len(self.block_ranges) * self.steps

    @property
    def scheduled_steps(self) -> None:
        """None: a canvas may be done early."""

    def temperature(self, step: int) -> float:
        """Return the temperature of a step of a canvas, counted from 0: the request's, or one that falls linearly."""
        if not self.params.greedy:
            return self.params.temperature
        renoising = self.params.renoising
        first, last = _value_or(T_MAX, renoising.t_max), _value_or(T_MIN, renoising.t_min)
        return last + (first - last) * ((self.steps - step) / self.steps)

    def noise(self, step: int | None, count: int) -> Tokens:
        """Draw random tokens, int64 [count]: those that a canvas gets after `step`, or (None) begins with."""
        stream = [self.seed, 0] if step is None else [self.seed, 1, step]
        return np.random.default_rng(stream).integers(0, self.vocab_size, count)

    def canvas(self) -> Canvas:
        noise = self.noise(None, self.length - len(self.prompt))
        return Canvas(self.prompt, noise, self.params.max_tokens)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "CanvasDecoder":  # noqa: ARG002
        return CanvasDecoder(self, canvas)


class CanvasDecoder(Decoder):
    """The decoding of one request in progress. The current block is the canvas that is denoised.

    Final rows see themselves and the rows before them; rows of the current canvas also see the whole canvas. The pass
    after a canvas is done computes its rows once more, as final ones.
    """

    _stable_steps: int  # preceding steps with the same most probable tokens as the last one
    _best_tokens: Tokens  # the most probable tokens of the last step
    _next_tokens: Tokens  # the tokens that the last step writes
    _canvas_done: bool
    _sees: Reach

    def __init__(self, decoding: CanvasDecoding, canvas: Canvas) -> None:
        super().__init__(canvas, decoding.seed)
        self._decoding = decoding
        self._blocks = decoding.block_ranges
        self._index = 0
        self._begin_canvas()
        self._prepare_step(0)  # before the first pass only the policy knows how many rows are shared

    @property
    def finished(self) -> bool:
        return self._index == len(self._blocks)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: greedily, as a canvas becomes its most probable tokens in the end."""
        params = self._decoding.params
        signal = Signal(self._decoding.temperature(self.block_step))
        return RowGroup(
            rows, top_k=params.top_k, top_p=params.top_p, seed=self._seed, step=self.step, positions=positions,
            free=True, signal=signal,
        )  # fmt: skip

    def choose(self, predictions: Predictions) -> Positions:
        """Record a step. Returns the positions whose tokens change, or the whole canvas once it is done.

        Updates `_best_tokens`, `_stable_steps`, `_canvas_done` and `_next_tokens`.
        """
        decoding = self._decoding
        renoising = decoding.params.renoising
        assert predictions.numbers is not None
        positions, tokens = predictions.positions, predictions.tokens
        drawn, entropies = predictions.numbers
        self._stable_steps = self._stable_steps + 1 if np.array_equal(self._best_tokens, tokens) else 0
        self._best_tokens = tokens
        min_stable_steps = _value_or(STABILITY_THRESHOLD, renoising.stability_threshold)
        max_entropy = _value_or(CONFIDENCE_THRESHOLD, renoising.confidence_threshold)
        is_stable = self._stable_steps >= min_stable_steps and float(entropies.mean()) < max_entropy
        self._canvas_done = is_stable or self.block_step + 1 >= decoding.steps
        if self._canvas_done:
            self._next_tokens = tokens
            return positions
        is_kept = within_budget(entropies, _value_or(ENTROPY_BOUND, renoising.entropy_bound))
        kept_tokens = tokens if decoding.has_form else drawn.astype(np.int64)
        self._next_tokens = np.where(is_kept, kept_tokens, decoding.noise(self.step, len(positions)))
        changed: Positions = positions[self._next_tokens != self.canvas.tokens[positions]]
        return changed

    def outcome(self, positions: Positions) -> Outcome:
        return Outcome(
            positions if self._canvas_done else positions[:0], tokens=self._next_tokens[positions - self.block.start]
        )

    def advance(self) -> None:
        self.step += 1
        self.block_step += 1
        committed = self.block.start
        if self._canvas_done:
            self._index += 1
            self._begin_canvas()
        self._prepare_step(committed)

    def _begin_canvas(self) -> None:
        """Make the canvas at the current index the block; after the last canvas, an empty block at its end."""
        end = self._blocks[-1].stop
        self.block = range(end, end) if self.finished else self._blocks[self._index]
        self.block_step = 0
        self._stable_steps = -1
        self._canvas_done = False
        self._best_tokens = np.full(len(self.block), -1)
        self._sees = np.arange(1, len(self.canvas) + 1)
        self._sees[self.block.start : self.block.stop] = self.block.stop

    def _prepare_step(self, committed: int) -> None:
        """Set the context of the step. From the second step of a canvas on, rows take in the last predictions."""
        self.context = StepContext(
            sees=self._sees,
            committed=committed,
            conditioned=self.block_step > 0,
            device_read=DrawnTokens(self._decoding.temperature(self.block_step)),
        )


def _value_or(default: float, value: float | None) -> float:
    return default if value is None else value


def within_budget(entropies: Confidence, budget: float) -> NDArray[np.bool_]:
    """Return which positions are kept, bool [n], in the order of their `entropies` [n] (EB-Sampler).

    A position is kept if the entropies of all positions before it sum to at most `budget`, in nats. So the most certain
    position is always kept.
    """
    order = np.argsort(entropies, kind="stable")
    preceding = np.cumsum(entropies[order], dtype=np.float64) - entropies[order]
    is_kept = np.zeros(len(entropies), dtype=np.bool_)
    is_kept[order[preceding <= budget]] = True
    return is_kept

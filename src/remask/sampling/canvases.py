"""Decoding of models that write one canvas of uniform diffusion after the other (DiffusionGemma).

A canvas begins as random tokens. Each step draws a token of every position, keeps those whose entropies fit a budget
(EB-Sampler, arXiv 2505.24857), and puts new random tokens in the others' places. A canvas is done after its last step,
or once its most probable tokens stand still and are sure; it then becomes these tokens.
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
    Predicted,
    StepContext,
    Tokens,
    blocks_of,
)
from remask.sampling.device_reads import Drawn
from remask.sampling.rows import RowGroup, Signal

# The defaults of transformers' implementation.
STEPS, BUDGET, FIRST, LAST, STILL, SURE = 48, 0.1, 0.8, 0.4, 1, 0.005
_USUAL = SamplingParams()


@dataclass(frozen=True, slots=True)
class CanvasDecoding(Decoding):
    """One request. Canvases follow the prompt; the last one may reach beyond the response.

    Attributes:
        params: its sampling parameters.
        canvas_length: positions of a canvas.
        vocab: tokens that noise is drawn from.
        formed: the response has a form, so tokens are not drawn: the most probable ones that have it are kept.
    """

    params: SamplingParams
    canvas_length: int
    vocab: int
    formed: bool

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        params: SamplingParams,
        canvas_length: int,
        vocab: int,
        seed: int,
        template: Template | None,
        *,
        formed: bool,
    ) -> "CanvasDecoding":
        """Return the decoding on a model of `vocab` tokens that was trained on canvases of `canvas_length`.

        Raises `ConfigError` on parameters that have no meaning here or contradict each other.
        """
        if template is not None:
            raise ConfigError(
                "canvas: a canvas of this model is denoised as a whole, every token of it; leave fixed parts of the "
                "response out, or use a masked model"
            )
        for name in ("mode", "threshold", "remasking", "blocks", "speculation"):
            if getattr(params, name) != getattr(_USUAL, name):
                raise ConfigError(f"{name} is for models that fill masks, and this one has none; leave it out")
        if params.block_length not in (None, canvas_length):
            raise ConfigError(
                f"block_length={params.block_length}: this model writes canvases of {canvas_length}; leave it out"
            )
        decoding = cls(prompt, seed, params, canvas_length, vocab, formed)
        first, last = decoding.temperature(0), decoding.temperature(decoding.steps)
        if first < last:
            raise ConfigError(f"renoising.t_max={first:g} is below t_min={last:g}; temperatures fall over a canvas")
        return decoding

    @property
    def block(self) -> int:
        """1: what is final depends on nothing behind it, so pages are shared token by token."""
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
        """Return the temperature of a step of a canvas, counted from 0: that of the request, or along a line."""
        given = self.params.renoising
        if not self.params.greedy:
            return self.params.temperature
        first, last = (FIRST if given.t_max is None else given.t_max), (LAST if given.t_min is None else given.t_min)
        return last + (first - last) * ((self.steps - step) / self.steps)

    def noise(self, step: int | None, count: int) -> Tokens:
        """Return the random tokens of `count` positions after `step`; None: those that the canvases begin with."""
        stream = [self.seed, 0] if step is None else [self.seed, 1, step]
        return np.random.default_rng(stream).integers(0, self.vocab, count)

    def canvas(self) -> Canvas:
        noise = self.noise(None, self.length - len(self.prompt))
        return Canvas(self.prompt, noise, self.params.max_tokens)

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "CanvasDecoder":  # noqa: ARG002
        return CanvasDecoder(self, canvas)


class CanvasDecoder(Decoder):
    """The decoding of one request in progress. The current block is the canvas that is denoised.

    Final rows see themselves and what is before them, and rows of the canvas also all of it. The pass after a canvas is
    done computes its rows once more, as final ones.
    """

    _same: int  # steps before whose most probable tokens were those of the last one
    _best: Tokens
    _next: Tokens
    _over: bool  # the canvas is done
    _sees: Reach

    def __init__(self, decoding: CanvasDecoding, canvas: Canvas) -> None:
        super().__init__(canvas, decoding.seed)
        self._decoding, self._blocks, self._index = decoding, decoding.block_ranges, 0
        self._begin()
        self._prepare_step(0)  # before the first pass the policy knows what is shared

    @property
    def finished(self) -> bool:
        return self._index == len(self._blocks)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: by their most probable tokens, which a canvas becomes in the end."""
        params = self._decoding.params
        signal = Signal(self._decoding.temperature(self.block_step))
        return RowGroup(
            rows, None, "logits", 0.0, params.top_k, params.top_p, self._seed, self.step, positions,
            free=True, signal=signal,
        )  # fmt: skip

    def choose(self, predictions: Predicted) -> Positions:
        """Return the positions whose tokens change: all that do, or the whole canvas once it is done."""
        decoding, given = self._decoding, self._decoding.params.renoising
        assert predictions.numbers is not None
        positions, tokens, entropies = predictions.positions, predictions.tokens, predictions.numbers[1]
        self._same = self._same + 1 if np.array_equal(self._best, tokens) else 0
        self._best = tokens
        still = self._same >= (STILL if given.stability_threshold is None else given.stability_threshold)
        sure = SURE if given.confidence_threshold is None else given.confidence_threshold
        self._over = self.block_step + 1 >= decoding.steps or (still and float(entropies.mean()) < sure)
        if self._over:
            self._next = tokens
            return positions
        budget = BUDGET if given.entropy_bound is None else given.entropy_bound
        kept = within_budget(entropies, budget)
        drawn = tokens if decoding.formed else predictions.numbers[0].astype(np.int64)
        self._next = np.where(kept, drawn, decoding.noise(self.step, len(positions)))
        changed: Positions = positions[self._next != self.canvas.tokens[positions]]
        return changed

    def outcome(self, written: Positions) -> Outcome:
        return Outcome(written if self._over else written[:0], tokens=self._next[written - self.block.start])

    def advance(self) -> None:
        self.step += 1
        self.block_step += 1
        committed = self.block.start
        if self._over:
            self._index += 1
            self._begin()
        self._prepare_step(committed)

    def _begin(self) -> None:
        stop = self._blocks[-1].stop
        self.block = range(stop, stop) if self.finished else self._blocks[self._index]
        self.block_step, self._same, self._over = 0, -1, False
        self._best = np.full(len(self.block), -1)
        self._sees = np.arange(1, len(self.canvas) + 1)
        self._sees[self.block.start : self.block.stop] = self.block.stop

    def _prepare_step(self, committed: int) -> None:
        """Say what the passes of the step need. From its second step on a canvas knows what the last pass predicted."""
        self.context = StepContext(
            sees=self._sees,
            committed=committed,
            conditioned=self.block_step > 0,
            numbers=Drawn(self._decoding.temperature(self.block_step)),
        )


def within_budget(entropies: Confidence, budget: float) -> NDArray[np.bool_]:
    """Return which positions are kept, [n]: the most certain ones, while the entropies of all before sum to `budget`.

    `entropies` [n] in nats. The most certain position is always kept.
    """
    order = np.argsort(entropies, kind="stable")
    before = np.cumsum(entropies[order], dtype=np.float64) - entropies[order]
    kept = np.zeros(len(entropies), dtype=np.bool_)
    kept[order[before <= budget]] = True
    return kept

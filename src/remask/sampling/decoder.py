"""How a request is denoised: the interface between the engine and the decoding of every kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.denoising.rules import Choose, Remasking, Step, check_progress
from remask.denoising.select import Chosen, RankRule
from remask.errors import IntegrityError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach, StepFacts
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingParams
from remask.sampling.rows import Basis, DeviceRead, RowGroup

Positions = NDArray[np.int64]
Tokens = NDArray[np.int64]
Confidence = NDArray[np.float32]

Transfers: TypeAlias = RankRule | Positions
"""The positions that a step transfers, as known before its pass: a rule that ranks them, or the positions."""


def blocks_of(length: int, start: int, stop: int) -> list[range]:
    """Return the blocks of `length` positions that cover `start` to `stop`; the last may reach beyond `stop`."""
    return [range(first, first + length) for first in range(start, stop, length)]


def shift_range(positions: range, offset: int) -> range:
    """Return `positions` moved by `offset`."""
    return range(positions.start + offset, positions.stop + offset)


@dataclass(frozen=True, slots=True)
class StepContext(StepFacts):
    """The facts about one step on which its passes depend, beyond its block. Special samplers set them.

    Attributes:
        sees: how many leading positions each row attends to, int64 [T]; None: all of them.
        opens: the step writes only the block's first token, which the last row before the block predicts.
        cut: the number of positions before the tail, int64 [T], the same for each row; None: there is no tail. The tail
            of the canvas is neither computed nor attended to, whatever the cache policy plans.
        shift: row p - shift predicts position p; None: the model family's shift.
        committed: how many leading rows have final K/V; None: as many as are in completed blocks.
        adapter: the adapter that rows are computed with, if `shift` is set; None: the request's own, if any.
        drafts: the next pass that predicts is a draft: it transfers nothing, and its tokens are put on the canvas.
        conditioned: noisy rows take in the last pass' predictions for them (`Signal`).
        device_read: reads the numbers that `choose` needs beside tokens and confidences; None: `choose` needs none.
        corrections: correction steps so far; None if the request has none.
    """

    sees: Reach | None = None
    opens: bool = False
    cut: Reach | None = None
    shift: int | None = None
    committed: int | None = None
    adapter: str | None = None
    drafts: bool = False
    conditioned: bool = False
    device_read: DeviceRead | None = None
    corrections: int | None = None


PLAIN = StepContext()
"""The context of decoders without special needs."""


@dataclass(slots=True)
class Predictions:
    """The predictions of a pass, before any is transferred.

    Attributes:
        positions: ascending, int64 [predicted].
        tokens: int64 [predicted].
        confidence: float32 [predicted].
        logprobs: log-probabilities of tokens that a reader has chosen, float32 [predicted], NaN for other positions.
            None if no reader has chosen any.
        measured: the cache policy's measure of each row (`Traits.measure`), float32 [predicted]; None without one.
        numbers: those of the decoder's `StepContext.device_read`, float32 [width, predicted]; None without one.
    """

    positions: Positions
    tokens: Tokens
    confidence: Confidence
    logprobs: Confidence | None = None
    measured: Confidence | None = None
    numbers: Confidence | None = None

    def select(self, mask: Mask) -> "Predictions":
        """Return the predictions of the positions in `mask`, bool [predicted], without `logprobs` and `measured`."""
        numbers = None if self.numbers is None else self.numbers[:, mask]
        return Predictions(self.positions[mask], self.tokens[mask], self.confidence[mask], numbers=numbers)


@dataclass(slots=True)  # not frozen, as one is made in each step of each request
class Outcome:
    """What a step writes, and what of it is final.

    Attributes:
        final: the positions that are final at the end of the step, int64.
        edits: the written positions whose token replaces one of an earlier step, int64; None: there are none.
        tokens: the tokens that are written, int64; None: the predictions of this pass.
        writes: positions and tokens as the model wrote them, before DELETE and INSERT were applied.
        resets: positions of rejected draft tokens, and the masks that replace them.
    """

    final: Positions
    edits: Positions | None = None
    tokens: Tokens | None = None
    writes: tuple[tuple[int, int], ...] = ()
    resets: tuple[Positions, Tokens] | None = None


class Decoder(ABC):
    """The decoding of one request in progress. It reads the canvas and never writes to it.

    Attributes:
        canvas: the canvas of the request.
        step: denoising steps so far.
        block_step: denoising steps of the current block so far.
        block: canvas positions of the current block.
        context: further facts on which the passes of this step depend.
    """

    block: range
    context: StepContext = PLAIN

    def __init__(self, canvas: Canvas, seed: int, step: int = 0) -> None:
        self.canvas = canvas
        self._seed = seed
        self.step = step
        self.block_step = 0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether every block is done."""

    @property
    def transfers(self) -> Transfers | None:
        """The result of `choose` for all noisy positions of the block, if it is known before the pass; else None.

        If it is known, transfers are final at once, and the next step depends only on their number.
        """
        return None

    @abstractmethod
    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how the logits in `rows`, which predict `positions`, are turned into tokens and confidences."""

    @abstractmethod
    def choose(self, predictions: Predictions) -> Positions:
        """Return the positions of the block that are written now, int64, ascending.

        All of `predictions` are positions of the block. The engine calls `outcome` next, and then `advance`.
        """

    def outcome(self, positions: Positions) -> Outcome:
        """Record the step, and return what it writes at `positions`, chosen by `choose`, the cache policy or a reader.

        If `transfers` is a rule with `changes`, it may be called before the pass too, and must record nothing.
        """
        return Outcome(positions)

    @abstractmethod
    def advance(self) -> None:
        """Go to the next step, or from a draft to the pass that verifies it; the canvas has the last pass' tokens."""


class RuleDecoder(Decoder):
    """A decoder that fills the masks of one block after the other by a remasking rule."""

    _choose: Choose  # in the steps of the current block
    _steps: int  # scheduled for the current block

    def __init__(
        self, params: SamplingParams, rule: Remasking, basis: Basis, canvas: Canvas, seed: int, step: int = 0
    ) -> None:
        super().__init__(canvas, seed, step)
        self.params = params
        self._rule = rule
        self._row_settings: dict[str, Any] = {
            "row_measure": rule.measure,
            "basis": basis,
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: by the rule's measure."""
        return RowGroup(rows, **self._row_settings, seed=self._seed, step=self.step, positions=positions)

    def _count_masks(self) -> int:
        """Return the number of noisy positions of the block."""
        # Counting bytes takes half the time of NumPy for so few flags.
        return self.canvas.noisy[self.block.start : self.block.stop].tobytes().count(1)

    def _blind_choice(self) -> Positions | None:
        """Return the choice of a rule that needs no confidences. Returns None under any other rule."""
        if not self._rule.blind:
            return None
        candidates = self.block.start + self.canvas.noisy[self.block.start : self.block.stop].nonzero()[0]
        return self.choose(Predictions(candidates, candidates, np.zeros(len(candidates), dtype=np.float32)))

    def _apply_rule(
        self, positions: Positions, confidence: Confidence, count: int, share: np.float32 | None = None
    ) -> Chosen:
        """Return the indices of the noisy `positions` that the rule transfers. The schedule transfers `count`."""
        step = Step(positions, confidence, self.block_step, count, share, self.context.order, draw=self._draw)
        return check_progress(self._rule, self._choose(step), step, self._steps)

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Draw `count` uniform numbers that depend on the request's seed and step alone, float32 [count]."""
        return np.random.default_rng([self._seed, self.step]).random(count, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Decoding(ABC):
    """How one request is denoised, checked before it begins. All canvases made by it are equal.

    The defaults suit a canvas that has its whole length from the start, all of whose steps run, whose positions are
    chosen after a pass, and which ends with a block.

    Attributes:
        prompt: token ids.
        seed: the seed of all draws.
    """

    prompt: Sequence[int]
    seed: int

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of the canvas."""

    @property
    def max_length(self) -> int:
        """Positions of the canvas at its largest."""
        return self.length

    @property
    def first_step(self) -> int:
        """The step at which the canvas got its current length. A cache policy counts from there."""
        return 0

    @property
    def can_grow(self) -> bool:
        """Whether the canvas gets another block once its decoder has finished."""
        return False

    def grow(self, canvases: Sequence[Canvas], step: int) -> "Decoding":  # noqa: ARG002
        """Append the next block to `canvases`, in place, and return their decoding from `step` on.

        Caches begin anew, as for a request whose fixed tokens are those decoded so far. Raises `IntegrityError` unless
        the decoding `can_grow`.
        """
        raise IntegrityError("a canvas was to grow that has its whole length")

    @property
    @abstractmethod
    def block_length(self) -> int:
        """Positions per block."""

    @property
    def from_prompt(self) -> bool:
        """Whether blocks are counted from the end of the prompt, and not from the start of the canvas."""
        return False

    @property
    def block_offset(self) -> int:
        """Start of the first whole block: the prompt's length modulo `block_length` if `from_prompt`, else 0."""
        return len(self.prompt) % self.block_length if self.from_prompt else 0

    @property
    @abstractmethod
    def block_ranges(self) -> list[range]:
        """Canvas positions of each block that holds positions to be denoised, in the order of denoising."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Denoising steps by the parameters, correction steps included."""

    @property
    def scheduled_steps(self) -> int | None:
        """Denoising steps of the canvas at its current length; None without a schedule that fixes them."""
        return self.total_steps

    def max_passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return an upper bound of the passes. `skips`: steps that are known to transfer nothing run no pass."""
        return self.total_steps

    @property
    def ordered(self) -> bool:
        """Whether the positions of a step are known before its pass."""
        return False

    def may_stop_within_block(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """Return whether a stop token may end the response within a block.

        `stop_written`: the last step wrote a stop token.
        """
        return False

    def response_template(self, template: Template) -> Template:
        """Return the template of the response on the canvas, for the `template` of the request."""
        return template

    @abstractmethod
    def canvas(self) -> Canvas:
        """Return a new canvas."""

    @abstractmethod
    def decoder(self, canvas: Canvas, idle: IdlePasses) -> Decoder:
        """Return a decoder at the first step. `idle` says which steps run even if they transfer nothing."""

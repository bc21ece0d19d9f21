"""How a request is denoised: the interface between the engine and the decoding of every kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
"""The positions that a step transfers, as far as known before its pass: how they are ranked, or which they are."""


def blocks_of(length: int, start: int, stop: int) -> list[range]:
    """Return blocks of `length` positions that cover `start` to `stop`; the last one may reach beyond `stop`."""
    return [range(first, first + length) for first in range(start, stop, length)]


def moved(places: range, by: int) -> range:
    """Return `places` that many positions further on."""
    return range(places.start + by, places.stop + by)


@dataclass(frozen=True, slots=True)
class StepContext(StepFacts):
    """What the passes of one step need to know beyond its block. A sampler with needs of its own says them here.

    Attributes:
        sees: how many leading positions each row attends to, int64 [T]; None where that is all of them.
        opens: the step gives the block its first token, which the last row before it predicts, and no other.
        cut: where the tail of the canvas is left out: how many positions are left, int64 [T], T times; else None. Later
            positions are neither computed nor attended to, whatever the cache policy plans.
        shift: row p - shift predicts position p; None: as the model family says.
        committed: how many leading rows have K/V that are final, where the decoder says which; None: whole blocks.
        adapter: that rows are computed with, where `shift` has a value; None: the request's own, if any.
        drafts: the next pass that predicts drafts: it transfers nothing, and its tokens stand on the canvas after it.
        conditioned: noisy rows take in what the last pass predicted of them (`Signal`).
        numbers: what `choose` needs to know of each predicted row beside its token and confidence; None: nothing.
        corrections: correction steps so far; None where the request names no correction.
    """

    sees: Reach | None = None
    opens: bool = False
    cut: Reach | None = None
    shift: int | None = None
    committed: int | None = None
    adapter: str | None = None
    drafts: bool = False
    conditioned: bool = False
    numbers: DeviceRead | None = None
    corrections: int | None = None


PLAIN = StepContext()
"""That of decoders which need nothing special."""


@dataclass(slots=True)
class Predicted:
    """The predictions of a pass, before any is transferred.

    Attributes:
        positions: ascending, int64 [predicted].
        tokens: int64 [predicted].
        confidence: float32 [predicted].
        logprobs: log-probabilities of tokens that a reader has chosen, float32 [predicted], NaN where it chose none.
            None where no reader has chosen any.
        measured: the cache policy's measure of each row (`Traits.measure`), float32 [predicted]; None without one.
        numbers: what the decoder wants to know beside these (`StepContext.numbers`), float32 [width, predicted].
    """

    positions: Positions
    tokens: Tokens
    confidence: Confidence
    logprobs: Confidence | None = None
    measured: Confidence | None = None
    numbers: Confidence | None = None

    def of(self, some: Mask) -> "Predicted":
        """What a decoder reads of `some` of the positions, bool [predicted]."""
        numbers = None if self.numbers is None else self.numbers[:, some]
        return Predicted(self.positions[some], self.tokens[some], self.confidence[some], numbers=numbers)


@dataclass(slots=True)  # not frozen, as one is made in each step of each request
class Outcome:
    """What becomes of the positions that a step writes.

    Attributes:
        final: the positions that are final at its end, int64.
        edits: those written that replace a token which an earlier step chose, int64; None: none.
        tokens: the tokens that are written, int64; None: those that this pass predicted there.
        writes: positions and tokens that the model wrote before DELETE and INSERT were carried out, where places move.
        resets: positions of a draft that did not come true, and the masks that stand there again.
    """

    final: Positions
    edits: Positions | None = None
    tokens: Tokens | None = None
    writes: tuple[tuple[int, int], ...] = ()
    resets: tuple[Positions, Tokens] | None = None


class Decoder(ABC):
    """The decoding of one request in progress. It reads the canvas and never writes to it.

    Attributes:
        canvas: that of the request.
        step: denoising steps so far.
        block_step: the same within the current block.
        block: canvas positions of the current block.
        context: what else the passes of this step depend on.
    """

    block: range
    context: StepContext = PLAIN

    def __init__(self, canvas: Canvas, seed: int, step: int = 0) -> None:
        self.canvas, self._seed = canvas, seed
        self.step, self.block_step = step, 0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether every block is done."""

    @property
    def transfers(self) -> Transfers | None:
        """The result of `choose` in this step, for all noisy positions of the block; None: only `choose` knows it.

        If it is known, transfers are final at once, and the next step depends only on their number.
        """
        return None

    @abstractmethod
    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how the logits in `rows`, which predict `positions`, are turned into tokens and confidences."""

    @abstractmethod
    def choose(self, predictions: Predicted) -> Positions:
        """Return the positions of the block that are written now, int64, ascending.

        All of `predictions` are positions of the block. The engine calls `outcome` next, and then `advance`.
        """

    def outcome(self, written: Positions) -> Outcome:
        """Return what becomes of the positions `written`, which `choose`, the cache policy or a reader has chosen."""
        return Outcome(written)

    @abstractmethod
    def advance(self) -> None:
        """Go to the next step, or from a draft to the pass over it. The tokens of the last one are on the canvas."""


class RuleDecoder(Decoder):
    """A decoder that fills the masks of one block after the other by a remasking rule."""

    _choose: Choose  # in the steps of the current block
    _steps: int  # scheduled for the current block

    def __init__(
        self, params: SamplingParams, rule: Remasking, basis: Basis, canvas: Canvas, seed: int, step: int = 0
    ) -> None:
        super().__init__(canvas, seed, step)
        self.params, self._rule = params, rule
        temperature = 0.0 if params.greedy else params.temperature
        self._reading = (rule.measure, basis, temperature, params.top_k, params.top_p)

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how rows are read: by the rule's measure."""
        return RowGroup(rows, *self._reading, self._seed, self.step, positions)

    def _masks(self) -> int:
        """Noisy positions of the block."""
        # Of so few flags bytes are counted in half the time that NumPy takes.
        return self.canvas.noisy[self.block.start : self.block.stop].tobytes().count(1)

    def _blindly(self) -> Positions | None:
        """What a rule chooses that needs no confidences; None under any other."""
        if not self._rule.blind:
            return None
        candidates = self.block.start + self.canvas.noisy[self.block.start : self.block.stop].nonzero()[0]
        return self.choose(Predicted(candidates, candidates, np.zeros(len(candidates), dtype=np.float32)))

    def _by_rule(
        self, positions: Positions, confidence: Confidence, count: int, share: np.float32 | None = None
    ) -> Chosen:
        """Which of the noisy `positions` the rule transfers now, if the schedule transfers `count` of them."""
        step = Step(positions, confidence, self.block_step, count, share, self.context.order, self._draw)
        return check_progress(self._rule, self._choose(step), step, self._steps)

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Draw `count` uniform numbers that depend on the request's seed and step alone."""
        return np.random.default_rng([self._seed, self.step]).random(count, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Decoding(ABC):
    """How one request is denoised, checked before it begins. Two canvases made by it are equal.

    What has an answer here has that of decodings whose canvas has its whole length from the start, which run all
    steps, choose once a pass has run, and end with a block.

    Attributes:
        prompt: token ids.
        seed: what all draws depend on.
    """

    prompt: Sequence[int]
    seed: int

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of the canvas."""

    @property
    def longest(self) -> int:
        """Positions of the canvas once it has grown as far as it may."""
        return self.length

    @property
    def first_step(self) -> int:
        """The step at which the canvas got its present length. A cache policy counts from there."""
        return 0

    @property
    def grows(self) -> bool:
        """Whether a decoder that has finished leaves a canvas which gets another block."""
        return False

    def grown(self, canvases: Sequence[Canvas], step: int) -> "Decoding":  # noqa: ARG002
        """Append the next block to `canvases`, and return how they are denoised from `step` on. Only where it `grows`.

        A cache begins anew there, as it would for a request whose canvas has what is decoded as fixed tokens.
        """
        raise IntegrityError("a canvas was to grow that has its whole length")

    @property
    @abstractmethod
    def block(self) -> int:
        """Positions per block."""

    @property
    def from_prompt(self) -> bool:
        """Whether blocks are counted from the end of the prompt, and not from the start of the canvas."""
        return False

    @property
    def ahead(self) -> int:
        """Where the first whole block begins: the prompt's length modulo `block` where it is counted `from_prompt`."""
        return len(self.prompt) % self.block if self.from_prompt else 0

    @property
    @abstractmethod
    def block_ranges(self) -> list[range]:
        """Canvas positions of each block that holds positions to be denoised, in the order of denoising."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Denoising steps in total that the parameters name, those of a correction included."""

    @property
    def scheduled_steps(self) -> int | None:
        """Denoising steps of the canvas as it is; None where no schedule says how many there are."""
        return self.total_steps

    def passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """Return how many of the steps run a pass, at most.

        `skips`: steps that are known to transfer nothing run no pass.
        """
        return self.total_steps

    @property
    def ordered(self) -> bool:
        """Whether the positions of a step are known before its pass."""
        return False

    def ends_within(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """Return whether a stop token may end the response within a block, after a step that wrote one or did not."""
        return False

    def response_of(self, asked: Template) -> Template:
        """Return the response on the canvas, of a request that asked for `asked`."""
        return asked

    @abstractmethod
    def canvas(self) -> Canvas:
        """Return a new canvas."""

    @abstractmethod
    def decoder(self, canvas: Canvas, idle: IdlePasses) -> Decoder:
        """Return a decoder at the first step. `idle` says which steps are run although they transfer nothing."""

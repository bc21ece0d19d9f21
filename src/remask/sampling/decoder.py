"""How a request is denoised: the interface between the engine and the decoding of every kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.errors import IntegrityError
from remask.plan.canvas import Canvas, Template
from remask.plan.plan import Reach
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.request.sampling_params import SamplingParams
from remask.sampling.indel import Candidates
from remask.sampling.rows import Basis, RowGroup
from remask.sampling.rules import Choose, Remasking, Step, check_progress
from remask.sampling.select import Chosen, Ranked

Positions = NDArray[np.int64]
Tokens = NDArray[np.int64]
Confidence = NDArray[np.float32]

Transfers: TypeAlias = Ranked | Positions
"""The positions that a step transfers, as far as known before its pass: how they are ranked, or which they are."""


def blocks_of(length: int, start: int, stop: int) -> list[range]:
    """Return blocks of `length` positions that cover `start` to `stop`; the last one may reach beyond `stop`."""
    return [range(first, first + length) for first in range(start, stop, length)]


def moved(places: range, by: int) -> range:
    """Return `places` that many positions further on."""
    return range(places.start + by, places.stop + by)


class Decoder(ABC):
    """The decoding of one request in progress. It reads the canvas and never writes to it.

    What has an answer here has that of decoders which replace no token, leave out no tail, correct nothing, and
    choose once the pass has run.

    Attributes:
        step: denoising steps so far.
        block_step: the same within the current block.
        block: canvas positions of the current block.
        first_step: the step at which the canvas got its present length.
        writes_once: what a step writes is final, and replaces no token: `edited` and `final` need not be asked.
        cut: in a step that leaves out the tail of the canvas: how many positions are left, int64 [T], T times; else
            None. Later positions are neither computed nor attended to, whatever the cache policy plans.
        shift: in this step row p - shift predicts position p; None: as the model family says.
        committed: how many leading rows have K/V that are final, where the decoder says which; None: whole blocks.
        drafts: the next pass drafts, and transfers nothing: its tokens stand on the canvas in the pass after it.
        mask_id: the mask token, of a decoder that drafts.
        adapter: that its rows are computed with; None: the request's own, if any.
        redraws: the temperature at which this step needs a drawn token of every row and its entropy (`redrawn`), and
            says itself which tokens it writes (`tokens_at`); None: it needs none.
        writes: positions and tokens that the step wrote before DELETE and INSERT were carried out, of a decoder whose
            places move; else empty. Known once `choose` has been asked.
    """

    writes_once = False
    block: range
    cut: Reach | None = None
    shift: int | None = None
    committed: int | None = None
    drafts: bool = False
    mask_id: int
    adapter: str | None = None
    redraws: float | None = None
    writes: tuple[tuple[int, int], ...] = ()

    def __init__(self, canvas: Canvas, seed: int, step: int = 0) -> None:
        self.canvas, self.seed = canvas, seed
        self.step = self.first_step = step
        self.block_step = 0

    @property
    def canvas_step(self) -> int:
        """Denoising steps since the canvas got its present length: what a cache policy counts in."""
        return self.step - self.first_step

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether every block is done."""

    @property
    def order(self) -> Positions | None:
        """The positions that this step transfers, in order, int64, where they are known before the pass; else None."""
        return None

    @property
    def transfers(self) -> Transfers | None:
        """The result of `choose` in this step, for all noisy positions of the block; None: only `choose` knows it.

        If it is known, transfers are final at once, and the next step depends only on their number.
        """
        return None

    @property
    def sees(self) -> Reach | None:
        """How many leading positions each row attends to in this step, int64 [T]; None where that is all of them."""
        return None

    @property
    def touched(self) -> Mask | None:
        """The blocks that the last step of a correction changed, bool [T]; None where there was no such step."""
        return None

    @property
    def fresh(self) -> range | None:
        """The block that begins, in a step that may revise completed blocks as well; None elsewhere."""
        return None

    @property
    def opens(self) -> bool:
        """Whether this step gives the block its first token, which the last row before it predicts, and no other."""
        return False

    @property
    def corrections(self) -> int | None:
        """Correction steps so far; None where the request names no correction."""
        return None

    def redrawn(self, drawn: Tokens, entropies: Confidence) -> None:  # noqa: B027 - most take none
        """Take drawn tokens and entropies of all predicted positions, [n] each. Called before `choose`."""

    def tokens_at(self, written: Positions) -> Tokens | None:  # noqa: ARG002
        """Return the tokens that `written` get, which `choose` has returned; None: those that were predicted."""
        return None

    @property
    def candidates(self) -> int | None:
        """How many of the most probable tokens of every row this step needs (`offered`); None: it needs none."""
        return None

    def offered(self, found: Candidates) -> None:  # noqa: B027 - most take none
        """Take the most probable tokens of all predicted positions. Called before `choose`."""

    @property
    def reads_best(self) -> bool:
        """Whether this step needs the most probable token of every row."""
        return False

    def note(self, positions: Positions, best: Tokens) -> None:  # noqa: B027 - most take none
        """Note the most probable token of each predicted position, `positions` [n]. Called just before `choose`."""

    @abstractmethod
    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how the logits in `rows`, which predict `positions`, are turned into tokens and confidences."""

    @abstractmethod
    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:
        """Return the positions of the block that are written now, int64, ascending.

        `positions` [n] are those that this pass predicted, with their `tokens` [n] and `confidence` [n]. Each returned
        position gets the token that was last predicted there. The engine calls `edited` and `final` next, and then
        `advance`.
        """

    def edited(self, written: Positions) -> Positions:
        """Return those of `written` that replace a token which an earlier step chose, under a rule that edits."""
        return written[:0]

    def final(self, written: Positions) -> Positions:
        """Return the positions that are final at the end of this step, which wrote `written`."""
        return written

    def drafted(self) -> None:  # noqa: B027 - few draft
        """Go on from a pass that `drafts`, whose tokens are on the canvas now."""

    @abstractmethod
    def advance(self) -> None:
        """Go to the next step. The tokens of the last one are on the canvas."""

    def ahead(self, canvas: Canvas) -> Self:
        """The decoder of the next step, if this one leaves `canvas`. Called where `transfers` has an answer.

        This decoder stays as it is.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.canvas = canvas
        other.advance()
        return other


class RuleDecoder(Decoder):
    """A decoder that fills the masks of one block after the other by a remasking rule."""

    writes_once = True
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
        return RowGroup(rows, *self._reading, self.seed, self.step, positions)

    def _masks(self) -> int:
        """Noisy positions of the block."""
        # Of so few flags bytes are counted in half the time that NumPy takes.
        return self.canvas.noisy[self.block.start : self.block.stop].tobytes().count(1)

    def _blindly(self) -> Positions | None:
        """What a rule chooses that needs no confidences; None under any other."""
        if not self._rule.blind:
            return None
        candidates = self.block.start + self.canvas.noisy[self.block.start : self.block.stop].nonzero()[0]
        return self.choose(candidates, candidates, np.zeros(len(candidates), dtype=np.float32))

    def _by_rule(
        self, positions: Positions, confidence: Confidence, count: int, share: np.float32 | None = None
    ) -> Chosen:
        """Which of the noisy `positions` the rule transfers now, if the schedule transfers `count` of them."""
        step = Step(positions, confidence, self.block_step, count, share, self.order, self._draw)
        return check_progress(self._rule, self._choose(step), step, self._steps)

    def _draw(self, count: int) -> NDArray[np.float32]:
        """Draw `count` uniform numbers that depend on the request's seed and step alone."""
        return np.random.default_rng([self.seed, self.step]).random(count, dtype=np.float32)


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

"""The interface between the engine and the decoding of a request, for every kind of model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.errors import IntegrityError
from remask.plan.canvas import Canvas
from remask.plan.plan import Reach
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.remasking.select import Ranked
from remask.sampling.rows import RowGroup

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


class Decoder(Protocol):
    """The decoding of one request in progress. It reads the canvas and never writes to it."""

    step: int  # denoising steps so far
    block_step: int  # the same within the current block
    writes_once: bool  # what a step writes is final, and replaces no token: `edited` and `final` need not be asked
    first_step: int  # the step at which the canvas got its present length

    @property
    def finished(self) -> bool:
        """Whether every block is done."""
        ...

    @property
    def block(self) -> range:
        """Canvas positions of the current block."""
        ...

    @property
    def order(self) -> Positions | None:
        """The positions that this step transfers, in order, int64, where they are known before the pass; else None."""
        ...

    @property
    def transfers(self) -> Transfers | None:
        """The result of `choose` in this step, for all noisy positions of the block; None: only `choose` knows it.

        If it is known, transfers are final at once, and the next step depends only on their number.
        """
        ...

    @property
    def sees(self) -> Reach | None:
        """How many leading positions each row attends to in this step, int64 [T]; None where that is all of them."""
        ...

    @property
    def cut(self) -> Reach | None:
        """In a step that leaves out the tail of the canvas: how many positions are left, int64 [T], T times; else None.

        Later positions are neither computed nor attended to, whatever the cache policy plans.
        """
        ...

    @property
    def touched(self) -> Mask | None:
        """The blocks that the last step of a correction changed, bool [T]; None where there was no such step."""
        ...

    @property
    def fresh(self) -> range | None:
        """The block that begins, in a step that may revise completed blocks as well; None elsewhere."""
        ...

    @property
    def corrections(self) -> int | None:
        """Correction steps so far; None where the request names no correction."""
        ...

    @property
    def reads_best(self) -> bool:
        """Whether this step needs the most probable token of every row."""
        ...

    def note(self, positions: Positions, best: Tokens) -> None:
        """Note the most probable token of each predicted position, `positions` [n]. Called just before `choose`."""
        ...

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Return how the logits in `rows`, which predict `positions`, are turned into tokens and confidences."""
        ...

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:
        """Return the positions of the block that are written now, int64, ascending.

        `positions` [n] are those that this pass predicted, with their `tokens` [n] and `confidence` [n]. Each returned
        position gets the token that was last predicted there. The engine calls `edited` and `final` next, and then
        `advance`.
        """
        ...

    def edited(self, written: Positions) -> Positions:
        """Return those of `written` that replace a token which an earlier step chose, under a rule that edits."""
        ...

    def final(self, written: Positions) -> Positions:
        """Return the positions that are final at the end of this step, which wrote `written`."""
        ...

    def advance(self) -> None:
        """Go to the next step. The tokens of the last one are on the canvas."""
        ...

    def ahead(self, canvas: Canvas) -> Self:
        """The decoder of the next step, if this one leaves `canvas`. Called where `transfers` has an answer.

        This decoder stays as it is.
        """
        ...


def canvas_step(decoder: Decoder) -> int:
    """Denoising steps since the canvas got its present length: what a cache policy counts in."""
    return decoder.step - decoder.first_step


class Unedited(ABC):
    """The answers of decoders whose rules replace no token, leave out no tail, and read nothing more of a row."""

    cut: Reach | None = None
    first_step = 0
    canvas: Canvas
    writes_once = False

    @abstractmethod
    def advance(self) -> None:
        """See `Decoder`."""

    def ahead(self, canvas: Canvas) -> Self:
        """See `Decoder`."""
        other = copy(self)
        other.canvas = canvas
        other.advance()
        return other

    @property
    def transfers(self) -> Transfers | None:
        """See `Decoder`."""
        return None

    @property
    def reads_best(self) -> bool:
        """See `Decoder`."""
        return False

    def note(self, positions: Positions, best: Tokens) -> None:  # noqa: B027 - most take none
        """See `Decoder`."""

    def edited(self, written: Positions) -> Positions:
        """See `Decoder`."""
        return written[:0]


class Uncorrected(Unedited):
    """The answers of decoders that correct nothing."""

    touched: None = None
    fresh: None = None
    corrections: None = None


class Decoding(Protocol):
    """How one request is denoised, checked before it begins. Two canvases made by it are equal."""

    @property
    def seed(self) -> int:
        """The seed that all draws depend on."""
        ...

    @property
    def length(self) -> int:
        """Positions of the canvas."""
        ...

    @property
    def longest(self) -> int:
        """Positions of the canvas once it has grown as far as it may."""
        ...

    @property
    def grows(self) -> bool:
        """Whether a decoder that has finished leaves a canvas which gets another block."""
        ...

    def grown(self, canvases: Sequence[Canvas], step: int) -> "Decoding":
        """Append the next block to `canvases`, and return how they are denoised from `step` on. Only where it `grows`.

        A cache begins anew there, as it would for a request whose canvas has what is decoded as fixed tokens.
        """
        ...

    @property
    def block(self) -> int:
        """Positions per block."""
        ...

    @property
    def block_ranges(self) -> list[range]:
        """Canvas positions of each block, in the order in which they are denoised."""
        ...

    @property
    def total_steps(self) -> int:
        """Denoising steps in total that the parameters name, those of a correction included."""
        ...

    @property
    def scheduled_steps(self) -> int | None:
        """Denoising steps of the canvas as it is; None where no schedule says how many there are."""
        ...

    def passes(self, *, skips: bool) -> int:
        """Return how many of the steps run a pass, at most.

        `skips`: steps that are known to transfer nothing run no pass.
        """
        ...

    @property
    def ordered(self) -> bool:
        """Whether the positions of a step are known before its pass."""
        ...

    def ends_within(self, *, stop_written: bool) -> bool:
        """Return whether a stop token may end the response within a block, after a step that wrote one or did not."""
        ...

    def canvas(self) -> Canvas:
        """Return a new canvas."""
        ...

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> Decoder:
        """Return a decoder at the first step. `idle` says which steps are run although they transfer nothing."""
        ...


class _Sized(Protocol):
    """What has a number of positions."""

    @property
    def length(self) -> int: ...


class FixedCanvas:
    """The answers of decodings whose canvas has its whole length from the start."""

    __slots__ = ()
    grows = False

    @property
    def longest(self: _Sized) -> int:
        """See `Decoding`."""
        return self.length

    def grown(self, canvases: Sequence[Canvas], step: int) -> Decoding:  # noqa: ARG002
        """Raises `IntegrityError`: nobody may ask."""
        raise IntegrityError("a canvas was to grow that has its whole length")

"""The interface between the engine and the decoding of a request, for every kind of model."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from remask.core.canvas import Canvas
from remask.core.plan import Mask, Reach
from remask.policies.base import IdlePasses
from remask.sampling.score import RowGroup

Positions = NDArray[np.int64]
Tokens = NDArray[np.int64]
Confidence = NDArray[np.float32]


class Decoder(Protocol):
    """One request's place in its decoding. It reads the canvas and never writes to it."""

    step: int  # denoising steps so far
    block_step: int  # the same within the current block

    @property
    def finished(self) -> bool:
        """Every block is done."""
        ...

    @property
    def block(self) -> range:
        """Canvas positions of the current block."""
        ...

    @property
    def order(self) -> Positions | None:
        """The positions that this step transfers, in order, where they are known before the pass."""
        ...

    @property
    def sees(self) -> Reach | None:
        """How many leading positions each row attends to in this step, int64 [T]; None: every row to all."""
        ...

    @property
    def touched(self) -> Mask | None:
        """In a correction after its first step: the blocks that the last step changed. None: no such step."""
        ...

    @property
    def corrections(self) -> int | None:
        """Correction steps so far; None where the request names no correction."""
        ...

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """How logits `rows` are read, which predict `positions`."""
        ...

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:
        """Positions of the block to be written now, ascending, each with the token that was last predicted there.

        Those of this pass are `positions`; what follows is `final`, and then `advance`.
        """
        ...

    def final(self, written: Positions) -> Positions:
        """Positions that are final at the end of this step, which wrote `written`."""
        ...

    def advance(self) -> None:
        """Go to the next step. The tokens of the last one are on the canvas."""
        ...


class Uncorrected:
    """The answers of decoders that correct nothing."""

    touched: None = None
    corrections: None = None


class Decoding(Protocol):
    """How one request is denoised, checked before it begins. Making a canvas twice gives the same one."""

    @property
    def seed(self) -> int:
        """The seed that all draws depend on."""
        ...

    @property
    def length(self) -> int:
        """Positions of the canvas."""
        ...

    @property
    def block(self) -> int:
        """Positions per block."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether the positions of a step are known before its pass."""
        ...

    @property
    def whole_blocks(self) -> bool:
        """Whether a stop token ends the response only when its block is complete."""
        ...

    def canvas(self) -> Canvas:
        """A fresh canvas."""
        ...

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> Decoder:
        """A decoder at the first step. `idle` says which steps are run although they transfer nothing."""
        ...

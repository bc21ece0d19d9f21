"""What the engine asks of a request's decoding, whatever kind of model it runs on."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from remask.core.canvas import Canvas
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

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """How logits `rows` are read, which predict `positions`."""
        ...

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:
        """Of the block's predicted positions, those to be written now, ascending. What follows them is `advance`."""
        ...

    def final(self, written: Positions) -> Positions:
        """Positions that are final at the end of this step, which wrote `written`."""
        ...

    def advance(self) -> None:
        """The step is over and what it wrote is on the canvas."""
        ...


class Decoding(Protocol):
    """How one request is denoised, checked before it begins. Making a canvas twice gives the same one."""

    @property
    def seed(self) -> int:
        """What all draws depend on."""
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

    def sees(self, canvas: Canvas) -> NDArray[np.int64] | None:
        """How many leading positions each row attends to, int64 [T], as the canvas is now; None: every row to all."""
        ...

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> Decoder:
        """A decoder at the first step. `idle` says which steps are run although they transfer nothing."""
        ...

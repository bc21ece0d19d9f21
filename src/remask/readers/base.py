"""The protocol of readers, and the data that they get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas, Template
from remask.plan.pass_cost import LayerWork
from remask.plan.spans import Mask
from remask.policies.base import Schedule
from remask.request.result import Event, Transfer
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoder, Decoding, Predicted
from remask.sampling.rows import DeviceRead
from remask.text.incremental import StopRule

Written = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Positions, ascending, and their tokens; int64 [n] each."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a reader checks it.

    Attributes:
        template: the fixed parts and holes of its response; None where it is one hole.
        schedule: that of its cache policy.
        readers: all readers that it brings.
        seed: what its draws depend on.
    """

    prompt: Sequence[int]
    params: SamplingParams
    template: Template | None
    shape: ModelConfig
    stops: StopRule
    schedule: Schedule
    readers: Sequence["Reader"]
    seed: int

    @property
    def response(self) -> Template:
        """What the response is made of."""
        return Template.plain(self.params.max_tokens) if self.template is None else self.template


@dataclass(frozen=True, slots=True)
class Start:
    """A request that begins to run.

    Attributes:
        canvas: its conditional canvas, before the first pass. It may be kept and read, and never written to. Where it
            grows (`blocks.growing_canvas`) it is the same object with more positions, up to `longest`.
        response: the fixed parts and holes of its response.
        steps: those that it may take.
        readers: all readers that the request brings.
    """

    canvas: Canvas
    response: Template
    steps: int
    shape: ModelConfig
    readers: Sequence["Reader"]

    @property
    def longest(self) -> int:
        """Positions that the canvas may come to have."""
        return max(len(self.canvas), self.canvas.prompt + len(self.response))


@dataclass(frozen=True, slots=True)
class ReadPass:
    """A pass of one request.

    Attributes:
        decoder: at the step of the pass.
        positions: the predicted positions, ascending, int64 [predicted].
        paired: the unconditional canvas of guidance takes part.
        paired_next: it takes part in the next step, too.
        work: returns the work of the pass on the conditional canvas, layer by layer.
    """

    decoder: Decoder
    positions: NDArray[np.int64]
    paired: bool
    paired_next: bool
    work: Callable[[], tuple[LayerWork, ...]]


class Reader:
    """Reads something of the predicted rows of one request. The base class reads nothing.

    The reader that a request brings is never changed, and may serve many requests: it is asked for `decoding`, `check`
    and `start`. All else is asked of what `start` returns, which has the state of one request. What a method raises
    ends that request alone.

    Attributes:
        name: under which `Result.reads` has what `result` returns.
        foreseeable: the next pass can be planned before this reader has read the last one.
        writes: it says which tokens or positions are written.
        generates: the response is written; without it nothing is, and the result has no tokens.
        drafted: what it reads of a row depends on that row and its position alone, so it may be read of drafts too.
    """

    name: ClassVar[str]
    foreseeable: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    generates: ClassVar[bool] = True
    drafted: ClassVar[bool] = False

    @property
    def formed(self) -> bool:
        """Whether the response is whole wherever it ends."""
        return False

    def decoding(self, asked: Asked) -> Decoding | None:  # noqa: ARG002
        """How the request is denoised, where this reader decides it. Raises `ConfigError` where it cannot be."""
        return None

    def check(self, asked: Asked, decoding: Decoding) -> None:
        """Raise `ConfigError` where this cannot be read of the request."""

    def start(self, start: Start) -> "Reader | None":  # noqa: ARG002
        """The reader of a request that begins, with the state of that request; None where there is nothing to read.

        The default is the reader itself, which serves where it keeps no state.
        """
        return self

    def predicts(self, noisy: Mask) -> Mask | None:  # noqa: ARG002
        """The positions that a pass must predict, bool [T], instead of those of the cache policy; None: no change.

        `noisy` are the positions that are not final.
        """
        return None

    def admit(self, step: ReadPass) -> None:
        """Raise `PlanError` before a pass of which this cannot be read. Called in every step that predicts."""

    def on_device(self, step: ReadPass) -> DeviceRead | None:  # noqa: ARG002
        """Its device part for the rows of a pass that predicts; None: it reads nothing."""
        return None

    def choose(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:
        """Take `numbers` [width, predicted], and change what is predicted. Called before any `read`."""

    def read(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:
        """Take `numbers` [width, predicted] of a pass for which `on_device` had an answer."""

    def ended(self, step: ReadPass, predictions: Predicted | None) -> None:
        """Called at the end of a pass, before anything is transferred. `predictions` are None after a fill pass."""

    def written(self, step: int) -> Written | None:  # noqa: ARG002
        """The positions and tokens that `step` writes; None leaves the choice to the decoder."""
        return None

    def transferred(self, transfer: Transfer) -> None:
        """Complete `transfer`, which a step has just written."""

    def events(self, request_id: str) -> Sequence[Event]:  # noqa: ARG002
        """Events to report before the transfer of the step."""
        return ()

    def result(self) -> object | None:
        """Its entry in `Result.reads`; None: none."""
        return None

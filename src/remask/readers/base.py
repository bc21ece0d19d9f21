"""The interface of readers, and the data that they get."""

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
from remask.sampling.decoder import Decoder, Decoding, Predictions
from remask.sampling.rows import DeviceRead
from remask.text.incremental import StopRule

Written = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Positions, ascending, and their tokens; int64 [n] each."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a reader checks it.

    Attributes:
        prompt: its token ids.
        template: the fixed parts and holes of its response; None if the response is one hole.
        shape: the model's configuration.
        schedule: that of its cache policy.
        readers: all readers that the request brings.
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
        """The template of the response, also of a response that is one hole."""
        return Template.plain(self.params.max_tokens) if self.template is None else self.template


@dataclass(frozen=True, slots=True)
class Start:
    """A request that begins to run.

    Attributes:
        canvas: its conditional canvas, before the first pass. A reader may keep it, and must not write to it. A canvas
            that grows (`blocks.growing_canvas`) is the same object with more positions, up to `max_length`.
        response: the fixed parts and holes of its response.
        steps: the number of steps that it may take.
        shape: the model's configuration.
        readers: all readers that the request brings.
    """

    canvas: Canvas
    response: Template
    steps: int
    shape: ModelConfig
    readers: Sequence["Reader"]

    @property
    def max_length(self) -> int:
        """Largest number of positions that the canvas can have."""
        return max(len(self.canvas), self.canvas.prompt + len(self.response))


@dataclass(frozen=True, slots=True)
class ReadPass:
    """A pass of one request.

    Attributes:
        decoder: the request's decoder, at the step of the pass.
        positions: the predicted positions, ascending, int64 [predicted].
        is_guided: whether the unconditional canvas takes part in the pass.
        guides_next: whether it takes part in the next step, too.
        work: returns the work of the pass on the conditional canvas, layer by layer.
    """

    decoder: Decoder
    positions: NDArray[np.int64]
    is_guided: bool
    guides_next: bool
    work: Callable[[], tuple[LayerWork, ...]]


class Reader:
    """Reads something of the predicted rows of one request. The base class reads nothing.

    The reader that a request brings may serve many requests and is never changed: only `decoding`, `check` and `start`
    are called on it. `start` returns the reader with the state of one request, on which all other methods are called.
    If a method raises, that request alone ends with the error.

    Attributes:
        name: the key of its `result` in `Result.reads`.
        foreseeable: the next pass can be planned before this reader has read the last one.
        writes: the reader decides which tokens or positions are written.
        generates: the response is written. If False, nothing is written, and the result has no tokens.
        rowwise: the reader treats each row by that row and its position alone, so it may act on drafts too.
    """

    name: ClassVar[str]
    foreseeable: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    generates: ClassVar[bool] = True
    rowwise: ClassVar[bool] = False

    @property
    def has_form(self) -> bool:
        """Whether the response has a prescribed form, so that it is complete wherever it ends."""
        return False

    def decoding(self, request: RequestView) -> Decoding | None:  # noqa: ARG002
        """How the request is denoised; None if this reader does not decide it.

        Raises `ConfigError` if the request does not allow the reader's decoding.
        """
        return None

    def check(self, request: RequestView, decoding: Decoding) -> None:
        """Raise `ConfigError` if this reader cannot be used with the request."""

    def start(self, start: Start) -> "Reader | None":  # noqa: ARG002
        """The reader with the state of a request that begins; None if there is nothing to read.

        The default is the reader itself, which is right if it keeps no state.
        """
        return self

    def predicts(self, noisy: Mask) -> Mask | None:  # noqa: ARG002
        """The positions that a pass must predict instead of those of the cache policy, bool [T]; None: no change.

        `noisy` are the positions that are not final, bool [T].
        """
        return None

    def admit(self, read_pass: ReadPass) -> None:
        """Raise `PlanError` if this reader cannot read the pass. Called before each pass that predicts positions."""

    def on_device(self, read_pass: ReadPass) -> DeviceRead | None:  # noqa: ARG002
        """Prepare to read a pass that predicts positions. Returns the device part of its rows; None reads nothing."""
        return None

    def choose(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        """Change `predictions` in place by the device part's `numbers` [width, predicted]. Called before any `read`."""

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        """Take the `numbers` [width, predicted] of a pass for which `on_device` returned a device part."""

    def end_pass(self, read_pass: ReadPass, predictions: Predictions | None) -> None:
        """Act at the end of a pass, before anything is transferred. `predictions` are None after a fill pass."""

    def step_writes(self, step: int) -> Written | None:  # noqa: ARG002
        """The positions and tokens that `step` writes; None leaves the choice to the decoder."""
        return None

    def complete_transfer(self, transfer: Transfer) -> None:
        """Add what was read to `transfer`, which a step has just written."""

    def events(self, request_id: str) -> Sequence[Event]:  # noqa: ARG002
        """Events to report before the transfer of the step, each of them once."""
        return ()

    def result(self) -> object | None:
        """The reader's entry in `Result.reads`; None if it has none."""
        return None

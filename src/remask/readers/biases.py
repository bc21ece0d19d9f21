"""What a request's sampling parameters change in the logits of its predicted rows: biases, penalties and `min_p`.

The order is vLLM's: `logit_bias`, then the repetition penalty, the frequency penalty and the presence penalty, all on
the logits as they are; then temperature, and `min_p` before `top_k` and `top_p`. Confidences and log-probabilities are
those of the changed logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.plan.canvas import Canvas
from remask.readers.base import Reader, ReadPass
from remask.request.sampling_params import SamplingParams
from remask.sampling.rows import DeviceRead
from remask.sampling.vocabulary import Vocabulary


def biases_of(params: SamplingParams, canvas: Canvas) -> Iterator[Reader]:
    """The readers that these parameters ask for, in the order in which they act."""
    if params.logit_bias:
        yield LogitBias(params.logit_bias)
    if params.penalizes:
        yield Penalties(params, canvas)
    if params.min_p:
        yield MinP(params.min_p)


class LogitBias(Reader):
    """Adds a number to the logits of some tokens, in every row."""

    name = "logit_bias"
    drafted = True

    def __init__(self, biases: Mapping[int, float]) -> None:
        """`biases` are by token id."""
        self._added = Added(
            np.fromiter(biases, dtype=np.int64, count=len(biases)),
            np.fromiter(biases.values(), dtype=np.float32, count=len(biases)),
        )

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._added


@dataclass(frozen=True, slots=True)
class Added(DeviceRead):
    """`values` float32 [n] that are added to the logits of `tokens` int64 [n]."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        here, columns = vocabulary.places(self.tokens)
        if len(columns):
            logits.index_add_(1, send(columns, logits.device), _rows(self.values[here], logits))


class Penalties(Reader):
    """Lowers the logits of tokens that stand in the response or, for the repetition penalty, in the prompt.

    What counts is all that is final or written when the pass begins, wherever it stands: before the current block, what
    earlier steps have written of the block, and on masked models what stands behind it. Positions that one pass fills
    may take the same token.
    """

    name = "penalties"
    foreseeable = False

    def __init__(self, params: SamplingParams, canvas: Canvas) -> None:
        self._params, self._canvas = params, canvas
        self._prompt = np.unique(canvas.tokens[: canvas.prompt])

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        canvas, params = self._canvas, self._params
        places = slice(canvas.prompt, canvas.end)
        written, counts = np.unique(canvas.tokens[places][~canvas.noisy[places]], return_counts=True)
        losses = params.frequency_penalty * counts + params.presence_penalty
        seen = np.union1d(self._prompt, written) if params.repetition_penalty != 1 else written[:0]
        return Penalized(seen, params.repetition_penalty, written, losses.astype(np.float32))


@dataclass(frozen=True, slots=True)
class Penalized(DeviceRead):
    """Tokens whose logits are lower in every row.

    Attributes:
        seen: tokens whose logits are divided by `repetition` where they are positive, else multiplied, int64 [n].
        written: tokens that lose `losses` float32 [m] afterwards, int64 [m].
    """

    seen: NDArray[np.int64]
    repetition: float
    written: NDArray[np.int64]
    losses: NDArray[np.float32]

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        _, columns = vocabulary.places(self.seen)
        if len(columns):
            index = send(columns, logits.device)
            own = logits.index_select(1, index)
            logits.index_copy_(1, index, torch.where(own > 0, own / self.repetition, own * self.repetition))
        here, columns = vocabulary.places(self.written)
        if len(columns):
            logits.index_add_(1, send(columns, logits.device), _rows(-self.losses[here], logits))


class MinP(Reader):
    """Leaves out tokens that are less probable than a share of the most probable one's probability."""

    name = "min_p"
    drafted = True

    def __init__(self, share: float) -> None:
        self._read = AtLeast(share)

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._read


@dataclass(frozen=True, slots=True)
class AtLeast(DeviceRead):
    """The filter of `MinP`."""

    share: float
    filters = True

    def keep(self, choice: Tensor, vocabulary: Vocabulary) -> Tensor:
        return vocabulary.min_p(choice, self.share)


def _rows(values: NDArray[np.float32], like: Tensor) -> Tensor:
    """`values` [n] for each of the rows of `like` [rows, V], [rows, n]."""
    return send(values, like.device).to(like.dtype).expand(len(like), -1)

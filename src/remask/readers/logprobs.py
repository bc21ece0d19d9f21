"""Log-probabilities of tokens, for requests with `top_logprobs`: computed on the device, reported by the host.

They are the log-softmax of the logits that the sampler reads: after guidance and penalties, before temperature, top-k
and top-p. The mask token counts in the sum and is never listed.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.checks.values import check_whole
from remask.errors import ConfigError
from remask.readers.base import Reader, ReadPass, RequestView, Start
from remask.request.result import Transfer
from remask.request.trace import TOP_LOGPROBS
from remask.sampling.decoder import Decoding, Predictions
from remask.sampling.device_reads import MIN_LOGPROB, LogProbabilities
from remask.sampling.rows import DeviceRead, NumberFunction, RowGroup
from remask.sampling.vocabulary import Vocabulary

Top: TypeAlias = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the most probable first."""


class Logprobs(Reader):
    """Reports the log-probability of each token that is written, and of the `top` most probable ones at its position.

    They are those of the pass that predicted the token, in `Transfer.logprobs` and `Transfer.top_logprobs`.
    """

    name = "logprobs"
    rowwise = True

    def __init__(self, top: int) -> None:
        self.top = top

    def check(self, request: RequestView, decoding: Decoding) -> None:  # noqa: ARG002
        """Raise `ConfigError` if `top` is out of range, or if tokens of the model change after they are written."""
        check_whole("top_logprobs", self.top, 0, TOP_LOGPROBS)
        if request.shape.kind == "uniform":
            raise ConfigError(
                "top_logprobs: a uniform model's tokens may change in every step of their block, and some are noise "
                "that stays, so no one step gives them a log-probability; leave logprobs and top_logprobs out"
            )
        if request.shape.edit_tokens is not None:
            raise ConfigError(
                f"top_logprobs: {request.shape.family} models that delete and insert move tokens to places whose "
                "probabilities were others', so no place has a log-probability; leave logprobs and top_logprobs out"
            )

    def start(self, start: Start) -> Reader:
        return PredictedLogprobs(start.max_length, self.top, start.shape.vocab)


class PredictedLogprobs(Reader):
    """`Logprobs` with the state of one request: the numbers of the last pass that predicted each position.

    Args:
        length: number of positions of the canvas.
        top: how many of the most probable tokens are reported for each position.
        vocab_size: number of tokens of the model.
    """

    name = Logprobs.name

    def __init__(self, length: int, top: int, vocab_size: int) -> None:
        self._ranking = Ranking(top, vocab_size)
        self._rows: NDArray[np.float32] = np.zeros((length, self._ranking.width), dtype=np.float32)

    def on_device(self, read_pass: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._ranking

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        if predictions.logprobs is not None:
            token_logprobs = np.where(np.isnan(predictions.logprobs), numbers[0], predictions.logprobs)
            numbers = np.concatenate([token_logprobs[None], numbers[1:]])
        self.store(predictions.positions, numbers)

    def complete_transfer(self, transfer: Transfer) -> None:
        transfer.logprobs, transfer.top_logprobs = self.of(np.array(transfer.positions, dtype=np.int64))

    def store(self, positions: NDArray[np.int64], numbers: NDArray[np.float32]) -> None:
        """Store the `numbers` of `positions` [n]. The first 1 + 2k rows, [1 + 2k, n], are `LogProbabilities.of`."""
        self._rows[positions] = numbers[: self._ranking.width].T

    def of(self, positions: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[Top, ...]]:
        """The log-probability of the token at each of `positions` [n], and the most probable tokens there.

        The second tuple is empty if no most probable tokens are reported.
        """
        count = self._ranking.count
        rows = np.maximum(self._rows[positions], MIN_LOGPROB)
        ids = rows[:, 1 : 1 + count].astype(np.int64).tolist()
        values = rows[:, 1 + count :].tolist()
        tops = tuple(tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)) if count else ()
        return tuple(rows[:, 0].tolist()), tops


@dataclass(frozen=True, slots=True)
class Ranking(DeviceRead):
    """The numbers of `LogProbabilities.of`: float32 [1 + 2 * count, rows]."""

    top: int
    vocab_size: int

    @property
    def count(self) -> int:
        """How many most probable tokens are read: `top`, or all but the mask token if the vocabulary has fewer."""
        return min(self.top, self.vocab_size - 1)

    @property
    def width(self) -> int:
        return 1 + 2 * self.count

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:  # noqa: ARG002
        return LogProbabilities(logits, self.top, mask_id, vocabulary).of

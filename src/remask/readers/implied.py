"""The readers of a request that begins: those that it brings, and those that its parameters and its policy imply.

The implied ones are here, except guidance: measures of cache policies, numbers of decoders, barred tokens, and changes
of logits. The order of these changes is vLLM's: `logit_bias`, then the repetition, frequency and presence penalties,
all before temperature; after it `min_p`, before `top_k` and `top_p`. Confidences and log-probabilities are those of the
changed logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.plan.canvas import Canvas
from remask.plan.hooks import RowMeasure
from remask.plan.spans import Mask
from remask.policies.base import CachePolicy
from remask.readers.base import Reader, ReadPass, Start
from remask.readers.guidance import Guidance
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoder, Predictions
from remask.sampling.rows import DeviceRead, NumberFunction, RowGroup
from remask.sampling.score import apply_measure
from remask.sampling.vocabulary import WHOLE, Vocabulary


def readers_of(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> tuple[Reader, ...]:
    """The readers that work on a request that begins: the implied ones, then those that it brings."""
    request_readers = (reader.start(start) for reader in start.readers)
    return (
        *_implied_readers(start, decoder, policy, params),
        *(reader for reader in request_readers if reader is not None),
    )


def _implied_readers(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> Iterator[Reader]:
    # A correction begins after the last block, and reads numbers only then.
    if decoder.context.device_read is not None or decoder.context.corrections is not None:
        yield DecoderNumbers()
    if policy.traits.measure is not None:
        yield PolicyMeasure(RowMeasureRead(policy.traits.measure))
    yield from _bars(start, params)
    if params.cfg_scale > 0:
        yield Guidance(params.cfg_scale)
    yield from logit_readers(params, start.canvas)


def _bars(start: Start, params: SamplingParams) -> Iterator[Reader]:
    """Yield the readers that bar tokens: padding from places without it, stop tokens from the first `min_tokens`."""
    response = start.response
    prompt = start.canvas.prompt
    bars = [(response.padding, response.unpadded)]
    if start.shape.kind != "uniform":  # the uniform sampler itself leaves the stop tokens out of its distribution
        stops = {token for token in params.stop_token_ids if token < start.shape.vocab}
        bars.append(((*stops, *start.shape.stop_ids), np.arange(len(response)) < (params.min_tokens or 0)))
    for tokens, places in bars:
        if places.any():
            mask = np.zeros(start.max_length, dtype=np.bool_)
            mask[prompt : prompt + len(response)] = places
            yield Bar(np.array(tokens, dtype=np.int64), mask)


def logit_readers(params: SamplingParams, canvas: Canvas) -> Iterator[Reader]:
    """Yield the readers that change or filter logits by `params`, in the order in which they act."""
    if params.logit_bias:
        yield LogitBias(LogitOffsets.from_mapping(params.logit_bias))
    if params.has_penalties:
        yield Penalties(params, canvas)
    if params.min_p:
        yield MinP(MinPFilter(params.min_p))


class _SteadyReader(Reader):
    """A reader with the same device part in every pass."""

    def __init__(self, read: DeviceRead) -> None:
        self._read = read

    def on_device(self, read_pass: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._read


class PolicyMeasure(_SteadyReader):
    """Reads the cache policy's measure of each row, for its next view (`LastPass.measured`)."""

    name = "measure"

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        predictions.measured = numbers[0]


@dataclass(frozen=True, slots=True)
class RowMeasureRead(DeviceRead):
    """A measure of each row, of its logits before temperature and filters, the mask token included; [1, rows]."""

    row_measure: RowMeasure
    width = 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:  # noqa: ARG002
        values = apply_measure(vocabulary.log_softmax(logits), self.row_measure, vocabulary).float()
        return lambda tokens: values[None]  # noqa: ARG005


class DecoderNumbers(Reader):
    """Reads the numbers that the decoder needs of predicted rows (`StepContext.device_read`)."""

    name = "decoder"

    def on_device(self, read_pass: ReadPass) -> DeviceRead | None:
        return read_pass.decoder.context.device_read

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        predictions.numbers = numbers


class Bar(Reader):
    """Bars `tokens` int64 [n] from the positions in `mask` bool [T]."""

    name = "bars"
    rowwise = True

    def __init__(self, tokens: NDArray[np.int64], mask: Mask) -> None:
        self._tokens = tokens
        self._mask = mask

    def on_device(self, read_pass: ReadPass) -> DeviceRead | None:
        rows = self._mask[read_pass.positions]
        return TokenBars(self._tokens, rows) if rows.any() else None


@dataclass(frozen=True, slots=True)
class TokenBars(DeviceRead):
    """Excludes `tokens` int64 [n] from the choice in the rows of the mask `rows` bool [rows].

    They count in the probabilities, as the mask token does.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.bool_]
    bars = True

    def slice_rows(self, start: int, stop: int) -> "TokenBars":
        return replace(self, rows=self.rows[start:stop])

    def bar(self, choice: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        _, columns = vocabulary.places(self.tokens)
        if len(columns):
            index, rows = send(columns, choice.device), send(self.rows, choice.device)
            choice.index_copy_(1, index, choice.index_select(1, index).masked_fill(rows[:, None], -torch.inf))


class LogitBias(_SteadyReader):
    """Adds a number to the logits of some tokens, in every row."""

    name = "logit_bias"
    rowwise = True


@dataclass(frozen=True, slots=True)
class LogitOffsets(DeviceRead):
    """Adds `values` float32 [n] to the logits of `tokens` int64 [n], in every row."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def from_mapping(cls, biases: Mapping[int, float]) -> "LogitOffsets":
        """Offsets from `biases` by token id."""
        return cls(np.array([*biases], dtype=np.int64), np.array([*biases.values()], dtype=np.float32))

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        is_local, columns = vocabulary.places(self.tokens)
        if len(columns):
            values = send(self.values[is_local], logits.device).to(logits.dtype)
            logits.index_add_(1, send(columns, logits.device), values.expand(len(logits), -1))


class Penalties(Reader):
    """Lowers the logits of tokens that the response or, for the repetition penalty, the prompt has.

    All positions count that are final when the pass begins: before the current block, in it, and on masked models
    behind it. Positions that one pass fills may take the same token.
    """

    name = "penalties"
    foreseeable = False

    def __init__(self, params: SamplingParams, canvas: Canvas) -> None:
        self._params = params
        self._canvas = canvas
        self._prompt_tokens = np.unique(canvas.tokens[: canvas.prompt])

    def on_device(self, read_pass: ReadPass) -> DeviceRead:  # noqa: ARG002
        canvas = self._canvas
        params = self._params
        response = slice(canvas.prompt, canvas.end)
        response_tokens, counts = np.unique(canvas.tokens[response][~canvas.noisy[response]], return_counts=True)
        losses = params.frequency_penalty * counts + params.presence_penalty
        repeats = params.repetition_penalty != 1
        tokens = np.union1d(self._prompt_tokens, response_tokens) if repeats else response_tokens[:0]
        return TokenPenalties(tokens, params.repetition_penalty, response_tokens, losses.astype(np.float32))


@dataclass(frozen=True, slots=True)
class TokenPenalties(DeviceRead):
    """Lowers the logits of tokens in every row.

    Attributes:
        tokens: those whose logits are divided by `repetition` if positive, else multiplied by it, int64 [n].
        response_tokens: those from whose logits `losses` float32 [m] are subtracted afterwards, int64 [m].
    """

    tokens: NDArray[np.int64]
    repetition: float
    response_tokens: NDArray[np.int64]
    losses: NDArray[np.float32]

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:
        _, columns = vocabulary.places(self.tokens)
        if len(columns):
            index = send(columns, logits.device)
            values = logits.index_select(1, index)
            logits.index_copy_(1, index, torch.where(values > 0, values / self.repetition, values * self.repetition))
        LogitOffsets(self.response_tokens, -self.losses).change(logits, guide, vocabulary)


class MinP(_SteadyReader):
    """Excludes tokens whose probability is below a share of the most probable token's."""

    name = "min_p"
    rowwise = True


@dataclass(frozen=True, slots=True)
class MinPFilter(DeviceRead):
    """The filter of `MinP`."""

    share: float
    filters = True

    def keep(self, choice: Tensor, vocabulary: Vocabulary) -> Tensor:
        return vocabulary.min_p(choice, self.share)

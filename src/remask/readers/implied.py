"""The readers of a request that begins: those that it brings, and those that follow from its parameters and its policy.

The latter are here, but for guidance: measures of cache policies, numbers of decoders, barred tokens, and what changes
logits. The order of these is vLLM's: `logit_bias`, then the repetition penalty, the frequency penalty and the presence
penalty, all on the logits as they are; then temperature, and `min_p` before `top_k` and `top_p`. Confidences and
log-probabilities are those of the changed logits.
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
from remask.sampling.decoder import Decoder, Predicted
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.score import apply_measure
from remask.sampling.vocabulary import WHOLE, Vocabulary


def readers_of(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> tuple[Reader, ...]:
    """The readers at work on a request that begins, under this policy and with these sampling parameters."""
    running = (reader.start(start) for reader in start.readers)
    return (*_implied(start, decoder, policy, params), *(reader for reader in running if reader is not None))


def _implied(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> Iterator[Reader]:
    # A correction comes later, and reads numbers then.
    if decoder.context.numbers is not None or decoder.context.corrections is not None:
        yield DecoderNumbers()
    if policy.traits.measure is not None:
        yield PolicyMeasure(Measuring(policy.traits.measure))
    yield from _bars(start, params)
    if params.cfg_scale > 0:
        yield Guidance(params.cfg_scale)
    yield from biases_of(params, start.canvas)


def _bars(start: Start, params: SamplingParams) -> Iterator[Reader]:
    """The readers that keep tokens out of a response."""
    response, prompt = start.response, start.canvas.prompt
    bars = [(response.padding, response.unpadded)]
    if start.shape.kind != "uniform":  # whose sampler leaves the end tokens out of the distribution
        stops = {token for token in params.stop_token_ids if token < start.shape.vocab}
        bars.append(((*stops, *start.shape.stop_ids), np.arange(len(response)) < (params.min_tokens or 0)))
    for tokens, places in bars:
        if places.any():
            positions = np.zeros(start.longest, dtype=np.bool_)
            positions[prompt : prompt + len(response)] = places
            yield Bar(np.array(tokens, dtype=np.int64), positions)


def biases_of(params: SamplingParams, canvas: Canvas) -> Iterator[Reader]:
    """The readers that change logits as these parameters say, in the order in which they act."""
    if params.logit_bias:
        yield LogitBias(Added.of(params.logit_bias))
    if params.has_penalties:
        yield Penalties(params, canvas)
    if params.min_p:
        yield MinP(AtLeast(params.min_p))


class _SteadyReader(Reader):
    """A reader whose device part is the same in every pass."""

    def __init__(self, read: DeviceRead) -> None:
        self._read = read

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._read


class PolicyMeasure(_SteadyReader):
    """Gives the cache policy's next view its measure of the last pass (`LastPass.measured`)."""

    name = "measure"

    def read(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:
        predictions.measured = numbers[0]


@dataclass(frozen=True, slots=True)
class Measuring(DeviceRead):
    """A measure of each row, of the logits as they are: the mask token counts."""

    of: RowMeasure
    width = 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:  # noqa: ARG002
        values = apply_measure(vocabulary.log_softmax(logits), self.of, vocabulary).float()
        return lambda tokens: values[None]  # noqa: ARG005


class DecoderNumbers(Reader):
    """Gives the decoder what it wants to know of predicted rows (`StepContext.numbers`)."""

    name = "decoder"

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        return step.decoder.context.numbers

    def read(self, predictions: Predicted, numbers: NDArray[np.float32]) -> None:
        predictions.numbers = numbers


class Bar(Reader):
    """Bars `tokens` int64 [n] from the positions in `barred` bool [T]."""

    name = "bars"
    drafted = True

    def __init__(self, tokens: NDArray[np.int64], barred: Mask) -> None:
        self._tokens, self._barred = tokens, barred

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        rows = self._barred[step.positions]
        return Barred(self._tokens, rows) if rows.any() else None


@dataclass(frozen=True, slots=True)
class Barred(DeviceRead):
    """Tokens, int64 [n], that are not chosen in some `rows`, bool [rows].

    They count in the probabilities, as the mask token does.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.bool_]
    bars = True

    def piece(self, start: int, stop: int) -> "Barred":
        return replace(self, rows=self.rows[start:stop])

    def bar(self, choice: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        _, columns = vocabulary.places(self.tokens)
        if len(columns):
            index, rows = send(columns, choice.device), send(self.rows, choice.device)
            choice.index_copy_(1, index, choice.index_select(1, index).masked_fill(rows[:, None], -torch.inf))


class LogitBias(_SteadyReader):
    """Adds a number to the logits of some tokens, in every row."""

    name = "logit_bias"
    drafted = True


@dataclass(frozen=True, slots=True)
class Added(DeviceRead):
    """`values` float32 [n] that are added to the logits of `tokens` int64 [n]."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> "Added":
        """`biases` by token id."""
        return cls(np.array([*biases], dtype=np.int64), np.array([*biases.values()], dtype=np.float32))

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:  # noqa: ARG002
        local, columns = vocabulary.places(self.tokens)
        if len(columns):
            values = send(self.values[local], logits.device).to(logits.dtype)
            logits.index_add_(1, send(columns, logits.device), values.expand(len(logits), -1))


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

    def change(self, logits: Tensor, guide: Tensor | None, vocabulary: Vocabulary) -> None:
        _, columns = vocabulary.places(self.seen)
        if len(columns):
            index = send(columns, logits.device)
            before = logits.index_select(1, index)
            logits.index_copy_(1, index, torch.where(before > 0, before / self.repetition, before * self.repetition))
        Added(self.written, -self.losses).change(logits, guide, vocabulary)


class MinP(_SteadyReader):
    """Leaves out tokens that are less probable than a share of the most probable one's probability."""

    name = "min_p"
    drafted = True


@dataclass(frozen=True, slots=True)
class AtLeast(DeviceRead):
    """The filter of `MinP`."""

    share: float
    filters = True

    def keep(self, choice: Tensor, vocabulary: Vocabulary) -> Tensor:
        return vocabulary.min_p(choice, self.share)

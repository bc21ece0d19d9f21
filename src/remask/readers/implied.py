"""The readers of a request that begins: those that it brings, and those that its parameters need.

The latter are here, but for guidance and biases: measures of cache policies, numbers of decoders, and bars.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.plan.hooks import RowMeasure
from remask.plan.spans import Mask
from remask.policies.base import CachePolicy
from remask.readers.base import Reader, ReadPass, Start
from remask.readers.biases import biases_of
from remask.readers.guidance import Guidance
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoder, Predicted
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.score import measured
from remask.sampling.vocabulary import WHOLE, Vocabulary


def readers_of(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> tuple[Reader, ...]:
    """The readers at work on a request that begins, under this policy and with these sampling parameters."""
    started = (reader.start(start) for reader in start.readers)
    return (*_implied(start, decoder, policy, params), *(each for each in started if each is not None))


def _implied(start: Start, decoder: Decoder, policy: CachePolicy, params: SamplingParams) -> Iterator[Reader]:
    # A correction comes later, and reads numbers then.
    if decoder.context.numbers is not None or decoder.context.corrections is not None:
        yield DecoderNumbers()
    if policy.traits.measure is not None:
        yield PolicyMeasure(policy.traits.measure)
    yield from bars_of(start, params)
    if params.cfg_scale > 0:
        yield Guidance(params.cfg_scale)
    yield from biases_of(params, start.canvas)


class PolicyMeasure(Reader):
    """Gives the cache policy's next view its measure of the last pass (`LastPass.measured`)."""

    name = "measure"

    def __init__(self, measure: RowMeasure) -> None:
        self._read = Measuring(measure)

    def on_device(self, step: ReadPass) -> DeviceRead:  # noqa: ARG002
        return self._read

    def read(self, found: Predicted, numbers: NDArray[np.float32]) -> None:
        found.measured = numbers[0]


@dataclass(frozen=True, slots=True)
class Measuring(DeviceRead):
    """A measure of each row, of the logits as they are: the mask token counts."""

    of: RowMeasure
    width = 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:  # noqa: ARG002
        found = measured(vocabulary.log_softmax(logits), self.of, vocabulary).float()
        return lambda tokens: found[None]  # noqa: ARG005


class DecoderNumbers(Reader):
    """Gives the decoder what it wants to know of predicted rows (`StepContext.numbers`)."""

    name = "decoder"

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        return step.decoder.context.numbers

    def read(self, found: Predicted, numbers: NDArray[np.float32]) -> None:
        found.numbers = numbers


def bars_of(start: Start, params: SamplingParams) -> Iterator[Reader]:
    """The readers that keep tokens out of a response."""
    response, prompt = start.response, start.canvas.prompt
    asked = [(response.padding, response.unpadded)]
    if start.shape.kind != "uniform":  # whose sampler leaves the end tokens out of the distribution
        stops = {token for token in params.stop_token_ids if token < start.shape.vocab}
        asked.append(((*stops, *start.shape.stop_ids), np.arange(len(response)) < (params.min_tokens or 0)))
    for tokens, places in asked:
        if places.any():
            barred = np.zeros(start.longest, dtype=np.bool_)
            barred[prompt : prompt + len(response)] = places
            yield Bar(np.array(tokens, dtype=np.int64), barred)


class Bar(Reader):
    """Bars tokens from positions that must not hold them."""

    name = "bars"
    drafted = True

    def __init__(self, tokens: NDArray[np.int64], barred: Mask) -> None:
        """`barred` [T] are the positions that must hold none of `tokens` [n]."""
        self._tokens, self._barred = tokens, barred

    def on_device(self, step: ReadPass) -> DeviceRead | None:
        rows = self._barred[step.positions]
        return Barred(self._tokens, rows) if rows.any() else None


@dataclass(frozen=True, slots=True)
class Barred(DeviceRead):
    """Tokens that are not chosen in some rows. They count in the probabilities, as the mask token does.

    Attributes:
        tokens: the token ids, int64 [n].
        rows: in which rows, bool [rows].
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.bool_]
    bars = True

    def piece(self, start: int, stop: int) -> "Barred":
        return replace(self, rows=self.rows[start:stop])

    def bar(self, choice: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        """Their logits are minus infinity."""
        _, columns = vocabulary.places(self.tokens)
        if len(columns):
            index, rows = send(columns, choice.device), send(self.rows, choice.device)
            choice.index_copy_(1, index, choice.index_select(1, index).masked_fill(rows[:, None], -torch.inf))

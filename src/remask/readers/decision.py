"""Decisions: one pass over a canvas with masks, which reads the distributions at masks and writes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.checks import ModelKind, in_words
from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.plan.canvas import Canvas
from remask.plan.spans import Mask
from remask.policies.base import IdlePasses
from remask.readers.base import Reader, ReadPass, RequestView, Start
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoder, Decoding, Positions, Predictions
from remask.sampling.device_reads import LogProbabilities
from remask.sampling.rows import DeviceRead, NumberFunction, RowGroup
from remask.sampling.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Reading(Reader):
    """Reads in one pass how probable some tokens are at the masks of an answer. Nothing is written.

    `Result.reads` has the log-probabilities of the tokens of each slot.

    Attributes:
        token_ids: the answer; tokens at masks are ignored.
        masks: indices into the answer that are masks, ascending.
        slots: the masks that are read, each with the tokens whose log-probabilities are returned.
    """

    token_ids: tuple[int, ...]
    masks: tuple[int, ...]
    slots: Mapping[int, tuple[int, ...]]

    name = "reading"
    foreseeable = False
    generates = False

    @property
    def has_form(self) -> bool:
        return True

    @staticmethod
    def check_kind(kind: ModelKind, family: str) -> None:
        """Raise `ConfigError` if models of this kind have no masks to read in one pass."""
        if kind != "masked":
            raise ConfigError(
                "decisions read masks in one pass, with what stands before and behind them, and "
                f"{in_words((kind,))} models ({family}) have no such masks; use a masked model"
            )

    def decoding(self, request: RequestView) -> Decoding:
        """See `Reader`. Raises `ConfigError` on models without masks, bad slots, readers that write, and parameters."""
        self.check_kind(request.shape.kind, request.shape.family)
        self._check_slots(request.shape.vocab, request.shape.mask_id)
        for reader in request.readers:
            if reader.writes:
                raise ConfigError(
                    f"{reader.name} is for answers that are written, and a reading writes nothing; leave it out"
                )
        if request.params != SamplingParams(max_tokens=len(self.token_ids)):
            raise ConfigError("a reading has no sampling parameters but max_tokens, the length of its answer")
        return ReadingDecoding(request.prompt, request.seed, self, request.shape.mask_id)

    def start(self, start: Start) -> Reader:
        return _RunningReading(self.slots, start.canvas.prompt)

    def _check_slots(self, vocab_size: int, mask_id: int) -> None:
        """Raise `ConfigError` if masks or slots are malformed, or a token id is not below `vocab_size`."""
        if not self.slots or not all(self.slots.values()):
            raise ConfigError("reading: it needs at least one slot, and each slot at least one token")
        if list(self.masks) != sorted(set(self.masks)) or not set(self.masks) <= set(range(len(self.token_ids))):
            raise ConfigError(f"reading.masks must be ascending places below {len(self.token_ids)}, got {self.masks}")
        if not self.slots.keys() <= set(self.masks):
            raise ConfigError(f"reading.slots holds {min(self.slots.keys() - set(self.masks))}, where no mask stands")
        tokens = {*self.token_ids}.union(*self.slots.values())
        unknown_tokens = [token for token in tokens if not 0 <= token < vocab_size]
        if unknown_tokens:
            raise ConfigError(
                f"reading holds the token {unknown_tokens[0]}; token ids are whole numbers from 0 to {vocab_size - 1}"
            )
        if any(mask_id in labels for labels in self.slots.values()):
            raise ConfigError(f"reading.slots holds the mask token {mask_id}, which no answer has")


class _RunningReading(Reader):
    """A `Reading` with the state of one request, whose answer begins at the position `start`."""

    name = Reading.name

    def __init__(self, slots: Mapping[int, tuple[int, ...]], start: int) -> None:
        self._slots = slots
        self._start = start
        self._logprobs: dict[int, tuple[float, ...]] = {}

    def predicts(self, noisy: Mask) -> Mask:
        """See `Reader`. All masks are predicted, as a cache policy may plan to predict fewer."""
        return noisy.copy()

    def on_device(self, read_pass: ReadPass) -> DeviceRead:
        """The tokens of each slot, in the row of its mask. Token 0 fills up shorter slots, and rows without a slot."""
        labels = np.zeros((len(read_pass.positions), max(map(len, self._slots.values()))), dtype=np.int64)
        for slot, tokens in self._slots.items():
            labels[np.searchsorted(read_pass.positions, self._start + slot), : len(tokens)] = tokens
        return Labels(labels)

    def read(self, predictions: Predictions, numbers: NDArray[np.float32]) -> None:
        for slot, tokens in self._slots.items():
            column = int(np.searchsorted(predictions.positions, self._start + slot))
            self._logprobs[slot] = tuple(numbers[: len(tokens), column].tolist())

    def result(self) -> dict[int, tuple[float, ...]]:
        """The log-probabilities of the tokens of each slot."""
        return self._logprobs


@dataclass(frozen=True, slots=True)
class Labels(DeviceRead):
    """The log-probabilities of `tokens` int64 [rows, n], as [n, rows]. None of them may be the mask token."""

    tokens: NDArray[np.int64]

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def slice_rows(self, start: int, stop: int) -> "Labels":
        return Labels(self.tokens[start:stop])

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:  # noqa: ARG002
        logprobs = LogProbabilities(logits, 0, mask_id, vocabulary).of_several(send(self.tokens, logits.device))
        return lambda tokens: logprobs  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class ReadingDecoding(Decoding):
    """One step over one block, the answer. Its tokens that are no masks are final, as the prompt is."""

    reading: Reading
    mask_id: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.block_length

    @property
    def block_length(self) -> int:
        return len(self.reading.token_ids)

    @property
    def block_ranges(self) -> list[range]:
        return [range(len(self.prompt), self.length)]

    @property
    def total_steps(self) -> int:
        return 1

    def canvas(self) -> Canvas:
        """A canvas of the prompt and the answer, in which only the masks are noisy."""
        tokens = np.asarray(self.reading.token_ids, dtype=np.int64)
        tokens[list(self.reading.masks)] = self.mask_id
        canvas = Canvas(self.prompt, tokens, len(tokens))
        fixed = np.delete(np.arange(canvas.prompt, canvas.end), self.reading.masks)
        canvas.noisy[fixed] = False
        canvas.settled[fixed] = -1
        return canvas

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "ReadingDecoder":  # noqa: ARG002
        return ReadingDecoder(canvas, self.seed)


class ReadingDecoder(Decoder):
    """The decoder of the one step of a reading. It transfers nothing."""

    def __init__(self, canvas: Canvas, seed: int) -> None:
        super().__init__(canvas, seed)
        self.block = range(canvas.prompt, canvas.end)

    @property
    def finished(self) -> bool:
        return self.step > 0

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """See `Decoder`. Logits are read without temperature and filters."""
        return RowGroup(rows, seed=self._seed, step=self.step, positions=positions)

    def choose(self, predictions: Predictions) -> Positions:
        return predictions.positions[:0]

    def advance(self) -> None:
        self.step += 1
        self.block_step += 1

"""The most probable tokens of each row, for decoders that choose among several (LLaDA2.2)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.readers.base import Predicted, Reader, ReadPass
from remask.readers.logprobs import Normalised
from remask.sampling.block_causal import IndelDecoder
from remask.sampling.indel import Candidates
from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.vocabulary import Vocabulary


class Offers(Reader):
    """Gives a decoder that asks for it (`Decoder.candidates`) the most probable tokens of each position."""

    name = "candidates"
    foreseeable = False

    def on_device(self, step: ReadPass) -> DeviceRead:
        self._decoder = decoder = step.decoder
        assert isinstance(decoder, IndelDecoder)
        temperature = 0.0 if decoder.params.greedy else decoder.params.temperature
        tokens = decoder.edit_tokens
        self._read = MostProbable(decoder.candidates, temperature, (tokens.delete, tokens.insert))
        return self._read

    def read(self, found: Predicted, numbers: NDArray[np.float32]) -> None:  # noqa: ARG002
        draws = 3 if self._read.temperature else 0
        count = (len(numbers) - draws) // 2
        tokens, chances = numbers[:count].T.astype(np.int64), np.exp(numbers[count : 2 * count].T)
        drawn = None
        if draws:
            ids, chance, plain = numbers[2 * count :]
            drawn = ids.astype(np.int64), chance, plain.astype(np.int64)
        self._decoder.offered(Candidates(tokens, chances, drawn))


@dataclass(frozen=True, slots=True)
class MostProbable(DeviceRead):
    """The `count` most probable tokens but the mask, their log-probabilities and, above temperature 0, drawn tokens.

    Drawn are a token by the request's filters, with its probability, and one that is none of `barred`. Probabilities
    are those of the logits as they are.
    """

    count: int
    temperature: float
    barred: tuple[int, ...]

    @property
    def width(self) -> int:
        return 2 * self.count + (3 if self.temperature else 0)

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:
        normalised = Normalised(logits, self.count, mask_id, vocabulary)
        parts = [] if not self.temperature else self._drawn(logits, rows, mask_id, vocabulary)

        def found(tokens: Tensor) -> Tensor:
            return torch.cat([normalised.of(tokens)[1:], *parts])

        return found

    def _drawn(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> list[Tensor]:
        choice = logits / self.temperature
        vocabulary.bar(choice, [mask_id])

        def draw() -> Tensor:
            kept = choice
            for read in rows.reads:
                kept = read.keep(kept, vocabulary)
            return vocabulary.draw(vocabulary.top_p(vocabulary.top_k(kept, rows.top_k), rows.top_p), rows.draws)

        drawn = draw()
        chance = vocabulary.at(vocabulary.log_softmax(logits), drawn).exp()
        vocabulary.bar(choice, self.barred)
        return [torch.stack((drawn.float(), chance.float(), draw().float()))]

"""What some samplers read of each predicted row on the device, beside its token and confidence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from remask.sampling.rows import DeviceRead, Measured, RowGroup
from remask.sampling.score import distributions
from remask.sampling.vocabulary import WHOLE, Vocabulary

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of 0, as JSON has no infinity."""


class Normalised:
    """Logits whose total is known: made before a sampler changes them, asked once it has chosen its tokens.

    `logits` [rows, V], or a rank's columns of them as `vocabulary` says, are kept and not copied; the sampler may
    change those of the mask token alone.
    """

    def __init__(self, logits: Tensor, top: int, mask_id: int, vocabulary: Vocabulary = WHOLE) -> None:
        self._logits, self._vocabulary = logits, vocabulary
        self._total = vocabulary.logsumexp(logits)
        self._top = self._most_probable(min(top, vocabulary.size(logits) - 1), mask_id)

    def of(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of `tokens` [rows], then the top k token ids, then theirs: float32 [1 + 2k, rows].

        Float32 holds token ids exactly.
        """
        chosen = self._vocabulary.at(self._logits, tokens) - self._total
        return torch.cat([chosen[None], *self._top])

    def each(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of `tokens` [rows, n], float32 [n, rows]."""
        return (self._vocabulary.each(self._logits, tokens) - self._total[:, None]).clamp_min(MIN_LOGPROB).T

    def _most_probable(self, count: int, mask_id: int) -> Sequence[Tensor]:
        if not count:
            return ()
        values, ids = self._vocabulary.top(self._logits, count + 1)
        # One more than asked for: from the mask token's place on, all move up.
        place = torch.arange(count, device=ids.device) + (ids == mask_id).cumsum(dim=-1)[:, :count]
        return ids.gather(1, place).T.float(), (values.gather(1, place) - self._total[:, None]).T


def entropy(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy of each row of `logits` [rows, V] in nats, float32 [rows]."""
    logs = vocabulary.log_softmax(logits)
    chances = logs.exp()
    return -vocabulary.sum(torch.where(chances > 0, chances * logs, 0.0)).float()


@dataclass(frozen=True, slots=True)
class Drawn(DeviceRead):
    """A token of each row drawn at a temperature, by its filters, and the entropy at that temperature without them."""

    temperature: float

    @property
    def width(self) -> int:
        return 2

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:
        _, _, choice = distributions(logits, replace(rows, temperature=self.temperature), mask_id, vocabulary)
        drawn, entropies = vocabulary.draw(choice, rows.draws), entropy(logits / self.temperature, vocabulary)
        found = torch.stack((drawn.float(), entropies))
        return lambda tokens: found  # noqa: ARG005


class Best(DeviceRead):
    """The most probable allowed token of each row."""

    @property
    def width(self) -> int:
        return 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Measured:
        allowed, noisy = logits.clone(), rows.noisy
        vocabulary.bar(allowed, [mask_id])
        if noisy is not None and noisy.banned and noisy.banned_rows:
            vocabulary.bar(allowed[: noisy.banned_rows], noisy.banned)
        found = vocabulary.best(allowed)[1].float()
        return lambda tokens: found[None]  # noqa: ARG005


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

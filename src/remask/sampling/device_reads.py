"""Numbers that samplers read of each predicted row on the device, beside its token and confidence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from remask.sampling.rows import DeviceRead, NumberFunction, RowGroup
from remask.sampling.score import distributions
from remask.sampling.vocabulary import WHOLE, Vocabulary

MIN_LOGPROB = -9999.0
"""Replaces the logarithm of 0, as JSON has no infinity."""


class LogProbabilities:
    """Log-probabilities of rows: made before a sampler changes the logits, and read after it has chosen its tokens.

    `logits` [rows, V], or a rank's columns of them by its `vocabulary`, are referenced and not copied. The sampler may
    only change those of the mask token.
    """

    def __init__(self, logits: Tensor, top: int, mask_id: int, vocabulary: Vocabulary = WHOLE) -> None:
        self._logits = logits
        self._vocabulary = vocabulary
        self._total = vocabulary.logsumexp(logits)
        self._top = self._most_probable(min(top, vocabulary.size(logits) - 1), mask_id)

    def of(self, tokens: Tensor) -> Tensor:
        """Return the log-probability of `tokens` [rows], and the top k token ids with theirs: float32 [1 + 2k, rows].

        Float32 holds token ids exactly.
        """
        logprobs = self._vocabulary.at(self._logits, tokens) - self._total
        return torch.cat([logprobs[None], *self._top])

    def of_several(self, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of `tokens` [rows, n], float32 [n, rows]."""
        return (self._vocabulary.at_several(self._logits, tokens) - self._total[:, None]).clamp_min(MIN_LOGPROB).T

    def _most_probable(self, count: int, mask_id: int) -> Sequence[Tensor]:
        """The `count` most probable tokens but the mask, and their log-probabilities: float32 [count, rows] each."""
        if not count:
            return ()
        values, ids = self._vocabulary.top(self._logits, count + 1)
        # One more was read than is needed: if the mask token is among them, the ranks after it move up.
        ranks = torch.arange(count, device=ids.device) + (ids == mask_id).cumsum(dim=-1)[:, :count]
        return ids.gather(1, ranks).T.float(), (values.gather(1, ranks) - self._total[:, None]).T


def entropy(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The entropy of each row of `logits` [rows, V] in nats, float32 [rows]."""
    logprobs = vocabulary.log_softmax(logits)
    probabilities = logprobs.exp()
    return -vocabulary.sum(torch.where(probabilities > 0, probabilities * logprobs, 0.0)).float()


@dataclass(frozen=True, slots=True)
class DrawnTokens(DeviceRead):
    """A token of each row, drawn at a temperature with filters, and the entropy at that temperature without filters."""

    temperature: float

    @property
    def width(self) -> int:
        return 2

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:
        _, _, choice = distributions(logits, replace(rows, temperature=self.temperature), mask_id, vocabulary)
        drawn = vocabulary.draw(choice, rows.draws)
        entropies = entropy(logits / self.temperature, vocabulary)
        numbers = torch.stack((drawn.float(), entropies))
        return lambda tokens: numbers  # noqa: ARG005


class BestTokens(DeviceRead):
    """The most probable allowed token of each row."""

    @property
    def width(self) -> int:
        return 1

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:
        allowed = logits.clone()
        noisy = rows.noisy
        vocabulary.bar(allowed, [mask_id])
        if noisy is not None and noisy.banned and noisy.banned_rows:
            vocabulary.bar(allowed[: noisy.banned_rows], noisy.banned)
        best = vocabulary.best(allowed)[1].float()
        return lambda tokens: best[None]  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class MostProbable(DeviceRead):
    """The `count` most probable tokens but the mask, their log-probabilities and, above temperature 0, drawn tokens.

    These are a token drawn with the request's filters, its probability, and a token drawn without those of `barred`.
    Probabilities are before temperature and filters.
    """

    count: int
    temperature: float
    barred: tuple[int, ...]

    @property
    def width(self) -> int:
        return 2 * self.count + (3 if self.temperature else 0)

    def measure(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> NumberFunction:
        logprobs = LogProbabilities(logits, self.count, mask_id, vocabulary)
        drawn = self._draw(logits, rows, mask_id, vocabulary) if self.temperature else []
        return lambda tokens: torch.cat([logprobs.of(tokens)[1:], *drawn])

    def _draw(self, logits: Tensor, rows: RowGroup, mask_id: int, vocabulary: Vocabulary) -> list[Tensor]:
        """The drawn token, its probability, and the token drawn without those of `barred`: one float32 [3, rows]."""
        choice = logits / self.temperature
        vocabulary.bar(choice, [mask_id])

        def draw() -> Tensor:
            filtered = choice
            for read in rows.reads:
                filtered = read.keep(filtered, vocabulary)
            return vocabulary.draw(vocabulary.top_p(vocabulary.top_k(filtered, rows.top_k), rows.top_p), rows.draws)

        drawn = draw()
        probability = vocabulary.at(vocabulary.log_softmax(logits), drawn).exp()
        vocabulary.bar(choice, self.barred)  # the second draw is none of them
        return [torch.stack((drawn.float(), probability.float(), draw().float()))]

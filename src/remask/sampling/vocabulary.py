"""Reductions over the vocabulary, for logits that hold all of its tokens or one rank's part of them."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.sampling import filters

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Gathers a tensor from every rank, stacked in the order of the ranks: [ranks, ...]."""

_BITS = 32  # of a float32


class Vocabulary:
    """Operations on logits [rows, columns], whose columns are tokens; in this class all tokens, [rows, V].

    Only `bar`, `lower` and `greedy` change their arguments.
    """

    def size(self, logits: Tensor) -> int:
        """Number of tokens of the whole vocabulary."""
        return logits.shape[-1]

    def bar(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Set the logits of `tokens` to minus infinity, in place."""
        for token in tokens:  # one by one, as a list of them would be sent to the device, and waited for
            logits[:, token] = -torch.inf

    def lower(self, logits: Tensor, tokens: Tensor, losses: Tensor) -> None:
        """Lower the logit of one token of each row, `tokens` int64 [rows], by `losses` [rows], in place."""
        logits.scatter_add_(1, tokens[:, None], -losses[:, None])

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether logits have a column for each of `tokens` [n], bool [n], and these columns, int64; on the host."""
        return np.ones(len(tokens), dtype=np.bool_), tokens

    def columns(self, values: Tensor) -> Tensor:
        """The columns that these logits have of `values` [..., V]."""
        return values

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of every row, and its token, the first of equal ones: [rows] and int64 [rows]."""
        values, tokens = logits.max(dim=-1)
        return values, tokens

    def greedy(self, logits: Tensor, mask_id: int | None) -> Tensor:
        """The most probable token of every row except the mask token, and its probability, float32 [2, rows].

        The mask token counts in the probabilities, but may be removed from `logits`. With `mask_id` None no token is
        excluded.
        """
        logits = logits.float()
        base, total = self.scale(logits)
        self.bar(logits, [] if mask_id is None else [mask_id])
        best, tokens = self.best(logits)
        return torch.stack((tokens.float(), (best - base).exp() / total))

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest logits of every row, descending, and their int64 tokens, [rows, count] each."""
        values, tokens = logits.topk(count, dim=-1)
        return values, tokens

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The values [rows] that belong to one token a row, `tokens` int64 [rows]."""
        return self.at_several(values, tokens[:, None])[:, 0]

    def at_several(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The values [rows, n] that belong to n tokens a row, `tokens` int64 [rows, n]."""
        return values.gather(1, tokens)

    def one_hot(self, tokens: Tensor, values: Tensor) -> Tensor:
        """1 in the column of the row's token, else 0; of the shape and dtype of `values`."""
        return torch.zeros_like(values).scatter_(1, tokens[:, None], 1.0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of every row, [rows]."""
        return values.sum(dim=-1)

    def scale(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers b and s of every row, [rows] each, such that exp(logit - b) / s are probabilities.

        They are exact to float32 even if logits are large, where the rounding of a log-sum-exp would be felt.
        """
        top = logits.amax(dim=-1)
        return top, (logits - top[:, None]).exp_().sum(dim=-1)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """The log-sum-exp of every row, [rows]."""
        return logits.logsumexp(dim=-1)

    def softmax(self, logits: Tensor) -> Tensor:
        """The probability of each column among all tokens, [rows, columns]."""
        return logits.softmax(dim=-1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """The logarithms of `softmax`, [rows, columns]."""
        return logits.log_softmax(dim=-1)

    def top_k(self, logits: Tensor, count: int | None) -> Tensor:
        """See `filters.top_k`."""
        return filters.top_k(logits, count)

    def top_p(self, logits: Tensor, share: float | None) -> Tensor:
        """See `filters.top_p`."""
        return filters.top_p(logits, share)

    def min_p(self, logits: Tensor, share: float) -> Tensor:
        """Return `logits` [rows, V] with -inf for tokens less probable than `share` > 0 times the most probable one."""
        return logits.masked_fill(logits < self.best(logits)[0][:, None] + math.log(share), -torch.inf)

    def draw(self, logits: Tensor, draws: filters.Draws) -> Tensor:
        """See `filters.draw`."""
        return filters.draw(logits, draws)


class SplitVocabulary(Vocabulary):
    """The tokens of one rank, `token_range` of `total`. Every rank calls the same methods in the same order.

    Ranks exchange a few numbers a row, never all logits: a maximum, a sum, or some of the largest logits of each rank.
    `top_p` keeps all ties with the last token of a nucleus; that of `Vocabulary` keeps only the first of them.
    """

    def __init__(self, token_range: range, total: int, gather: Gather) -> None:
        self.token_range = token_range
        self.total = total
        self.gather = gather

    def size(self, logits: Tensor) -> int:  # noqa: ARG002
        return self.total

    def bar(self, logits: Tensor, tokens: Sequence[int]) -> None:
        super().bar(logits, [token - self.token_range.start for token in tokens if token in self.token_range])

    def lower(self, logits: Tensor, tokens: Tensor, losses: Tensor) -> None:
        columns, is_local = self._local_columns(tokens)
        super().lower(logits, columns, torch.where(is_local, losses, 0.0))

    def places(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        is_local = (tokens >= self.token_range.start) & (tokens < self.token_range.stop)
        return is_local, tokens[is_local] - self.token_range.start

    def columns(self, values: Tensor) -> Tensor:
        return values[..., self.token_range.start : self.token_range.stop]

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = super().best(logits)
        # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
        rank_numbers = torch.stack((values, (tokens + self.token_range.start).float()))
        all_values, all_tokens = self.gather(rank_numbers).unbind(dim=1)
        best, rank = all_values.max(dim=0)
        return best, all_tokens.gather(0, rank[None])[0].long()

    def top(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, tokens = super().top(logits, min(count, len(self.token_range)))
        rank_numbers = torch.stack((values, (tokens + self.token_range.start).float()))
        if rank_numbers.shape[2] < count:  # every rank must send equally many numbers
            missing = count - rank_numbers.shape[2]
            rank_numbers = torch.nn.functional.pad(rank_numbers, (0, missing), value=-torch.inf)
        all_values, all_tokens = self.gather(rank_numbers).permute(1, 2, 0, 3).flatten(2)
        best, index = all_values.topk(count, dim=-1)
        return best, all_tokens.gather(1, index).long()

    def at_several(self, values: Tensor, tokens: Tensor) -> Tensor:
        columns, is_local = self._local_columns(tokens)
        # Merged by a maximum and not by a sum with zeros, as a value may be infinite.
        local_values = torch.where(is_local, super().at_several(values, columns), -torch.inf)
        return self.gather(local_values).amax(dim=0)

    def one_hot(self, tokens: Tensor, values: Tensor) -> Tensor:
        columns, is_local = self._local_columns(tokens)
        return super().one_hot(columns, values) * is_local[:, None]

    def sum(self, values: Tensor) -> Tensor:
        return self.gather(super().sum(values)).sum(dim=0)

    def scale(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Vocabulary`. Ranks exchange one number a row, so it is as exact as `logsumexp`."""
        total = self.logsumexp(logits)
        return total, torch.ones_like(total)

    def logsumexp(self, logits: Tensor) -> Tensor:
        return self.gather(super().logsumexp(logits)).logsumexp(dim=0)

    def softmax(self, logits: Tensor) -> Tensor:
        return self.log_softmax(logits).exp()

    def log_softmax(self, logits: Tensor) -> Tensor:
        return logits - self.logsumexp(logits)[:, None]

    def top_k(self, logits: Tensor, count: int | None) -> Tensor:
        if count is None or count >= self.total:
            return logits
        return logits.masked_fill(logits < self.top(logits, count)[0][:, -1:], -torch.inf)

    def top_p(self, logits: Tensor, share: float | None) -> Tensor:
        """See `Vocabulary`. Finds each row's smallest logit to keep by a binary search over the bits of a float32."""
        if share is None or share >= 1:
            return logits
        probabilities = self.softmax(logits)
        keys = _sortable_bits(logits)
        low = torch.full_like(keys[:, 0], -(2 ** (_BITS - 1)))
        high = torch.full_like(low, 2 ** (_BITS - 1) - 1)
        for _ in range(_BITS):
            middle = (low + high) >> 1
            is_enough = self.sum(probabilities.masked_fill(keys <= middle[:, None], 0)) <= share
            low, high = torch.where(is_enough, low, middle + 1), torch.where(is_enough, middle, high)
        return logits.masked_fill(keys < high[:, None], -torch.inf)

    def draw(self, logits: Tensor, draws: filters.Draws) -> Tensor:
        """See `Vocabulary`. The noise of a token does not depend on its rank."""
        return self.best(filters.add_gumbel_noise(logits, draws, self.token_range.start))[1]

    def _local_columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of `tokens`, and whether this rank has each; tokens of other ranks get some valid column."""
        is_local = (tokens >= self.token_range.start) & (tokens < self.token_range.stop)
        return (tokens - self.token_range.start).clamp(0, len(self.token_range) - 1), is_local


def _sortable_bits(logits: Tensor) -> Tensor:
    """Return int64 numbers in the order of `logits`, float32: their bits as integers, mirrored for negative ones."""
    bits = logits.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(2 ** (_BITS - 1)) - bits - 1, bits)


WHOLE = Vocabulary()

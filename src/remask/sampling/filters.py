"""Top-p, top-k and reproducible draws over rows of logits. Nothing here changes its inputs.

Random numbers come from a counter, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
a number is a function of a key and of its own counter, so it is the same on every device, in every batch, and in any
part of a vocabulary that is computed alone. All is integer arithmetic of PyTorch; no generator has a state.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # increments of the key from round to round
_WORD = 0xFFFFFFFF  # the lower 32 bits
_COLUMNS = 4  # columns whose numbers are the four words of one counter
_MANTISSA = 23  # bits of a number: with one half added, float32 holds it exactly


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter of four words: int64 tensors of one shape, values from 0 to 2^32 - 1."""
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # int64 holds all 64 bits of a product; the sign is its highest bit.
        a_product, c_product = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((c_product >> 32) & _WORD) ^ b ^ first, c_product & _WORD
        c, d = ((a_product >> 32) & _WORD) ^ d ^ second, a_product & _WORD
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return a, b, c, d


def uniform(seed: int, step: int, rows: Tensor, columns: range) -> Tensor:
    """Random numbers between 0 and 1, both excluded, float32 [N, columns], for `rows` int64 [N] from 0 to 2^32 - 1.

    The number in column c of row r depends on r, c and the lower 64 bits of `seed` and `step` alone.
    """
    groups = torch.arange(columns.start // _COLUMNS, -(-columns.stop // _COLUMNS), device=rows.device)
    group = groups.expand(len(rows), len(groups))
    row = rows[:, None].expand(len(rows), len(groups))
    low, high = torch.full_like(row, step & _WORD), torch.full_like(row, (step >> 32) & _WORD)
    words = philox((group, row, low, high), (seed & _WORD, (seed >> 32) & _WORD))
    first = columns.start % _COLUMNS
    bits = torch.stack(words, dim=-1).flatten(1)[:, first : first + len(columns)]
    return ((bits >> (32 - _MANTISSA)).float() + 0.5) * 2.0**-_MANTISSA  # the half keeps 0 and 1 out


def top_p(logits: Tensor, share: float | None) -> Tensor:
    """Return `logits` [rows, V] with -inf outside of the smallest set of most probable tokens that sums to `share`."""
    if share is None or share >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    preceding = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    preceding[:, 0] = 0
    is_dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, preceding > share)
    return logits.masked_fill(is_dropped, -torch.inf)


def top_k(logits: Tensor, count: int | None) -> Tensor:
    """Return `logits` [rows, V] with -inf but for the `count` most probable tokens, and ties with the last of these."""
    if count is None or count >= logits.shape[-1]:
        return logits
    kth = logits.topk(count, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


@dataclass(frozen=True, slots=True)
class Draws:
    """The seed, step and row numbers on which the draws of some rows depend.

    Attributes:
        seed, step: the request's, whole numbers from 0 on.
        rows: the position of each row, int64 [rows], on the host or on the device; None: rows are numbered from 0 on.
    """

    seed: int
    step: int = 0
    rows: NDArray[np.int64] | Tensor | None = None

    def uniform(self, logits: Tensor, first: int = 0) -> Tensor:
        """Random numbers between 0 and 1, float32 of the shape of `logits` [rows, columns].

        `first` is the token of the first column.
        """
        count, columns = logits.shape
        rows = torch.arange(count, device=logits.device) if self.rows is None else self.rows
        if not isinstance(rows, Tensor):
            rows = send(rows, logits.device)
        return uniform(self.seed, self.step, rows, range(first, first + columns))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token of every row from the softmax of `logits`, int64 [rows], with `draws` as the only randomness."""
    return add_gumbel_noise(logits, draws).argmax(dim=-1)


def add_gumbel_noise(logits: Tensor, draws: Draws, first: int = 0) -> Tensor:
    """Logits plus Gumbel noise, whose argmax is a draw from their softmax, [rows, columns]; `first` as in `gumbel`."""
    return logits + gumbel(logits, draws, first)


def gumbel(logits: Tensor, draws: Draws, first: int = 0) -> Tensor:
    """Gumbel noise, float32 of the shape of `logits` [rows, columns]. `first` is the token of the first column."""
    return draws.uniform(logits, first).log_().neg_().log_().neg_()  # -log(-log u) of a uniform u

"""Random numbers from a counter: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

A number is a function of a key and of its own counter, so it is the same on every device, in every batch, and in any
part of a vocabulary that is computed alone. All is integer arithmetic of PyTorch; no generator has a state.
"""

from typing import TypeAlias

import torch
from torch import Tensor

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the key grows by from round to round
_WORD = 0xFFFFFFFF


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter of four words: int64 tensors of one shape, values from 0 to 2^32 - 1."""
    a, b, c, d = counter
    first, second = key
    for _ in range(_ROUNDS):
        # Of a product of 64 bits, int64 keeps all: a sign is no more than the highest bit.
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((high >> 32) & _WORD) ^ b ^ first, high & _WORD
        c, d = ((low >> 32) & _WORD) ^ d ^ second, low & _WORD
        first, second = (first + _WEYL[0]) & _WORD, (second + _WEYL[1]) & _WORD
    return a, b, c, d


def uniform(seed: int, step: int, rows: Tensor, columns: range) -> Tensor:
    """Numbers between 0 and 1, neither included, float32 [N, columns], for `rows` int64 [N] from 0 to 2^32 - 1.

    The number in column c of row r depends on `seed` (its lower 64 bits), `step` (the same), r and c alone.
    """
    groups = torch.arange(columns.start // 4, -(-columns.stop // 4), device=rows.device)
    column, row = groups.expand(len(rows), len(groups)), rows[:, None].expand(len(rows), len(groups))
    low, high = torch.full_like(row, step & _WORD), torch.full_like(row, (step >> 32) & _WORD)
    words = philox((column, row, low, high), (seed & _WORD, (seed >> 32) & _WORD))
    first = columns.start % 4
    drawn = torch.stack(words, dim=-1).flatten(1)[:, first : first + len(columns)]
    # 23 bits and a half: exact in float32, and never 0 or 1.
    return ((drawn >> 9).float() + 0.5) * 2.0**-23

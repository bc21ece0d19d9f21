"""The tokens of a canvas whose attention shows how far its cache has drifted."""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.core.plan import Similarity


@dataclass(slots=True)
class Tracker:
    """What one canvas tracks between passes, and what the present pass has found so far.

    A pass may be repeated, and then finds keys that it has written itself. What it had compared by then stands.

    Attributes:
        tokens: canvas positions that any layer tracks, ascending, int64 [N]; empty before the first pass.
        moved: drift in each layer that the present pass has compared.
        reference: the last layer that the present pass began, and the attention of the tracked tokens there before it,
            as `attention_rows` returns it. None in a first pass.
    """

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    moved: dict[int, float] = field(default_factory=dict)
    reference: tuple[int, Tensor] | None = None

    def done(self, tokens: NDArray[np.int64]) -> None:
        """The pass has run, and its layers came to track `tokens`, in any order and more than once."""
        self.tokens = np.unique(tokens)
        self.moved, self.reference = {}, None


def attention_rows(q: Tensor, k: Tensor) -> Tensor:
    """Logarithms of the attention of `q` [N, heads, Dh] over `k` [T, kv_heads, Dh]: float32 [heads, N, T]."""
    rows, heads, dim = q.shape
    groups = k.shape[1]
    # Query heads that share a key head are treated as more rows of one head.
    q = q.view(rows, groups, heads // groups, dim).permute(1, 0, 2, 3).reshape(groups, -1, dim) * (1 / math.sqrt(dim))
    attention = (q @ k.permute(1, 2, 0)).float().log_softmax(-1)
    return attention.view(groups, rows, heads // groups, -1).transpose(1, 2).reshape(heads, rows, -1)


def drift(old: Tensor, new: Tensor, similarity: Similarity) -> Tensor:
    """One minus the mean cosine similarity of two results of `attention_rows`; 0 exactly where they are equal.

    "heads" compares at each key what the heads give to it, and takes the mean over keys and tokens. "keys" compares a
    token's mean over heads along the keys, and takes the mean over tokens.
    """
    if similarity == "heads":
        old, new, dim = _scaled(old), _scaled(new), 0
    else:
        old, new, dim = old.exp().mean(0), new.exp().mean(0), -1
    # One minus a cosine near 1 loses its digits; the difference of the unit vectors keeps them.
    apart = _unit(old, dim) - _unit(new, dim)
    return apart.square().sum(dim).mean() / 2


def _scaled(rows: Tensor) -> Tensor:
    """Probabilities over the largest of any head at each key, where even the least ones keep their direction."""
    return (rows - rows.amax(0, keepdim=True)).exp()


def _unit(rows: Tensor, dim: int) -> Tensor:
    """Vectors along `dim`, none of which is zero, at length 1."""
    # A norm along the heads takes PyTorch ten times as long on a CPU.
    return rows / rows.square().sum(dim, keepdim=True).sqrt()

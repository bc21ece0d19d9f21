"""The tokens of a canvas whose attention shows how far its cache has drifted."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor


@dataclass(slots=True)
class Tracker:
    """One token in every layer but the last, and its attention at the end of the last pass.

    Attributes:
        tokens: canvas positions, int64 [layers - 1]; -1 before the first pass.
        rows: attention probabilities over the canvas, the mean over heads, float32 [layers - 1, T].
    """

    tokens: NDArray[np.int64]
    rows: Tensor

    @classmethod
    def of(cls, layers: int, length: int, device: torch.device) -> "Tracker":
        """The tracker of a canvas of `length` positions before its first pass."""
        rows = torch.empty((layers - 1, length), dtype=torch.float32, device=device)
        return cls(np.full(layers - 1, -1, dtype=np.int64), rows)


def attention_rows(q: Tensor, k: Tensor) -> Tensor:
    """Attention probabilities of `q` [N, heads, Dh] over `k` [T, kv_heads, Dh], the mean over heads: float32 [N, T]."""
    rows, heads, dim = q.shape
    groups = k.shape[1]
    # Query heads that share a key head are treated as more rows of one head.
    q = q.view(rows, groups, heads // groups, dim).permute(1, 0, 2, 3).reshape(groups, -1, dim) * (1 / math.sqrt(dim))
    attention: Tensor = (q @ k.permute(1, 2, 0)).softmax(-1, dtype=torch.float32)
    return attention.view(groups, rows, heads // groups, -1).mean((0, 2))


def drift(old: Tensor, new: Tensor) -> Tensor:
    """One minus the cosine similarity of two rows of probabilities [T]; 0 exactly where they are equal."""
    # One minus a cosine near 1 loses its digits; the difference of the unit vectors keeps them.
    return (F.normalize(old, dim=0) - F.normalize(new, dim=0)).square().sum() / 2

"""Top-p, top-k and reproducible draws over rows of logits. Nothing here changes its inputs."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.sampling.philox import uniform


def top_p(logits: Tensor, share: float | None) -> Tensor:
    """Keep the smallest set of tokens of total probability `share`, the token that crosses it included; [rows, V]."""
    if share is None or share >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, before > share)
    return logits.masked_fill(dropped, -torch.inf)


def top_k(logits: Tensor, count: int | None) -> Tensor:
    """Keep the `count` most probable tokens, and ties with the last of them; [rows, V]."""
    if count is None or count >= logits.shape[-1]:
        return logits
    kth = logits.topk(count, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


@dataclass(frozen=True, slots=True)
class Draws:
    """What the draws of some rows depend on: the request's seed, its step, and a number of each row.

    Attributes:
        seed, step: whole numbers from 0 on.
        rows: the position of each row, int64 [rows], on the host or on the device; None: their number, from 0 on.
    """

    seed: int
    step: int = 0
    rows: NDArray[np.int64] | Tensor | None = None

    def uniform(self, like: Tensor, first: int = 0) -> Tensor:
        """Numbers between 0 and 1, one for each of `like` [rows, columns], float32.

        `first` is the token of the first column.
        """
        count, columns = like.shape
        rows = torch.arange(count, device=like.device) if self.rows is None else self.rows
        if not isinstance(rows, Tensor):
            rows = send(rows, like.device)
        return uniform(self.seed, self.step, rows, range(first, first + columns))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a token of every row from the softmax of `logits`, int64 [rows], with `draws` as the only randomness."""
    return noised(logits, draws).argmax(dim=-1)


def noised(logits: Tensor, draws: Draws, first: int = 0) -> Tensor:
    """Logits with the noise whose argmax draws from their softmax, [rows, columns]; `first` as in `Draws.uniform`."""
    return logits + gumbel(logits, draws, first)


def gumbel(like: Tensor, draws: Draws, first: int = 0) -> Tensor:
    """Gumbel noise of the shape of `like` [rows, columns]; `first` as in `Draws.uniform`."""
    return draws.uniform(like, first).log_().neg_().log_().neg_()  # -log(-log u) of a uniform u

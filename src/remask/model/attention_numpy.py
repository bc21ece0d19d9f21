"""Attention by NumPy in float64, unit by unit: slow, and the reference for all other executors."""

import math
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.model.attention import Sink
from remask.model.work_list import WorkList

Doubles: TypeAlias = NDArray[np.float64]


class NumpyAttention:
    """Softmax of scores in float64. It runs on the host: K and V on another device are copied at each call.

    Args:
        cap: scores s become cap * tanh(s / cap).
    """

    def __init__(self, cap: float | None = None) -> None:
        self.cap = cap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """See `Attention`."""
        queries, slots = _doubles(q), torch.from_numpy(work.slots).to(k.device)
        keys, values = (_doubles(kept[slots.long()]) for kept in (k, v))
        outputs = np.zeros((work.outputs, *queries.shape[1:]))
        sums = np.full((work.outputs, queries.shape[1]), -np.inf)
        for row, rows, slot, count, first in work.units.tolist():
            reach = np.full(rows, count) if work.reach is None else work.reach[first : first + rows]
            part = slice(slot, slot + count)
            partial = self._partial(queries[row : row + rows], keys[part], values[part], reach)
            outputs[first : first + rows], sums[first : first + rows] = partial
        owners = work.owners
        if sink is not None:
            key, value = (_doubles(one)[None] for one in sink)
            own, score = self._partial(queries, key, value, np.ones(len(queries), dtype=np.int32))
            outputs, sums = np.concatenate([outputs, own]), np.concatenate([sums, score])
            owners = np.concatenate([owners, np.arange(len(queries), dtype=np.int32)])
        return torch.from_numpy(_merged(outputs, sums, owners, len(queries))).to(q.device, q.dtype).flatten(1)

    def _partial(self, q: Doubles, k: Doubles, v: Doubles, reach: NDArray[np.int32]) -> tuple[Doubles, Doubles]:
        """Attention of rows [n, heads, Dh] to the first `reach` [n] of m slots, and log-sum-exp [n, heads].

        There may be no rows, as where all of a layer are held.
        """
        n, heads, dim = q.shape
        groups = k.shape[1]
        each = heads // groups
        # [kv heads, n * query heads of the kv head, Dh]
        rows = q.reshape(n, groups, each, dim).transpose(1, 0, 2, 3).reshape(groups, n * each, dim)
        scores = rows @ k.transpose(1, 2, 0) / math.sqrt(dim)
        if self.cap is not None:
            scores = self.cap * np.tanh(scores / self.cap)
        unseen = np.arange(len(k)) >= np.repeat(reach, each)[:, None]
        scores[:, unseen] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        top[np.isneginf(top)] = 0  # of a row that sees none of these slots
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            sums = top + np.log(total)
        out = weights @ v.transpose(1, 0, 2) / np.where(total == 0, 1, total)
        out, sums = (
            part.reshape(groups, n, each, width).transpose(1, 0, 2, 3).reshape(n, heads, width)
            for part, width in ((out, v.shape[-1]), (sums, 1))
        )
        return out, sums[..., 0]


def _merged(outputs: Doubles, sums: Doubles, owners: NDArray[np.int32], rows: int) -> Doubles:
    """Partial results [P, heads, Dh] with log-sum-exps [P, heads] as one result a row, [rows, heads, Dh]."""
    top = np.full((rows, sums.shape[1]), -np.inf)
    np.maximum.at(top, owners, sums)
    shares = np.exp(sums - top[owners])[..., None]
    out, total = np.zeros((rows, *outputs.shape[1:])), np.zeros((rows, sums.shape[1], 1))
    np.add.at(out, owners, shares * outputs)
    np.add.at(total, owners, shares)
    return out / total


def _doubles(x: Tensor) -> Doubles:
    return x.detach().to("cpu", torch.float64).numpy()

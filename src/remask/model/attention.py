"""Attention over K/V slots. A work list says which slots a row sees; there is no mask of the whole batch."""

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from remask.model.stage import Neighbours
from remask.model.work_list import Ints, WorkList

Sink: TypeAlias = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of rows to the slots that `work` names. It neither changes nor keeps its inputs."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """Returns [N, heads * Dh] from `q` [N, heads, Dh] and one layer's `k` and `v` [slots, kv_heads, Dh].

        `sink` is a key and a value, [kv_heads, Dh] each. Every row attends to it and to its slots.
        """


@dataclass(frozen=True, slots=True)
class ListSize:
    """The size of a work list, on which its launches depend. A list fits in any larger size."""

    rows: int  # of the queries
    units: int  # programs
    slots: int  # entries of the list of slots
    outputs: int  # partial results
    merged: bool  # whether they are merged: a row has several of them, or one and a sink

    def rounded_up(self, rows: int) -> "ListSize":
        """The same for `rows` rows, with all else a power of two, so that few sizes serve many lists."""
        units, slots, outputs = (1 << (number - 1).bit_length() for number in (self.units, self.slots, self.outputs))
        return ListSize(rows, units, slots, outputs, self.merged)

    @property
    def lengths(self) -> list[int]:
        """Of the arrays of integers that describe a list of this size.

        They are units [5 units], slots [slots], reach and skip [outputs], the numbers of partial results in the order
        of their rows [outputs], and where each row's begin there [rows + 1]; these two are 0 unless `merged`.
        """
        return [5 * self.units, self.slots, self.outputs, self.outputs, self.outputs, self.rows + 1]


@runtime_checkable
class SizedAttention(Attention, Protocol):
    """Attention that launches the same for all lists of one size, so that a device graph can hold it.

    `heads` are those of queries, and `groups` those of K and V.
    """

    def size(self, work: WorkList, heads: int, groups: int, *, sink: bool = False) -> ListSize:
        """The size of `work`, for rows with a `sink` or without one."""

    def numbers(self, work: WorkList, heads: int, groups: int, size: ListSize) -> Ints:
        """`work` as it is read on the device, int32: arrays of `size.lengths`, one after the other."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, size: ListSize, sink: Sink | None = None) -> Tensor:
        """As a call, of the list that stands in `numbers`. Rows of `q` [size.rows, ...] in no unit get any result.

        Raises `ValueError` where there is a sink of which `size` was not told.
        """


Doubles: TypeAlias = NDArray[np.float64]


class NumpyAttention:
    """Softmax of scores in float64; scores s become `cap` * tanh(s / `cap`) first.

    It runs on the host: K and V on another device are copied at each call.
    """

    def __init__(self, cap: float | None = None) -> None:
        self.cap = cap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        queries, slots = _doubles(q), torch.from_numpy(work.slots).to(k.device).long()
        keys, values = _doubles(k[slots]), _doubles(v[slots])
        outputs = np.zeros((work.outputs, *queries.shape[1:]))
        sums = np.full((work.outputs, queries.shape[1]), -np.inf)
        for row, rows, slot, count, first in work.units.tolist():
            reach = np.full(rows, count) if work.reach is None else work.reach[first : first + rows]
            skip = np.zeros_like(reach) if work.skip is None else work.skip[first : first + rows]
            part = slice(slot, slot + count)
            those = slice(first, first + rows)
            outputs[those], sums[those] = self._partial(
                queries[row : row + rows], keys[part], values[part], reach, skip
            )
        owners = work.owners
        if sink is not None:
            key, value = (_doubles(vector)[None] for vector in sink)
            ones = np.ones(len(queries), dtype=np.int32)
            partial, score = self._partial(queries, key, value, ones, ones - 1)
            outputs, sums = np.concatenate([outputs, partial]), np.concatenate([sums, score])
            owners = np.concatenate([owners, np.arange(len(queries), dtype=np.int32)])
        return torch.from_numpy(_merged(outputs, sums, owners, len(queries))).to(q.device, q.dtype).flatten(1)

    def _partial(self, q: Doubles, k: Doubles, v: Doubles, reach: Ints, skip: Ints) -> tuple[Doubles, Doubles]:
        """Attention of rows [n, heads, Dh] to the slots `skip` .. `reach` - 1 of m, [n], and log-sum-exp [n, heads].

        There may be no rows, as where all of a layer are held.
        """
        n, heads, dim = q.shape
        groups = k.shape[1]
        share = heads // groups
        # [kv heads, n * query heads of the kv head, Dh]
        rows = q.reshape(n, groups, share, dim).transpose(1, 0, 2, 3).reshape(groups, n * share, dim)
        scores = rows @ k.transpose(1, 2, 0) / math.sqrt(dim)
        if self.cap is not None:
            scores = self.cap * np.tanh(scores / self.cap)
        place = np.arange(len(k))
        unseen = (place >= np.repeat(reach, share)[:, None]) | (place < np.repeat(skip, share)[:, None])
        scores[:, unseen] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        top[np.isneginf(top)] = 0  # of a row that sees none of these slots
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            sums = top + np.log(total)
        out = weights @ v.transpose(1, 0, 2) / np.where(total == 0, 1, total)
        out, sums = (
            part.reshape(groups, n, share, width).transpose(1, 0, 2, 3).reshape(n, heads, width)
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


ROWS = 256  # whose keys and values are copied at a time


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, near: Neighbours, reach: int, sink: Sink | None = None, cap: float | None = None
) -> Tensor:
    """Attention [N, heads * Dh] of rows `q` [N, heads, Dh] to `reach` positions to each side. Their own K/V are there.

    `k`, `v`, `sink` and `cap` are as of `Attention`, which is for rows that the host knows. The host does not wait.
    """
    wide, groups, dim = torch.promote_types(q.dtype, torch.float32), k.shape[1], q.shape[2]
    offsets, parts = torch.arange(-reach, reach + 1, device=q.device), [q[:0].flatten(1)]
    for rows, places in zip(torch.split(q, ROWS), torch.split(near.places, ROWS, 1), strict=True):
        centre, first, end = places[:, :, None]
        at = centre + offsets
        seen = (at >= first) & (at < end)
        # What a row does not see may be unwritten, so its own slot is read instead.
        slots = near.slots[torch.where(seen, at, centre)]
        keys, values = k[slots].to(wide), v[slots].to(wide)
        if sink is not None:
            seen = F.pad(seen, (0, 1), value=True)
            alike = (vector.to(wide).expand(len(rows), 1, -1, -1) for vector in sink)
            keys, values = (torch.cat(pair, 1) for pair in zip((keys, values), alike, strict=True))
        queries = rows.to(wide).view(len(rows), groups, -1, dim) * (1 / math.sqrt(dim))
        scores = torch.einsum("ngsd,nwgd->ngsw", queries, keys)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        parts.append(torch.einsum("ngsw,nwgd->ngsd", weights, values).flatten(1).to(q.dtype))
    return torch.cat(parts)

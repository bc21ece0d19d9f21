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
        """Return [N, heads * Dh] for `q` [N, heads, Dh] and one layer's `k` and `v` [slots, kv_heads, Dh].

        `sink` is a key and a value, [kv_heads, Dh] each. Every row attends to it and to its slots.
        """


@dataclass(frozen=True, slots=True)
class ListSize:
    """The size of a work list, on which its launches depend. A list fits in any larger size."""

    row_count: int  # queries
    unit_count: int  # programs
    slot_count: int  # entries of the list of slots
    output_count: int  # partial results
    merges: bool  # partial results are merged: a row has several of them, or one and a sink

    def round_up(self, rows: int) -> "ListSize":
        """This size for `rows` rows, with all other counts rounded up to powers of two: few sizes serve many lists."""
        counts = (self.unit_count, self.slot_count, self.output_count)
        units, slots, outputs = (1 << (count - 1).bit_length() for count in counts)
        return ListSize(rows, units, slots, outputs, self.merges)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the arrays of integers that describe a list of this size.

        The arrays are units [5 units], slots [slots], reach and skip [outputs] each, the numbers of partial results in
        the order of their rows [outputs], and the index there of each row's first [rows + 1]. The last two are zeros
        unless `merges`.
        """
        return [5 * self.unit_count, self.slot_count, *[self.output_count] * 3, self.row_count + 1]


@runtime_checkable
class SizedAttention(Attention, Protocol):
    """Attention that launches the same kernels for all lists of one size, so that a device graph can hold it.

    There are `heads` heads of queries, and `groups` heads of K and V.
    """

    def size(self, work: WorkList, heads: int, groups: int, *, sink: bool = False) -> ListSize:
        """The size of `work` for queries with or without a `sink`."""

    def pack(self, work: WorkList, heads: int, groups: int, size: ListSize) -> Ints:
        """`work` as the device reads it, int32 [sum of `size.lengths`]: the arrays one after the other."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, packed: Tensor, size: ListSize, sink: Sink | None = None) -> Tensor:
        """Attention as by a call, with a `packed` list. Rows of `q` [size.row_count, ...] in no unit are undefined.

        Raises `ValueError` if there is a sink and `size` was computed without one.
        """


Doubles: TypeAlias = NDArray[np.float64]


class NumpyAttention:
    """Attention in float64 on the host, to which K and V are copied. Scores s become `cap` * tanh(s / `cap`)."""

    def __init__(self, cap: float | None = None) -> None:
        self.cap = cap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """See `Attention`. The host waits for the device."""
        queries, slots = _to_float64(q), torch.from_numpy(work.slots).to(k.device).long()
        keys, values = _to_float64(k[slots]), _to_float64(v[slots])
        outputs = np.zeros((work.output_count, *queries.shape[1:]))
        log_sums = np.full((work.output_count, queries.shape[1]), -np.inf)
        for first_row, rows, first_slot, count, first_output in work.units.tolist():
            unit_queries = queries[first_row : first_row + rows]
            unit_slots, results = slice(first_slot, first_slot + count), slice(first_output, first_output + rows)
            reach = np.full(rows, count) if work.reach is None else work.reach[results]
            skip = np.zeros_like(reach) if work.skip is None else work.skip[results]
            partial = self._partial(unit_queries, keys[unit_slots], values[unit_slots], reach, skip)
            outputs[results], log_sums[results] = partial
        owners = work.owners
        if sink is not None:
            key, value = (_to_float64(vector)[None] for vector in sink)
            ones = np.ones(len(queries), dtype=np.int32)
            sink_output, score = self._partial(queries, key, value, reach=ones, skip=ones - 1)
            outputs, log_sums = np.concatenate([outputs, sink_output]), np.concatenate([log_sums, score])
            owners = np.concatenate([owners, np.arange(len(queries), dtype=np.int32)])
        return torch.from_numpy(_merge(outputs, log_sums, owners, len(queries))).to(q.device, q.dtype).flatten(1)

    def _partial(self, q: Doubles, k: Doubles, v: Doubles, reach: Ints, skip: Ints) -> tuple[Doubles, Doubles]:
        """Attention of n rows, row i to the slots `skip[i]` .. `reach[i]` - 1: [n, heads, Dh], log-sum-exps [n, heads].

        n may be 0, as in a layer in which all rows are held.
        """
        n, heads, dim = q.shape
        groups = k.shape[1]
        group_size = heads // groups
        # [kv heads, n * query heads of the kv head, Dh]
        rows = q.reshape(n, groups, group_size, dim).transpose(1, 0, 2, 3).reshape(groups, n * group_size, dim)
        scores = rows @ k.transpose(1, 2, 0) / math.sqrt(dim)
        if self.cap is not None:
            scores = self.cap * np.tanh(scores / self.cap)
        index = np.arange(len(k))
        unseen = (index >= np.repeat(reach, group_size)[:, None]) | (index < np.repeat(skip, group_size)[:, None])
        scores[:, unseen] = -np.inf
        maximum = scores.max(axis=-1, keepdims=True)
        maximum[np.isneginf(maximum)] = 0  # of a row that sees none of the slots
        weights = np.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            log_sums = maximum + np.log(total)
        out = weights @ v.transpose(1, 0, 2) / np.where(total == 0, 1, total)
        out, log_sums = (
            by_group.reshape(groups, n, group_size, width).transpose(1, 0, 2, 3).reshape(n, heads, width)
            for by_group, width in ((out, v.shape[-1]), (log_sums, 1))
        )
        return out, log_sums[..., 0]


def _merge(outputs: Doubles, log_sums: Doubles, owners: Ints, rows: int) -> Doubles:
    """Merge partial results [P, heads, Dh] with log-sum-exps [P, heads] into one result a row, [rows, heads, Dh].

    `owners` [P] are their rows.
    """
    maximum = np.full((rows, log_sums.shape[1]), -np.inf)
    np.maximum.at(maximum, owners, log_sums)
    weights = np.exp(log_sums - maximum[owners])[..., None]
    out, total = np.zeros((rows, *outputs.shape[1:])), np.zeros((rows, log_sums.shape[1], 1))
    np.add.at(out, owners, weights * outputs)
    np.add.at(total, owners, weights)
    return out / total


def _to_float64(x: Tensor) -> Doubles:
    return x.detach().to("cpu", torch.float64).numpy()


ROWS = 256  # rows whose keys and values `attend_sliding` copies at a time


def attend_sliding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    neighbours: Neighbours,
    reach: int,
    sink: Sink | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention [N, heads * Dh] of `q` [N, heads, Dh] to `reach` positions to each side, and to the row's own.

    It is for rows that only the device knows. `k`, `v` and `sink` are those of `Attention`, and scores s become
    `cap` * tanh(s / `cap`). K and V of the rows themselves must have been written. The host does not wait.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    (heads, dim), groups = q.shape[1:], k.shape[1]
    offsets = torch.arange(-reach, reach + 1, device=q.device)
    parts = []
    for rows, places in zip(torch.split(q, ROWS), torch.split(neighbours.places, ROWS, 1), strict=True):
        centre, first, end = places[:, :, None]
        index = centre + offsets
        visible = (index >= first) & (index < end)
        # Slots that a row does not see may be unwritten, so its own is read instead.
        slots = neighbours.slots[torch.where(visible, index, centre)]
        keys, values = k[slots].to(dtype), v[slots].to(dtype)
        if sink is not None:
            visible = F.pad(visible, (0, 1), value=True)
            sink_key, sink_value = (vector.to(dtype).expand(len(rows), 1, -1, -1) for vector in sink)
            keys, values = torch.cat((keys, sink_key), 1), torch.cat((values, sink_value), 1)
        queries = rows.to(dtype).view(len(rows), groups, heads // groups, dim) * (1 / math.sqrt(dim))
        scores = torch.einsum("ngsd,nwgd->ngsw", queries, keys)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
        parts.append(torch.einsum("ngsw,nwgd->ngsd", weights, values).flatten(1).to(q.dtype))
    return torch.cat(parts)

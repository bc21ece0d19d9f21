"""Attention by PyTorch operations, on any device, and units of work lists as slices and index tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.machine.transfers import send
from remask.model.attention import Sink
from remask.model.sizes import GPU_SCORES
from remask.model.work_list import WorkList, run_edges

# Numbers of K that a unit has at most to be joined with others, and that are copied for one call: more take new memory
# pages in every call, and cost more than the calls that they spare.
SMALL, COPIED = 2**15, 3 * 2**16


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that attend to slots; or several such units, with equally many rows and slots each, as one (`joined`)."""

    rows: slice | Tensor  # the rows, one unit after the other: side by side, or int64 numbers
    keys: slice | Tensor  # the slots, in the same order: a run of them, which is read in place, or int64 slots
    count: int  # the number of slots of a unit
    reach: Tensor | None  # how many of the slots each row sees, int64 [rows]; None: all
    skip: Tensor | None  # how many of these, the first ones, it does not see, int64 [rows]; None: none
    alone: bool  # whether its rows are in no other unit
    turn: int  # the most units before it that any of its rows is in
    number: int = 1  # how many units it is

    def unseen(self, start: int, count: int, rows: slice = slice(None)) -> Tensor | None:
        """Which of `count` slots from `start` on each of `rows` does not see, bool [rows, count]; None: none."""
        unseen = None
        for limit, compare in ((self.reach, torch.ge), (self.skip, torch.lt)):
            if limit is not None:
                beyond = compare(torch.arange(start, start + count, device=limit.device), limit[rows, None])
                unseen = beyond if unseen is None else unseen | beyond
        return unseen


def units_of(work: WorkList, device: torch.device) -> tuple[Unit, ...]:
    """The units of `work` in their order, with index tensors on `device`. The host does not wait."""
    units_of_row = np.bincount(work.owners)
    turns = np.zeros(len(units_of_row), dtype=np.int64)
    units = []
    for row, rows, slot, count, output in work.units.tolist():
        slots = work.slots[slot : slot + count]
        turn = int(turns[row : row + rows].max(initial=0))
        turns[row : row + rows] = turn + 1
        in_place = len(run_edges(slots)) == 2
        reach, skip = (None if limit is None else limit[output : output + rows] for limit in (work.reach, work.skip))
        units.append(
            Unit(
                rows=slice(row, row + rows),
                keys=slice(int(slots[0]), int(slots[-1]) + 1) if in_place else send(slots.astype(np.int64), device),
                count=count,
                reach=None if reach is None or (reach == count).all() else send(reach.astype(np.int64), device),
                skip=None if skip is None or not skip.any() else send(skip.astype(np.int64), device),
                alone=bool((units_of_row[row : row + rows] == 1).all()),
                turn=turn,
            )
        )
    return tuple(units)


def joined(units: Sequence[Unit], width: int, device: torch.device) -> tuple[Unit, ...]:
    """`units` with small ones joined that are alike, so that they are one call; `width` numbers are a slot's in K.

    A row's units stay in their order. Slots of joined units are copied before they are read: a call takes longer than a
    copy of few slots.
    """
    alike: dict[tuple[int, ...], list[Unit]] = {}
    for place, unit in enumerate(units):
        key: tuple[int, ...] = (unit.turn, -1, place)
        if unit.reach is unit.skip is None and isinstance(unit.rows, slice) and unit.count * width <= SMALL:
            key = (unit.turn, unit.rows.stop - unit.rows.start, unit.count, unit.alone)
        alike.setdefault(key, []).append(unit)
    parts = []
    for those in alike.values():
        most = max(1, COPIED // (those[0].count * width))
        parts += [_joined(those[at : at + most], device) for at in range(0, len(those), most)]
    return tuple(sorted(parts, key=lambda unit: unit.turn))


def _joined(units: Sequence[Unit], device: torch.device) -> Unit:
    """`units` that are alike as one."""
    first, *others = units
    if not others:
        return first
    rows = [unit.rows for unit in units if isinstance(unit.rows, slice)]
    together: slice | Tensor = slice(rows[0].start, rows[-1].stop)
    if any(row.stop != after.start for row, after in pairwise(rows)):
        together = send(np.concatenate([np.arange(row.start, row.stop) for row in rows]), device)
    slots = [torch.arange(key.start, key.stop) if isinstance(key := unit.keys, slice) else key for unit in units]
    return replace(first, rows=together, keys=torch.cat([key.to(device) for key in slots]), number=len(units))


# Scattered slots are read in place, run by run, where these are so long on average. Shorter ones are gathered, as every
# run is a call of its own.
RUN = 64
# Slots whose K and V are copied at a time where they are scattered, or are made float32.
PIECE = 1024
# The scores of a tile: so many stay in a cache, take longer than the calls for them, and keep a GPU busy. A tile has at
# most so many rows, and at least so many slots.
CPU_SCORES, TILE_ROWS, TILE_SLOTS = 2**19, 1024, 256
# Up to this cap, the exponential of a score is neither infinite nor lost in float32, so no maximum need be taken off.
SMALL_CAP = 40.0


class TorchAttention:
    """Attention of each unit in place, and a merge of the results where rows stand in several units.

    What PyTorch's fused attention can compute, it computes: units whose rows stand in no other one, without a cap and
    without a sink; nothing if not `fused`. Where results are merged, they are float32 whatever the dtype of the inputs,
    so that each row is rounded once. Scores s become `cap` * tanh(s / `cap`). They exist a tile at a time; nothing of
    the size of rows times slots is kept.
    """

    def __init__(self, cap: float | None = None, fused: bool = True) -> None:
        self.cap, self.fused = cap, fused and cap is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        fused = self.fused and sink is None
        width = k.shape[1] * k.shape[2]
        units = work.once(_in_place, q.device, width if fused and q.device.type == "cpu" else None)
        if fused and len(units) == 1 and units[0].alone and isinstance(units[0].rows, slice):
            return _fused(q, k, v, units[0]).flatten(1)
        whole = [fused and unit.alone for unit in units]
        if all(whole):
            out = q.new_empty(q.shape)
            for unit in units:
                out[unit.rows] = _fused(q[unit.rows], k, v, unit)
            return out.flatten(1)
        precise = q.to(torch.promote_types(q.dtype, torch.float32))
        out, sums = precise.new_zeros(q.shape), precise.new_full(q.shape[:2], _nothing(precise))
        for unit, alone in zip(units, whole, strict=True):
            if alone:
                out[unit.rows] = _fused(q[unit.rows], k, v, unit).to(out.dtype)
                continue
            for number, partial in enumerate(self._parts(precise[unit.rows], k, v, unit)):
                if unit.turn == number == 0:
                    out[unit.rows], sums[unit.rows] = partial
                    continue
                merged = out[unit.rows], sums[unit.rows]
                _merge(*merged, *partial)
                if not isinstance(unit.rows, slice):  # copies
                    out[unit.rows], sums[unit.rows] = merged
        if sink is not None:
            _merge(out, sums, *self._sink(precise, sink))
        return out.to(q.dtype).flatten(1)

    def _sink(self, q: Tensor, sink: Sink) -> tuple[Tensor, Tensor]:
        """The result of rows [N, heads, Dh] that see the sink alone, [heads, Dh], and its scores [N, heads]."""
        share = q.shape[1] // len(sink[0])
        key, value = (vector.to(q.dtype).repeat_interleave(share, dim=0) for vector in sink)
        scores = torch.bmm(q.transpose(0, 1), key[..., None])[..., 0].t() * (1 / math.sqrt(q.shape[2]))
        return value, scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
        """Results of rows [n, heads, Dh] of float32 or wider, and log-sum-exps [n, heads], over parts of the slots."""
        if self.fused and unit.reach is unit.skip is None and q.device.type == "cpu":
            whole = unit.number > 1 or (isinstance(unit.keys, slice) and k.dtype == q.dtype)
            count = unit.count if whole else PIECE
            for start in range(0, unit.count, count):
                yield _fused_part(q, *(_slots(cache, unit, q.dtype, start, count) for cache in (k, v)))
        else:
            yield self._tiled(q, k, v, unit)

    def _tiled(self, q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
        """Results of rows [n, heads, Dh], and log-sum-exps [n, heads], a tile of scores at a time."""
        groups = k.shape[1]
        share = q.shape[1] // groups
        rows = _folded(q, groups)[0] * (1 / (math.sqrt(q.shape[2]) * (self.cap or 1)))
        out, sums = q.new_empty(rows.shape), q.new_empty(rows.shape[:2])
        most = CPU_SCORES if q.device.type == "cpu" else GPU_SCORES
        tall = min(rows.shape[1], max(1, TILE_ROWS // share) * share)
        wide = min(unit.count, max(TILE_SLOTS, most // tall))
        deep = min(groups, max(1, most // (tall * wide)))
        room = q.new_empty(deep * tall * wide)  # for the scores of a tile; new memory each time would cost more
        for group in range(0, groups, deep):
            these = slice(group, group + deep)
            keys, values = (_slots(cache[:, these], unit, q.dtype)[0] for cache in (k, v))
            tiles = list(zip(torch.split(keys.transpose(1, 2), wide, 2), torch.split(values, wide, 1), strict=True))
            for row in range(0, rows.shape[1], tall):
                part, of_unit = (these, slice(row, row + tall)), slice(row // share, (row + tall) // share)
                self._tile(rows[part], tiles, unit, of_unit, room, out[part], sums[part])
        return _unfolded(out[None], len(q)), _unfolded(sums[None, ..., None], len(q))[..., 0]

    def _tile(
        self,
        q: Tensor,
        tiles: Sequence[tuple[Tensor, Tensor]],
        unit: Unit,
        of_unit: slice,
        room: Tensor,
        out: Tensor,
        sums: Tensor,
    ) -> None:
        """Attention of the rows `of_unit` to all slots, a tile at a time, into `out` [g, r, Dh], `sums` [g, r].

        `q` [g, r, Dh] is scaled, and divided by the cap. `tiles` are keys [g, Dh, m] and values [g, m, Dh]. Scores are
        made in `room`.
        """
        out.zero_()
        total = out.new_zeros((*sums.shape, 1))
        shifted = self.cap is None or self.cap > SMALL_CAP
        top = total.new_full(total.shape, _nothing(q) if shifted else 0)
        seen = 0
        for keys, values in tiles:
            count = keys.shape[2]
            scores = room[: sums.numel() * count].view(*sums.shape, count)
            torch.bmm(q, keys, out=scores)
            if self.cap is not None:
                scores.tanh_().mul_(self.cap)
            unseen = unit.unseen(seen, count, of_unit)
            if unseen is not None:
                scores.view(len(q), len(unseen), -1, count).masked_fill_(unseen[:, None], -math.inf)
            if shifted:
                higher = torch.maximum(top, scores.amax(-1, keepdim=True))
                fade = top.sub_(higher).exp_()
                total.mul_(fade)
                out.mul_(fade)
                scores.sub_(higher)
                top = higher
            total += scores.exp_().sum(-1, keepdim=True)
            torch.baddbmm(out, scores, values, out=out)
            seen += count
        torch.add(top, total.log(), out=sums[..., None])
        sums.clamp_min_(_nothing(q))  # of rows that see none of these slots
        out.div_(total.clamp_min_(torch.finfo(q.dtype).tiny))


def _nothing(x: Tensor) -> float:
    """The log-sum-exp of no scores: low, but finite, so that differences are defined."""
    return torch.finfo(x.dtype).min / 4


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merge results `part` with log-sum-exps `part_sums` into `out` [n, heads, Dh] and `sums` [n, heads], in place."""
    out.lerp_(part, torch.sigmoid(part_sums - sums)[..., None])
    torch.logaddexp(sums, part_sums, out=sums)


def _in_place(work: WorkList, device: torch.device, width: int | None) -> tuple[Unit, ...]:
    """The units of `work`. Small ones are joined where `width`, the numbers of a slot in K, is told."""
    if width is None:
        return units_of(work.cut_at_runs(RUN), device)
    return joined(units_of(work.ungrouped(SMALL // width, RUN).cut_at_runs(RUN), device), width, device)


def _fused(q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> Tensor:
    """PyTorch's fused attention of the rows [n, heads, Dh] of a unit to its slots, [n, heads, Dh]."""
    groups = k.shape[1]
    keys, values = _slots(k, unit, q.dtype), _slots(v, unit, q.dtype)
    unseen = None if unit.reach is unit.skip is None else unit.unseen(0, unit.count)
    visible = None if unseen is None else ~unseen.repeat_interleave(q.shape[1] // groups, dim=0)
    out = F.scaled_dot_product_attention(_folded(q, groups, unit.number), keys, values, visible)
    return _unfolded(out, q.shape[0])


def _fused_part(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same of `_slots` on a CPU, and log-sum-exps [n, heads]."""
    # What `scaled_dot_product_attention` calls there. It alone also returns log-sum-exps.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    number, groups = keys.shape[:2]
    out, sums = fused(_folded(q, groups, number), keys, values)
    return _unfolded(out, q.shape[0]), _unfolded(sums[..., None], q.shape[0])[..., 0]


def _slots(cache: Tensor, unit: Unit, dtype: torch.dtype, start: int = 0, count: int | None = None) -> Tensor:
    """K or V, `cache` [pool, kv_heads, Dh], at `count` slots of a unit from `start` on, or at those up to the last.

    A run is read in place, and scattered slots are copied. Of joined units all slots are read. Returns them in `dtype`,
    [number, kv_heads, slots, Dh].
    """
    number, keys, stop = unit.number, unit.keys, unit.count
    if number == 1 and count is not None:
        stop = min(start + count, stop)
    if isinstance(keys, slice):
        part = cache[keys.start + start : keys.start + stop]
    else:
        part = cache.index_select(0, keys if number > 1 else keys[start:stop])
    return part.to(dtype).view(number, -1, *cache.shape[1:]).transpose(1, 2)


def _folded(q: Tensor, groups: int, number: int = 1) -> Tensor:
    """Rows [n, heads, Dh] of `number` units as rows of the heads of K and V: [number, groups, any, Dh].

    Query heads that share a head of K and V are further rows of that head.
    """
    heads, dim = q.shape[1:]
    if groups == heads:
        return q.view(number, -1, heads, dim).transpose(1, 2)
    share = heads // groups
    return q.view(number, -1, groups, share, dim).permute(0, 2, 1, 3, 4).reshape(number, groups, -1, dim)


def _unfolded(x: Tensor, rows: int) -> Tensor:
    """The inverse of `_folded`, of all units' `rows`: [number, groups, any, any] as [rows, heads, any]."""
    number, groups, count, width = x.shape
    if number * count == rows:
        return x.transpose(1, 2).reshape(rows, groups, width)
    return x.view(number, groups, rows // number, -1, width).transpose(1, 2).reshape(rows, -1, width)

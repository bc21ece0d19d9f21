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

# The most numbers of K in a unit that is joined with others, and in a joined unit: larger copies take new memory pages
# in every call, and cost more than the calls that they save.
SMALL, COPIED = 2**15, 3 * 2**16


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that attend to slots; or several such units of one size, joined by `join_units`."""

    rows: slice | Tensor  # the rows, one unit after the other: a run of them, or int64 [rows]
    keys: slice | Tensor  # the slots, in the same order: a run of them, which is read in place, or int64 [slots]
    count: int  # number of slots of one unit
    reach: Tensor | None  # how many of the slots, from the first on, each row sees, int64 [rows]; None: all
    skip: Tensor | None  # how many of these, from the first on, it does not see, int64 [rows]; None: 0
    exclusive: bool  # its rows are in no other unit
    order: int  # the largest number of earlier units that one of its rows is in
    units: int = 1  # number of units that are joined in it

    def unseen_mask(self, start: int, count: int, rows: slice = slice(None)) -> Tensor | None:
        """A mask of the slots from `start` to `start + count` that `rows` do not see, bool [rows, count].

        Returns None if the unit's rows see all of its slots.
        """
        mask = None
        for limit, is_beyond in ((self.reach, torch.ge), (self.skip, torch.lt)):
            if limit is not None:
                beyond = is_beyond(torch.arange(start, start + count, device=limit.device), limit[rows, None])
                mask = beyond if mask is None else mask | beyond
        return mask


def units_of(work: WorkList, device: torch.device) -> tuple[Unit, ...]:
    """The units of `work` in their order, with index tensors on `device`. The host does not wait."""
    unit_counts = np.bincount(work.owners)
    earlier_units = np.zeros(len(unit_counts), dtype=np.int64)
    units = []
    for row, rows, slot, count, output in work.units.tolist():
        slots = work.slots[slot : slot + count]
        order = int(earlier_units[row : row + rows].max(initial=0))
        earlier_units[row : row + rows] = order + 1
        in_place = len(run_edges(slots)) == 2
        reach, skip = (None if limit is None else limit[output : output + rows] for limit in (work.reach, work.skip))
        units.append(
            Unit(
                rows=slice(row, row + rows),
                keys=slice(int(slots[0]), int(slots[-1]) + 1) if in_place else send(slots.astype(np.int64), device),
                count=count,
                reach=None if reach is None or (reach == count).all() else send(reach.astype(np.int64), device),
                skip=None if skip is None or not skip.any() else send(skip.astype(np.int64), device),
                exclusive=bool((unit_counts[row : row + rows] == 1).all()),
                order=order,
            )
        )
    return tuple(units)


def join_units(units: Sequence[Unit], width: int, device: torch.device) -> tuple[Unit, ...]:
    """Join small units of one size, so that one call computes them; a slot of K has `width` numbers.

    The units of a row stay in their order. Slots of joined units are copied: that takes less time than a call.
    """
    groups: dict[tuple[int, ...], list[Unit]] = {}
    for index, unit in enumerate(units):
        key: tuple[int, ...] = (unit.order, -1, index)  # no other unit has it
        if unit.reach is unit.skip is None and isinstance(unit.rows, slice) and unit.count * width <= SMALL:
            key = (unit.order, unit.rows.stop - unit.rows.start, unit.count, unit.exclusive)
        groups.setdefault(key, []).append(unit)
    result = []
    for group in groups.values():
        max_units = max(1, COPIED // (group[0].count * width))
        result += [_join(group[start : start + max_units], device) for start in range(0, len(group), max_units)]
    return tuple(sorted(result, key=lambda unit: unit.order))


def _join(units: Sequence[Unit], device: torch.device) -> Unit:
    """Units of one size, whose rows are slices, as one unit. A single unit is returned as it is."""
    if len(units) == 1:
        return units[0]
    rows = [unit.rows for unit in units if isinstance(unit.rows, slice)]
    joined_rows: slice | Tensor = slice(rows[0].start, rows[-1].stop)
    if any(row.stop != successor.start for row, successor in pairwise(rows)):
        joined_rows = send(np.concatenate([np.arange(row.start, row.stop) for row in rows]), device)
    slots = [torch.arange(key.start, key.stop) if isinstance(key := unit.keys, slice) else key for unit in units]
    return replace(units[0], rows=joined_rows, keys=torch.cat([key.to(device) for key in slots]), units=len(units))


# Scattered slots are read in place, run by run, if the runs have this length on average. Shorter ones are gathered, as
# every run is a call of its own.
RUN = 64
# Slots whose K and V are copied at a time if they are scattered, or are made float32.
CHUNK = 1024
# The scores of a tile on a CPU: they stay in a cache, and take longer than the calls for them. The most rows of a tile,
# and the fewest slots.
CPU_SCORES, TILE_ROWS, TILE_SLOTS = 2**19, 1024, 256
# Up to this cap, the exponential of a score is neither infinite nor lost in float32, so no maximum need be taken off.
SMALL_CAP = 40.0


class TorchAttention:
    """Attention of each unit in place; results are merged if rows are in several units.

    If `fused`, and without a cap and a sink, PyTorch's fused attention computes units whose rows are in no other one.
    Results to be merged are float32 at least, so that each row is rounded once. Scores s become `cap` * tanh(s /
    `cap`). Scores exist a tile at a time; nothing of the size of rows times slots is allocated.
    """

    def __init__(self, cap: float | None = None, fused: bool = True) -> None:
        self.cap = cap
        self.fused = fused and cap is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """See `Attention`. If all rows are in one unit each, nothing is merged."""
        may_fuse = self.fused and sink is None
        width = k.shape[1] * k.shape[2]
        units = work.derive(_attention_units, q.device, width if may_fuse and q.device.type == "cpu" else None)
        if may_fuse and len(units) == 1 and units[0].exclusive and isinstance(units[0].rows, slice):
            return _attend_fused(q, k, v, units[0]).flatten(1)  # of all rows, so that nothing is copied
        if not (may_fuse and all(unit.exclusive for unit in units)):
            return self._attend_and_merge(q, k, v, units, sink)
        out = q.new_empty(q.shape)
        for unit in units:
            out[unit.rows] = _attend_fused(q[unit.rows], k, v, unit)
        return out.flatten(1)

    def _attend_and_merge(self, q: Tensor, k: Tensor, v: Tensor, units: Sequence[Unit], sink: Sink | None) -> Tensor:
        """Attention of rows that may be in several of `units`, [N, heads * Dh]; their results are merged in float32."""
        precise = q.to(torch.promote_types(q.dtype, torch.float32))
        out, log_sums = precise.new_zeros(q.shape), precise.new_full(q.shape[:2], _empty_log_sum_exp(precise))
        for unit in units:
            if unit.exclusive and self.fused and sink is None:
                out[unit.rows] = _attend_fused(q[unit.rows], k, v, unit).to(out.dtype)
                continue
            for index, partial in enumerate(self._partial_results(precise[unit.rows], k, v, unit)):
                if unit.order == index == 0:  # the first results of its rows
                    out[unit.rows], log_sums[unit.rows] = partial
                    continue
                results = out[unit.rows], log_sums[unit.rows]
                _merge(*results, *partial)
                if not isinstance(unit.rows, slice):  # copies, and not views
                    out[unit.rows], log_sums[unit.rows] = results
        if sink is not None:
            _merge(out, log_sums, *self._sink_result(precise, sink))
        return out.to(q.dtype).flatten(1)

    def _sink_result(self, q: Tensor, sink: Sink) -> tuple[Tensor, Tensor]:
        """The result [heads, Dh] of attention to the sink alone, and its scores [N, heads], for `q` [N, heads, Dh]."""
        group_size = q.shape[1] // len(sink[0])
        key, value = (vector.to(q.dtype).repeat_interleave(group_size, dim=0) for vector in sink)
        scores = torch.bmm(q.transpose(0, 1), key[..., None])[..., 0].t() * (1 / math.sqrt(q.shape[2]))
        if self.cap is not None:
            scores.div_(self.cap).tanh_().mul_(self.cap)
        return value, scores

    def _partial_results(self, q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield results [n, heads, Dh] and log-sum-exps [n, heads] over parts of the slots; `q` is float32 or wider."""
        if self.fused and unit.reach is unit.skip is None and q.device.type == "cpu":
            one_call = unit.units > 1 or (isinstance(unit.keys, slice) and k.dtype == q.dtype)
            count = unit.count if one_call else CHUNK
            for start in range(0, unit.count, count):
                yield _attend_fused_part(q, *(_read_slots(kv, unit, q.dtype, start, count) for kv in (k, v)))
        else:
            yield self._attend_tiled(q, k, v, unit)

    def _attend_tiled(self, q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
        """Results [n, heads, Dh] and log-sum-exps [n, heads] of `q` [n, heads, Dh], a tile of scores at a time."""
        groups = k.shape[1]
        group_size = q.shape[1] // groups
        rows = _fold_groups(q, groups)[0] * (1 / (math.sqrt(q.shape[2]) * (self.cap or 1)))
        out, log_sums = q.new_empty(rows.shape), q.new_empty(rows.shape[:2])
        max_scores = CPU_SCORES if q.device.type == "cpu" else GPU_SCORES
        tile_rows = min(rows.shape[1], max(1, TILE_ROWS // group_size) * group_size)
        tile_slots = min(unit.count, max(TILE_SLOTS, max_scores // tile_rows))
        tile_groups = min(groups, max(1, max_scores // (tile_rows * tile_slots)))
        scores = q.new_empty(tile_groups * tile_rows * tile_slots)  # reused: new memory for each tile costs more
        for group in range(0, groups, tile_groups):
            heads = slice(group, group + tile_groups)
            k_part, v_part = (_read_slots(kv[:, heads], unit, q.dtype)[0] for kv in (k, v))
            keys, values = torch.split(k_part.transpose(1, 2), tile_slots, 2), torch.split(v_part, tile_slots, 1)
            tiles = list(zip(keys, values, strict=True))
            for row in range(0, rows.shape[1], tile_rows):
                part = heads, slice(row, row + tile_rows)
                unit_rows = slice(row // group_size, (row + tile_rows) // group_size)
                self._attend_tiles(
                    rows[part], tiles, unit, unit_rows, buffer=scores, out=out[part], log_sums=log_sums[part]
                )
        return _unfold_groups(out[None], len(q)), _unfold_groups(log_sums[None, ..., None], len(q))[..., 0]

    def _attend_tiles(
        self,
        q: Tensor,
        tiles: Sequence[tuple[Tensor, Tensor]],
        unit: Unit,
        unit_rows: slice,
        *,
        buffer: Tensor,
        out: Tensor,
        log_sums: Tensor,
    ) -> None:
        """Compute the attention of `unit_rows` of `unit` to all its slots, one of `tiles` of them at a time.

        Writes results to `out` [g, r, Dh] and log-sum-exps to `log_sums` [g, r]; `buffer` holds scores meanwhile. `q`
        [g, r, Dh] is scaled, and divided by the cap. `tiles` are keys [g, Dh, m] and values [g, m, Dh].
        """
        out.zero_()
        total = out.new_zeros((*log_sums.shape, 1))
        shifted = self.cap is None or self.cap > SMALL_CAP
        maximum = total.new_full(total.shape, _empty_log_sum_exp(q) if shifted else 0)
        start = 0
        for keys, values in tiles:
            count = keys.shape[2]
            scores = buffer[: log_sums.numel() * count].view(*log_sums.shape, count)
            torch.bmm(q, keys, out=scores)
            if self.cap is not None:
                scores.tanh_().mul_(self.cap)
            unseen = unit.unseen_mask(start, count, unit_rows)
            if unseen is not None:
                scores.view(len(q), len(unseen), -1, count).masked_fill_(unseen[:, None], -math.inf)
            if shifted:
                new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
                decay = maximum.sub_(new_maximum).exp_()
                total.mul_(decay)
                out.mul_(decay)
                scores.sub_(new_maximum)
                maximum = new_maximum
            total += scores.exp_().sum(-1, keepdim=True)
            torch.baddbmm(out, scores, values, out=out)
            start += count
        torch.add(maximum, total.log(), out=log_sums[..., None])
        log_sums.clamp_min_(_empty_log_sum_exp(q))  # of rows that see none of these slots
        out.div_(total.clamp_min_(torch.finfo(q.dtype).tiny))


def _empty_log_sum_exp(x: Tensor) -> float:
    """The log-sum-exp of no scores: low, but finite, so that differences are defined."""
    return torch.finfo(x.dtype).min / 4


def _merge(out: Tensor, log_sums: Tensor, other: Tensor, other_log_sums: Tensor) -> None:
    """Merge `other` results into `out` [n, heads, Dh], and their log-sum-exps into `log_sums` [n, heads], in place."""
    out.lerp_(other, torch.sigmoid(other_log_sums - log_sums)[..., None])
    torch.logaddexp(log_sums, other_log_sums, out=log_sums)


def _attention_units(work: WorkList, device: torch.device, width: int | None) -> tuple[Unit, ...]:
    """The units of `work`, cut at runs of slots. With `width`, the numbers of a slot of K, small units are joined."""
    if width is None:
        return units_of(work.cut_at_runs(RUN), device)
    return join_units(units_of(work.ungroup(SMALL // width, RUN).cut_at_runs(RUN), device), width, device)


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, unit: Unit) -> Tensor:
    """PyTorch's fused attention of the rows `q` [n, heads, Dh] of a unit to its slots, [n, heads, Dh]."""
    groups = k.shape[1]
    keys, values = _read_slots(k, unit, q.dtype), _read_slots(v, unit, q.dtype)
    unseen = None if unit.reach is unit.skip is None else unit.unseen_mask(0, unit.count)
    visible = None if unseen is None else ~unseen.repeat_interleave(q.shape[1] // groups, dim=0)
    out = F.scaled_dot_product_attention(_fold_groups(q, groups, unit.units), keys, values, visible)
    return _unfold_groups(out, q.shape[0])


def _attend_fused_part(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention on a CPU to the results of `_read_slots`: [n, heads, Dh], and log-sum-exps [n, heads]."""
    # The operation that `scaled_dot_product_attention` calls there: no public one returns log-sum-exps.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    units, groups = keys.shape[:2]
    out, log_sums = fused(_fold_groups(q, groups, units), keys, values)
    return _unfold_groups(out, q.shape[0]), _unfold_groups(log_sums[..., None], q.shape[0])[..., 0]


def _read_slots(kv: Tensor, unit: Unit, dtype: torch.dtype, start: int = 0, count: int | None = None) -> Tensor:
    """K or V of a unit's slots, [units, kv_heads, slots, Dh] in `dtype`, from `kv` [pool, kv_heads, Dh].

    Of one unit the slots from `start` on are read, at most `count`; of joined units all. A run is read in place, and
    scattered slots are copied.
    """
    units, keys, stop = unit.units, unit.keys, unit.count
    if units == 1 and count is not None:
        stop = min(start + count, stop)
    if isinstance(keys, slice):
        part = kv[keys.start + start : keys.start + stop]
    else:
        part = kv.index_select(0, keys if units > 1 else keys[start:stop])
    return part.to(dtype).view(units, -1, *kv.shape[1:]).transpose(1, 2)


def _fold_groups(q: Tensor, groups: int, units: int = 1) -> Tensor:
    """Rows `q` [n, heads, Dh] of `units` units as rows of the `groups` heads of K and V: [units, groups, any, Dh].

    Query heads that share a head of K and V become further rows of that head.
    """
    heads, dim = q.shape[1:]
    if groups == heads:
        return q.view(units, -1, heads, dim).transpose(1, 2)
    return q.view(units, -1, groups, heads // groups, dim).permute(0, 2, 1, 3, 4).reshape(units, groups, -1, dim)


def _unfold_groups(x: Tensor, rows: int) -> Tensor:
    """The inverse of `_fold_groups`: [units, groups, any, width] to [rows, heads, width], `rows` of all units."""
    units, groups, count, width = x.shape
    if units * count == rows:
        return x.transpose(1, 2).reshape(rows, groups, width)
    return x.view(units, groups, rows // units, -1, width).transpose(1, 2).reshape(rows, -1, width)

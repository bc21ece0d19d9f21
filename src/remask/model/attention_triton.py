"""Attention by Triton kernels: one launch for all units of a stage, and one that merges partial results.

Importing this module needs Triton. The kernels run on CUDA devices, and with `TRITON_INTERPRET=1` in Triton's
interpreter.
"""

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from remask.machine.transfers import send
from remask.model.attention import ListSize, Sink
from remask.model.layer_triton import launch, round_to
from remask.model.work_list import FIRST_ROW, ROWS, SLOTS, Ints, WorkList

TILE = 64  # rows times query heads of a K/V head that a unit has, at most
# Partial results cost memory traffic, so K and V are cut only if a stage has fewer programs than this, two for each
# multiprocessor of an H100. Parts have a multiple of `CHUNK` slots.
PROGRAMS, CHUNK = 264, 64
MERGED_HEADS = 8  # query heads of a row that a program merges


class TritonAttention:
    """Attention of a list in one launch, and in another one if rows have several partial results or a sink.

    Inputs are float32, bfloat16 or float16; scores, sums and partial results are float32. Scores s become
    `cap` * tanh(s / `cap`). Weights are rounded to the dtype of V before they are multiplied with it, as in PyTorch's
    fused attention.
    """

    def __init__(self, cap: float | None = None) -> None:
        self.cap = cap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        if not len(q):
            return q.flatten(1)
        heads, groups = q.shape[1], k.shape[1]
        size = self.size(work, heads, groups, sink=sink is not None)
        return self.run(q, k, v, work.derive(_device_list, heads, groups, size, q.device), size, sink)

    def size(self, work: WorkList, heads: int, groups: int, *, sink: bool = False) -> ListSize:
        """See `SizedAttention`."""
        return work.derive(_size, heads, groups, sink)

    def pack(self, work: WorkList, heads: int, groups: int, size: ListSize) -> Ints:
        """See `SizedAttention`."""
        return _pack(work, heads, groups, size)

    def run(self, q: Tensor, k: Tensor, v: Tensor, packed: Tensor, size: ListSize, sink: Sink | None = None) -> Tensor:
        """See `SizedAttention`."""
        rows, heads, dim = q.shape
        groups = k.shape[1]
        units, slots, reach, skip, order, starts = torch.split(packed, size.lengths)
        out = q.new_empty(rows, heads, dim)
        if sink is not None and not size.merges:
            raise ValueError("the size of the list was computed without a sink, and there is one")
        partial = q.new_empty((size.output_count, heads, dim), dtype=torch.float32) if size.merges else out
        sums = q.new_empty((size.output_count, heads), dtype=torch.float32)
        capped = self.cap is not None
        scale, cap = 1 / math.sqrt(dim), self.cap or 1.0
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        tiles, options = attend_options(heads, groups, dim, q.dtype, capped=capped, merges=size.merges)
        launch(
            _attend, (size.unit_count, groups, tiles),
            q, k, v, units, slots, reach, skip, partial, sums, scale, cap,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), **options,
        )  # fmt: skip
        if size.merges:
            keys, values = (q, q) if sink is None else (vector.contiguous() for vector in sink)
            tiles, options = merge_options(heads, groups, dim, capped=capped, sink=sink is not None)
            launch(
                _merge, (rows, tiles),
                q, partial, sums, order, starts, keys, values, out, scale, cap, q.stride(0), q.stride(1), **options,
            )  # fmt: skip
        return out.flatten(1)


def attend_options(
    heads: int, groups: int, dim: int, dtype: torch.dtype, *, capped: bool, merges: bool
) -> tuple[int, dict[str, Any]]:
    """The number of programs of a unit and a K/V head, and the constants of `_attend` for `heads` of `dim` channels.

    The more slots a program reads at a time, the fewer instructions it needs between products, and the more registers:
    none is spilled. There are no matrix units for float32 at full precision, and its products keep their operands in
    registers, so a program computes few rows too.
    """
    group_size = heads // groups
    rows = max(16, triton.next_power_of_2(_unit_rows(group_size) * group_size))
    tile, keys = (16, 16) if dtype == torch.float32 else (rows, 64 if dim <= 128 else 32)
    options = {"ROWS": tile, "KEYS": keys, "MERGED": merges, "num_warps": 4}
    return rows // tile, options | _shape_constants(heads, groups, dim, capped)


def merge_options(heads: int, groups: int, dim: int, *, capped: bool, sink: bool) -> tuple[int, dict[str, Any]]:
    """The number of programs of a row, and the constants of `_merge`."""
    program_heads = min(MERGED_HEADS, triton.next_power_of_2(heads))
    constants = _shape_constants(heads, groups, dim, capped)
    return triton.cdiv(heads, program_heads), {"SINK": sink, "TALL": program_heads} | constants


def _shape_constants(heads: int, groups: int, dim: int, capped: bool) -> dict[str, Any]:
    """The constants that `_attend` and `_merge` share. The matrix units need a `WIDTH` of at least 16."""
    width = max(16, triton.next_power_of_2(dim))
    return {"HEADS": heads, "DIM": dim, "WIDTH": width, "CAPPED": capped, "SHARE": heads // groups}


def _unit_rows(group_size: int) -> int:
    """The most rows of a unit, with `group_size` query heads for each K/V head."""
    return max(1, TILE // group_size)


def _cut(work: WorkList, heads: int, groups: int) -> WorkList:
    """`work` cut into units that one program computes for each of the `groups` K/V heads."""
    unit_rows = _unit_rows(heads // groups)
    tiles = -(-work.units[:, ROWS].astype(np.int64) // unit_rows)
    mean_slots = int((tiles * work.units[:, SLOTS]).sum()) * groups // PROGRAMS  # of a program, with `PROGRAMS` of them
    return work.cut(unit_rows, (mean_slots // CHUNK + 1) * CHUNK)


def _size(work: WorkList, heads: int, groups: int, sink: bool) -> ListSize:
    """See `SizedAttention.size`."""
    parts = work.derive(_cut, heads, groups)
    rows = int((parts.units[:, FIRST_ROW] + parts.units[:, ROWS]).max())
    return ListSize(rows, len(parts.units), len(parts.slots), parts.output_count, sink or parts.output_count > rows)


def _pack(work: WorkList, heads: int, groups: int, size: ListSize) -> Ints:
    """The arrays of `ListSize.lengths`, padded with zeros to `size`: units of 0 rows compute nothing."""
    parts = work.derive(_cut, heads, groups)
    reach = np.repeat(parts.units[:, SLOTS], parts.units[:, ROWS]) if parts.reach is None else parts.reach
    skip = np.zeros_like(reach) if parts.skip is None else parts.skip
    arrays: list[NDArray[Any]] = [parts.units.ravel(), parts.slots, reach, skip]
    if size.merges:  # otherwise no kernel reads them
        owners = parts.owners
        order = np.argsort(owners, kind="stable")
        arrays += [order, np.searchsorted(owners[order], np.arange(size.row_count + 1))]
    packed = np.zeros(sum(size.lengths), dtype=np.int32)
    for target, array in zip(np.split(packed, np.cumsum(size.lengths)[:-1]), arrays, strict=False):
        target[: len(array)] = array
    return packed


def _device_list(work: WorkList, heads: int, groups: int, size: ListSize, device: torch.device) -> Tensor:
    return send(_pack(work, heads, groups, size), device)


@triton.jit
def _capped(score, cap, CAPPED: tl.constexpr):
    """`cap` * tanh(score / cap), computed with an exponential that cannot overflow."""
    if CAPPED:
        small = tl.exp(-2 * tl.abs(score) / cap)
        size = cap * (1 - small) / (1 + small)
        score = tl.where(score < 0, -size, size)
    return score


@triton.jit
def _product(a, b, EMULATED: tl.constexpr):
    """The matrix product in float32. The interpreter cannot multiply bfloat16; float32 holds its products exactly."""
    if EMULATED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _attend(
    q, k, v, units, slots, reach, skip, outputs, sums, scale, cap,
    q_row, q_head, k_slot, k_head, v_slot, v_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, EMULATED: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Attention of `ROWS` rows of one unit, for one K/V head. Its `SHARE` query heads are further rows: head h of row r
    is row r * SHARE + h.

    If `MERGED`, normalised partial results go to `outputs` [P, HEADS, DIM], and their log-sum-exps to `sums`
    [P, HEADS]. Otherwise each row has one result, which goes to `outputs` [N, HEADS, DIM].
    """
    unit = units + tl.program_id(0) * 5
    first_row, rows, first_slot = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2)
    count, first_output = tl.load(unit + 3), tl.load(unit + 4)
    group = tl.program_id(1)
    tile, channel = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row, head = tile // SHARE, group * SHARE + tile % SHARE
    live, wide = row < rows, channel < DIM
    q_offset = (first_row + row).to(tl.int64) * q_row + head * q_head
    Q = tl.load(q + q_offset[:, None] + channel[None, :], mask=live[:, None] & wide[None, :], other=0.0)
    end = tl.load(reach + first_output + row, mask=live, other=0)
    begin = tl.load(skip + first_output + row, mask=live, other=0)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, count, KEYS):
        key = start + tl.arange(0, KEYS)
        live_key = key < count
        slot = tl.load(slots + first_slot + key, mask=live_key, other=0).to(tl.int64)
        live_kv = live_key[:, None] & wide[None, :]
        K = tl.load(k + slot[:, None] * k_slot + group * k_head + channel[None, :], mask=live_kv, other=0.0)
        V = tl.load(v + slot[:, None] * v_slot + group * v_head + channel[None, :], mask=live_kv, other=0.0)
        scores = _capped(_product(Q, tl.trans(K), EMULATED) * scale, cap, CAPPED)
        visible = (key[None, :] < end[:, None]) & (key[None, :] >= begin[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # of rows that have seen no slot so far
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        out = out * decay[:, None] + _product(round_to(weights, V.dtype, EMULATED), V, EMULATED)
        maximum = new_maximum
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    result = first_output + row if MERGED else first_row + row
    offset = result.to(tl.int64) * HEADS + head
    out = round_to(out, outputs.dtype.element_ty, EMULATED)
    tl.store(outputs + offset[:, None] * DIM + channel[None, :], out, mask=live[:, None] & wide[None, :])
    if MERGED:
        tl.store(sums + offset, maximum + tl.log(tl.where(total == 0, 1.0, total)), mask=live)


@triton.jit
def _merge(
    q, partial, sums, order, starts, sink_k, sink_v, out, scale, cap, q_row, q_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, EMULATED: tl.constexpr,
    SHARE: tl.constexpr, SINK: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of `TALL` query heads of one row, and with `SINK` that of the sink, by log-sum-exps."""
    row = tl.program_id(0)
    head, channel = tl.program_id(1) * TALL + tl.arange(0, TALL), tl.arange(0, WIDTH)
    live_head = head < HEADS
    live = live_head[:, None] & (channel < DIM)[None, :]
    maximum = tl.full((TALL,), float("-inf"), tl.float32)
    total = tl.zeros((TALL,), tl.float32)
    acc = tl.zeros((TALL, WIDTH), tl.float32)
    if SINK:
        sink_offset = (head // SHARE)[:, None] * DIM + channel[None, :]
        q_offset = row.to(tl.int64) * q_row + head * q_head
        query = tl.load(q + q_offset[:, None] + channel[None, :], mask=live, other=0.0).to(tl.float32)
        key = tl.load(sink_k + sink_offset, mask=live, other=0.0).to(tl.float32)
        maximum = _capped(tl.sum(query * key, 1) * scale, cap, CAPPED)
        acc = tl.load(sink_v + sink_offset, mask=live, other=0.0).to(tl.float32)
        total += 1.0
    for index in range(tl.load(starts + row), tl.load(starts + row + 1)):
        offset = tl.load(order + index).to(tl.int64) * HEADS + head
        log_sum = tl.load(sums + offset, mask=live_head, other=0.0)
        new_maximum = tl.maximum(maximum, log_sum)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay, weight = tl.exp(maximum - shift), tl.exp(log_sum - shift)
        part = tl.load(partial + offset[:, None] * DIM + channel[None, :], mask=live, other=0.0)
        acc = acc * decay[:, None] + weight[:, None] * part
        total = total * decay + weight
        maximum = new_maximum
    offset = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + channel[None, :]
    acc = acc / tl.where(live_head, total, 1.0)[:, None]
    tl.store(out + offset, round_to(acc, out.dtype.element_ty, EMULATED), mask=live)

"""The units of a work list as slices and index tensors, for executors made of PyTorch or NumPy operations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from remask.machine.transfers import send
from remask.model.work_list import WorkList, run_edges

# Numbers of K that a unit has at most to be joined with others, and that are copied for one call: more take new memory
# pages in every call, and cost more than the calls that they spare.
SMALL, COPIED = 2**15, 3 * 2**16


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that attend to slots; or several such units, with equally many rows and slots each, as one (`joined`).

    Attributes:
        rows: the rows, one unit after the other: side by side, or int64 numbers.
        keys: the slots, in the same order: a run of them, which is read in place, or int64 slots.
        count: the number of slots of a unit.
        reach: how many of the slots each row sees, int64 [rows]; None: all.
        alone: whether its rows are in no other unit.
        turn: the most units before it that any of its rows is in.
        number: how many units it is.
    """

    rows: slice | Tensor
    keys: slice | Tensor
    count: int
    reach: Tensor | None
    alone: bool
    turn: int
    number: int = 1


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
        reach = None if work.reach is None else work.reach[output : output + rows]
        units.append(
            Unit(
                rows=slice(row, row + rows),
                keys=slice(int(slots[0]), int(slots[-1]) + 1) if in_place else send(slots.astype(np.int64), device),
                count=count,
                reach=None if reach is None or (reach == count).all() else send(reach.astype(np.int64), device),
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
        if unit.reach is None and isinstance(unit.rows, slice) and unit.count * width <= SMALL:
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

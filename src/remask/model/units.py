"""The units of a work list as slices and index tensors, for executors made of PyTorch or NumPy operations."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remask.machine.transfers import send
from remask.model.work_list import WorkList, run_edges


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that attend to slots.

    Attributes:
        rows: the rows.
        keys: the slots: a run of them, which is read in place, or int64 slots.
        count: the number of slots.
        reach: how many of the slots each row sees, int64 [rows]; None: all.
        alone: whether its rows are in no other unit.
        first: whether its rows are in no earlier unit.
    """

    rows: slice
    keys: slice | Tensor
    count: int
    reach: Tensor | None
    alone: bool
    first: bool


def units_of(work: WorkList, device: torch.device) -> tuple[Unit, ...]:
    """The units of `work` in their order, with index tensors on `device`. The host does not wait."""
    units_of_row = np.bincount(work.owners)
    earlier = np.zeros(len(units_of_row), dtype=np.bool_)
    units = []
    for row, rows, slot, count, output in work.units.tolist():
        slots = work.slots[slot : slot + count]
        before, earlier[row : row + rows] = bool(earlier[row : row + rows].any()), True
        in_place = len(run_edges(slots)) == 2
        reach = None if work.reach is None else work.reach[output : output + rows]
        units.append(
            Unit(
                rows=slice(row, row + rows),
                keys=slice(int(slots[0]), int(slots[-1]) + 1) if in_place else send(slots.astype(np.int64), device),
                count=count,
                reach=None if reach is None or (reach == count).all() else send(reach.astype(np.int64), device),
                alone=bool((units_of_row[row : row + rows] == 1).all()),
                first=not before,
            )
        )
    return tuple(units)


def piece(kept: Tensor, unit: Unit, start: int, count: int) -> Tensor:
    """`kept` [pool, ...] at `count` of the unit's slots from the number `start` on, or at those up to the last.

    A run is read in place, and scattered slots are copied.
    """
    stop = min(start + count, unit.count)
    if isinstance(unit.keys, slice):
        return kept[unit.keys.start + start : unit.keys.start + stop]
    return kept[unit.keys[start:stop]]

"""The work of a stage: which slots its rows attend to, and which rows it computes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from remask.engine.canvas_state import CanvasState, SlotTable
from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.stage import Index, Neighbours, Partial, Pick, Signals
from remask.model.work_list import WorkList, WorkListBuilder
from remask.plan.plan import Plan
from remask.plan.spans import Span, neighbours

TILE = 128  # largest number of rows of a unit whose rows see different parts of a canvas
SLIDING_TILE = 64  # positions that the rows of a unit span if they see windows, as it has the slots of all windows


@dataclass(slots=True)  # not frozen, as one is made for each canvas of each stage
class StageRows:
    """The rows of one canvas in one stage."""

    state: CanvasState
    span: Span
    table: SlotTable
    positions: Index
    rows: slice  # its part of the stage's rows
    sees: Index | None  # how many leading positions of the canvas each row attends to; None: all
    block_starts: Index | None = None  # first position of each row's block, if windows reach back from there


def make_work(parts: list[StageRows], *, separate: bool = False) -> WorkList:
    """The work of all `parts`. Adjacent canvases that share a leading run of slots read it together, as one unit.

    If `separate`, each canvas attends by itself, and only rows that see the same positions share a unit. A unit then
    does not depend on what else is in the pass, or on where its slots are.
    """
    builder = WorkListBuilder()
    group: list[StageRows] = []
    for part in parts:
        if not len(part.positions):
            continue
        if separate:
            _add_separate(builder, part)
            continue
        shares_prefix = _shares_prefix(part)
        if group and (not shares_prefix or part.state.sharing_key != group[0].state.sharing_key):
            _add_group(builder, group)
            group = []
        if shares_prefix:
            group.append(part)
        else:
            _add_canvas(builder, part, 0)
    if group:
        _add_group(builder, group)
    return builder.build()


def make_sliding_work(parts: list[StageRows], reach: int) -> WorkList:
    """The work of layers with windows: a row sees `reach` positions to each side, or before its block.

    Each canvas attends by itself, as in `make_work` if `separate`.
    """
    builder = WorkListBuilder()
    for part in parts:
        if len(part.positions):
            add_windows(builder, part.rows.start, part.positions, part.table.slots, part.sees, reach, part.block_starts)
    return builder.build()


def add_windows(
    builder: WorkListBuilder,
    row: int,
    positions: Index,
    slots: Index,
    sees: Index | int | None,
    reach: int,
    block_starts: Index | None = None,
) -> None:
    """Add units for rows from `row` on, at `positions` [N], that see windows of a canvas with these `slots` [T].

    Windows end before the position `sees`, a number or [N]; None: T. `reach` and `block_starts` are as in `neighbours`.
    """
    first, end = neighbours(positions, len(slots) if sees is None else sees, reach, block_starts)
    gaps = np.flatnonzero(first[1:] > end[:-1]) + 1  # rows whose windows do not touch those before
    base_slot = builder.add_slots(slots)
    for start, stop in pairwise([0, *gaps.tolist(), len(positions)]):
        low = start
        while low < stop:
            high = min(stop, int(np.searchsorted(positions, positions[low] + SLIDING_TILE)))
            base, count = int(first[low]), int(end[high - 1] - first[low])
            sees_stop, sees_start = end[low:high] - base, first[low:high] - base
            builder.add(row + low, high - low, base_slot + base, count, reach=sees_stop, skip=sees_start)
            low = high


def _shares_prefix(part: StageRows) -> bool:
    """Whether the canvas has a shared prefix that all of these rows see entirely."""
    return bool(part.table.prefix_runs) and (part.sees is None or part.sees[0] >= _prefix_length(part))


def _prefix_length(part: StageRows) -> int:
    return len(part.table.slots) - len(part.table.private_slots)


def _add_group(builder: WorkListBuilder, group: list[StageRows]) -> None:
    """Add canvases that share a prefix: a unit for the prefix, and units for the other slots of each."""
    if len(group) == 1:
        _add_canvas(builder, group[0], 0)
        return
    length = _prefix_length(group[0])
    start, stop = group[0].rows.start, group[-1].rows.stop
    builder.add(start, stop - start, builder.add_slots(group[0].table.slots[:length]), slots=length)
    for part in group:
        _add_canvas(builder, part, length)


def _add_canvas(builder: WorkListBuilder, part: StageRows, start: int) -> None:
    """Add the units of one canvas for its slots from the position `start` on."""
    slots = part.table.slots[start:]
    if part.sees is None:
        if len(slots):
            builder.add(part.rows.start, len(part.positions), builder.add_slots(slots), len(slots))
        return
    sees = part.sees - start
    first_slot = builder.add_slots(slots[: sees[-1]])
    for first, stop in _tiles(sees):
        slot_count = int(sees[stop - 1])  # of the unit's last row, which sees most
        if slot_count:
            reach = None if sees[first] == slot_count else sees[first:stop]
            builder.add(part.rows.start + first, stop - first, first_slot, slot_count, reach=reach)


def _add_separate(builder: WorkListBuilder, part: StageRows) -> None:
    """Add one unit for each run of rows that see the same positions."""
    count = len(part.positions)
    sees = np.full(count, len(part.table.slots)) if part.sees is None else part.sees
    first_slot = builder.add_slots(part.table.slots[: sees[-1]])
    for first, stop in pairwise(_edges(sees)):
        builder.add(part.rows.start + first, stop - first, first_slot, slots=int(sees[first]))


def _edges(sees: Index) -> list[int]:
    """Starts of the runs of rows that see the same positions, then the number of rows."""
    return [0, *(np.flatnonzero(np.diff(sees)) + 1).tolist(), len(sees)]


def _tiles(sees: Index) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that form a unit: long runs that see the same positions, or adjacent runs up to a tile."""
    start = 0
    for run_start, run_stop in pairwise(_edges(sees)):
        if run_stop - run_start >= TILE // 2:
            if start < run_start:
                yield start, run_start
            yield run_start, run_stop
            start = run_stop
        elif run_stop - start > TILE:
            yield start, run_start
            start = run_start
    if start < len(sees):
        yield start, len(sees)


def computed_parts(parts: list[StageRows]) -> list[StageRows]:
    """The canvases with no rows but those that are computed, renumbered from 0.

    Where the device will pick rows, any of the candidates may stand for them. So `PlanError` is raised if the rows of
    such a canvas see different positions.
    """
    computed = []
    start = 0
    for part in parts:
        count = part.span.count
        if part.span.pick is None:
            index: slice | Index = np.flatnonzero(part.span.computed[part.positions])
        else:
            if part.sees is not None and len(part.sees) and part.sees[0] != part.sees[-1]:
                raise PlanError("rows are picked where not every row attends to the same positions")
            index = slice(count)
        computed.append(
            replace(
                part,
                positions=part.positions[index],
                rows=slice(start, start + count),
                sees=None if part.sees is None else part.sees[index],
                block_starts=None if part.block_starts is None else part.block_starts[index],
            )
        )
        start += count
    return computed


def make_partial(layer: int, parts: list[StageRows], device: torch.device, *, slides: bool) -> Partial:
    """The computed rows of the stage that begins at `layer`, in which other rows are held or picked.

    If `slides`, the picked rows have windows in some layers.
    """
    computed: list[Index] = []
    picks: defaultdict[tuple[bool, int, int], _PickLists] = defaultdict(_PickLists)  # by keys, every, phase
    count = 0
    for number, part in enumerate(parts):
        computed_rows = part.rows.start + np.flatnonzero(part.span.computed[part.positions])
        computed.append(computed_rows)
        count += len(computed_rows)
        pick = part.span.pick
        if pick is not None:
            candidates = part.rows.start + np.flatnonzero(pick.candidates[part.positions])
            computed.append(candidates[: pick.count])
            phase = (layer - pick.first) % pick.every
            picks[pick.by == "key", pick.every, phase].add(number, candidates, count + np.arange(pick.count))
            count += pick.count
    slots = np.concatenate([part.table.slots[part.positions] for part in parts])
    device_picks = tuple(lists.send(*key, device) for key, lists in picks.items())
    places = neighbour_places(parts, device) if slides else None
    return Partial(send(np.concatenate(computed), device), device_picks, send(slots, device), neighbours=places)


@dataclass(slots=True)
class _PickLists:
    """Canvases of a stage that pick rows by one kind of vector, in the same layers; see `Pick`."""

    rows: list[Index] = field(default_factory=list)
    owner: list[Index] = field(default_factory=list)
    order: list[Index] = field(default_factory=list)
    target: list[Index] = field(default_factory=list)
    count: int = 0  # of `rows`

    def add(self, number: int, candidates: Index, target: Index) -> None:
        """Let canvas `number` pick some of the rows `candidates`, one for each entry of `target`."""
        self.rows.append(candidates)
        self.owner.append(np.full(len(candidates), number))
        self.order.append(self.count + np.arange(len(target)))
        self.target.append(target)
        self.count += len(candidates)

    def send(self, keys: bool, every: int, phase: int, device: torch.device) -> Pick:
        """The lists as index tensors on the device."""
        lists = (self.rows, self.owner, self.order, self.target)
        rows, owner, order, target = (send(np.concatenate(index), device) for index in lists)
        return Pick(rows, owner, order, target, keys, every, phase)


def neighbour_places(parts: list[StageRows], device: torch.device) -> Neighbours:
    """The slots of all canvases, and for each row three indices into them: its own, the first that it sees, the end.

    The device finds windows by these once it has picked rows.
    """
    slots = list[Index]()
    places = list[Index]()  # [3, rows] for each canvas
    start = 0
    for part in parts:
        end = len(part.table.slots) if part.sees is None else part.sees
        ends = np.broadcast_to(end, part.positions.shape)
        places.append(start + np.stack([part.positions, np.zeros_like(part.positions), ends]))
        slots.append(part.table.slots)
        start += len(part.table.slots)
    return Neighbours(send(np.concatenate(slots), device), send(np.concatenate(places, axis=1), device))


def signals_of(items: Sequence[tuple[CanvasState, Plan]], device: torch.device) -> Signals | None:
    """The denoised rows of the first stage, with the slots of their self-conditioning signals (-1: none).

    Returns None if no row is denoised.
    """
    rows = list[Index]()
    slots = list[Index]()
    start = 0
    for state, plan in items:
        positions = plan.spans[0].positions
        noisy = np.flatnonzero(state.canvas.noisy[positions])
        rows.append(start + noisy)
        slots.append(state.buffer_slots[positions[noisy]] if state.conditioned else np.full(len(noisy), -1))
        start += len(positions)
    rows_and_slots = np.stack([np.concatenate(rows), np.concatenate(slots)])
    return Signals(*send(rows_and_slots, device)) if rows_and_slots.size else None

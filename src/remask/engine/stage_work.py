"""The work list of a stage: which slots its rows attend to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from remask.engine.canvas_state import CanvasState, SlotTable
from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.stage import Index, Neighbours, Signals
from remask.model.work_list import WorkList, WorkListBuilder
from remask.plan.plan import Plan
from remask.plan.spans import Span, neighbours

TILE = 128  # most rows of a unit whose rows see different parts of a canvas
NEAR_TILE = 64  # positions over which the rows of a unit stand where they see windows: it has the slots of all of them


@dataclass(slots=True)  # not frozen, as one is made for each canvas of each stage
class StageRows:
    """The rows of one canvas in one stage."""

    state: CanvasState
    span: Span
    table: SlotTable
    positions: Index
    rows: slice  # among the stage's flat rows
    sees: Index | None  # how many leading positions of the canvas each row attends to; None: all
    starts: Index | None = None  # where each row's block begins, on a model whose windows reach back from there


def make_work(parts: list[StageRows], separately: bool = False) -> WorkList:
    """The work of all `parts`. Neighbours that share a leading run of slots read it together, as one unit.

    With `separately` each canvas is attended to by itself, and only rows that see the same positions share a unit. A
    unit then does not depend on what else is in the pass, or on where its slots are.
    """
    builder = WorkListBuilder()
    group: list[StageRows] = []
    for part in parts:
        if not len(part.positions):
            continue
        if separately:
            _add_apart(builder, part)
            continue
        shares = _shares(part)
        if group and (not shares or part.state.sharing != group[0].state.sharing):
            _add_group(builder, group)
            group = []
        if shares:
            group.append(part)
        else:
            _add(builder, part, 0)
    if group:
        _add_group(builder, group)
    return builder.list()


def make_near(parts: list[StageRows], reach: int) -> WorkList:
    """As `make_work` with `separately`, where a row sees `reach` positions to each side, or before its block."""
    builder = WorkListBuilder()
    for part in parts:
        if len(part.positions):
            add_near(builder, part.rows.start, part.positions, part.table.slots, part.sees, reach, part.starts)
    return builder.list()


def add_near(
    builder: WorkListBuilder,
    row: int,
    positions: Index,
    slots: Index,
    sees: Index | int | None,
    reach: int,
    starts: Index | None = None,
) -> None:
    """Rows from `row` on, at `positions`, see their neighbours among the first `sees` `slots` of a canvas.

    `starts` is as of `neighbours`.
    """
    first, end = neighbours(positions, len(slots) if sees is None else sees, reach, starts)
    apart = np.flatnonzero(first[1:] > end[:-1]) + 1
    at = builder.slots(slots)
    for low, stop in pairwise([0, *apart.tolist(), len(positions)]):
        while low < stop:
            high = min(stop, int(np.searchsorted(positions, positions[low] + NEAR_TILE)))
            base, count = int(first[low]), int(end[high - 1] - first[low])
            builder.add(row + low, high - low, at + base, count, end[low:high] - base, first[low:high] - base)
            low = high


def _shares(part: StageRows) -> bool:
    """Whether all its rows see the whole of a shared prefix."""
    return bool(part.table.common) and (part.sees is None or part.sees[0] >= _lead(part))


def _lead(part: StageRows) -> int:
    return len(part.table.slots) - len(part.table.own)


def _add_group(builder: WorkListBuilder, group: list[StageRows]) -> None:
    lead = _lead(group[0])
    if len(group) == 1:
        _add(builder, group[0], 0)
        return
    first, last = group[0].rows.start, group[-1].rows.stop
    builder.add(first, last - first, builder.slots(group[0].table.slots[:lead]), lead, None)
    for part in group:
        _add(builder, part, lead)


def _add(builder: WorkListBuilder, part: StageRows, start: int) -> None:
    slots = part.table.slots[start:]
    if part.sees is None:
        if len(slots):
            builder.add(part.rows.start, len(part.positions), builder.slots(slots), len(slots), None)
        return
    sees = part.sees - start
    at = builder.slots(slots[: sees[-1]])
    for first, last in _tiles(sees):
        reach = int(sees[last - 1])
        if reach:
            limits = None if sees[first] == reach else sees[first:last]
            builder.add(part.rows.start + first, last - first, at, reach, limits)


def _add_apart(builder: WorkListBuilder, part: StageRows) -> None:
    count = len(part.positions)
    sees = np.full(count, len(part.table.slots)) if part.sees is None else part.sees
    at = builder.slots(part.table.slots[: sees[-1]])
    for first, last in pairwise(_edges(sees)):
        builder.add(part.rows.start + first, last - first, at, int(sees[first]), None)


def _edges(sees: Index) -> list[int]:
    """Starts of the ranges of rows that see the same positions, then the number of rows."""
    return [0, *(np.flatnonzero(np.diff(sees)) + 1).tolist(), len(sees)]


def _tiles(sees: Index) -> Iterator[tuple[int, int]]:
    """Ranges of rows that form a unit: long runs that see the same positions, or neighbours up to a tile."""
    start = 0
    for begin, end in pairwise(_edges(sees)):
        if end - begin >= TILE // 2:
            if start < begin:
                yield start, begin
            yield begin, end
            start = end
        elif end - start > TILE:
            yield start, begin
            start = begin
    if start < len(sees):
        yield start, len(sees)


def computed_parts(parts: list[StageRows]) -> list[StageRows]:
    """The same canvases with only the rows that are computed, renumbered. Which rows a pick takes is not known yet."""
    computed, at = [], 0
    for part in parts:
        count = part.span.count
        sees = part.sees
        if part.span.pick is None:
            index: slice | Index = np.flatnonzero(part.span.computed[part.positions])
        else:
            if sees is not None and len(sees) and sees[0] != sees[-1]:
                raise PlanError("rows are picked where not every row attends to the same positions")
            index = slice(count)
        sees = None if sees is None else sees[index]
        starts = None if part.starts is None else part.starts[index]
        rows = slice(at, at + count)
        computed.append(replace(part, positions=part.positions[index], rows=rows, sees=sees, starts=starts))
        at += count
    return computed


def neighbour_places(parts: list[StageRows], device: torch.device) -> Neighbours:
    """Where the neighbours of all rows are, as only the device knows which of these are computed."""
    slots, places, at = list[Index](), list[Index](), 0
    for part in parts:
        end = len(part.table.slots) if part.sees is None else part.sees
        ends = np.broadcast_to(end, part.positions.shape)
        places.append(at + np.stack([part.positions, np.zeros_like(part.positions), ends]))
        slots.append(part.table.slots)
        at += len(part.table.slots)
    return Neighbours(send(np.concatenate(slots), device), send(np.concatenate(places, axis=1), device))


def signals_of(items: Sequence[tuple[CanvasState, Plan]], device: torch.device) -> Signals | None:
    """What the rows of the first stage take in that are denoised; None where there are none."""
    rows, slots, at = list[Index](), list[Index](), 0
    for state, plan in items:
        positions = plan.spans[0].positions
        noisy = np.flatnonzero(state.canvas.noisy[positions])
        rows.append(at + noisy)
        slots.append(state.places[positions[noisy]] if state.conditioned else np.full(len(noisy), -1))
        at += len(positions)
    both = np.stack([np.concatenate(rows), np.concatenate(slots)])
    return Signals(*send(both, device)) if both.size else None

"""The work list of a stage: which slots its rows attend to."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from remask.engine.stage_rows import StageRows
from remask.model.runs import Index
from remask.model.work_list import WorkList, WorkListBuilder

TILE = 128  # most rows of a unit whose rows see different parts of a canvas


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
        if group and (not shares or part.branch.sharing != group[0].branch.sharing):
            _add_group(builder, group)
            group = []
        if shares:
            group.append(part)
        else:
            _add(builder, part, 0)
    if group:
        _add_group(builder, group)
    return builder.list()


def _shares(part: StageRows) -> bool:
    """Whether all its rows see the whole of a shared prefix."""
    return bool(part.table.common) and (part.sees is None or part.sees[0] >= _lead(part))


def _lead(part: StageRows) -> int:
    return len(part.table.slots) - len(part.table.own)


def _add_group(builder: WorkListBuilder, group: list[StageRows]) -> None:
    """Canvases that begin with the same slots."""
    lead = _lead(group[0])
    if len(group) == 1:
        _add(builder, group[0], 0)
        return
    first, last = group[0].rows.start, group[-1].rows.stop
    builder.add(first, last - first, builder.slots(group[0].table.slots[:lead]), lead, None)
    for part in group:
        _add(builder, part, lead)


def _add(builder: WorkListBuilder, part: StageRows, start: int) -> None:
    """One canvas' attention to its slots from position `start` on."""
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

"""Segments: which slots the rows of a stage attend to, read in place wherever they stand in one run."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from remask.engine.stage_rows import Index, StageRows, send_run
from remask.models.sending import send
from remask.models.stage import Cascade, Direct, Segments

TILE = 128  # rows that see different parts of a canvas are masked together, at most so many at a time


def make_segments(parts: list[StageRows], device: torch.device, apart: bool = False) -> Segments:
    """Segments of all `parts`, in their order. Neighbours that share a leading run of slots read it together.

    With `apart` no segment depends on what else is in the pass, on where slots are, or on which rows that see less are
    computed too: rows attend together where they are of one canvas and see the same.
    """
    if apart:
        return tuple(segment for part in parts if len(part.positions) for segment in _apart(part, device))
    segments: list[Direct | Cascade] = []
    group: list[StageRows] = []
    for part in [part for part in parts if len(part.positions)]:
        shares = _shares(part)
        if group and (not shares or part.branch.sharing != group[0].branch.sharing):
            segments.append(_cascade(group, device))
            group = []
        if shares:
            group.append(part)
        else:
            segments.extend(_direct(part, device))
    if group:
        segments.append(_cascade(group, device))
    return tuple(segments)


def _shares(part: StageRows) -> bool:
    """Whether its rows read a common run in place. Not where they are that run's own rows and more.

    Scores against a common run are held in full, and for so many rows they would outweigh a copy of its K and V.
    """
    lead = len(part.table.slots) - len(part.table.own)
    return bool(part.table.common) and not part.positions[0] < lead < len(part.positions)


def _direct(part: StageRows, device: torch.device) -> Iterator[Direct]:
    slots = part.table.slots
    if part.sees is None:
        yield Direct(part.rows, send_run(slots, device))
        return
    for first, last in _tiles(part.sees):
        sees = part.sees[first:last]
        reach = int(sees[-1])
        rows = slice(part.rows.start + first, part.rows.start + last)
        visible = None if sees[0] == reach else send(np.arange(reach) < sees[:, None], device)
        yield Direct(rows, send_run(slots[:reach], device), visible)


def _apart(part: StageRows, device: torch.device) -> Iterator[Direct]:
    count = len(part.positions)
    sees = np.full(count, len(part.table.slots)) if part.sees is None else part.sees
    edges = [0, *(np.flatnonzero(np.diff(sees)) + 1).tolist(), count]
    for first, last in pairwise(edges):
        rows = slice(part.rows.start + first, part.rows.start + last)
        yield Direct(rows, send_run(part.table.slots[: sees[first]], device))


def _tiles(sees: Index) -> Iterator[tuple[int, int]]:
    """Ranges of rows that attend together: those that see the same if they are many, else neighbours up to a tile."""
    edges = [0, *(np.flatnonzero(np.diff(sees)) + 1).tolist(), len(sees)]
    start = 0
    for begin, end in pairwise(edges):
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


def _cascade(group: list[StageRows], device: torch.device) -> Cascade:
    counts = [len(part.positions) for part in group]
    lead = sum(run.stop - run.start for run in group[0].table.common)
    reaches = [len(part.table.slots) if part.sees is None else int(part.sees[-1]) for part in group]
    widths = [reach - lead for reach in reaches]
    # Rows that see nothing but the common run get one of its slots as padding: a slot of their own may be unwritten.
    slots = [
        part.table.own[:width] if width else part.table.slots[:1] for part, width in zip(group, widths, strict=True)
    ]
    most = max(len(own) for own in slots)
    starts = [part.rows.start - group[0].rows.start for part in group]
    own = np.stack([np.pad(s, (0, most - len(s)), mode="edge") for s in slots])
    ragged = len(set(counts)) > 1
    column = np.arange(max(counts))
    queries = np.stack([start + np.minimum(column, count - 1) for start, count in zip(starts, counts, strict=True)])
    back = np.concatenate([index * max(counts) + np.arange(count) for index, count in enumerate(counts)])
    return Cascade(
        rows=slice(group[0].rows.start, group[-1].rows.stop),
        common=group[0].table.common,
        own=send(own, device),
        queries=send(queries, device) if ragged else None,
        hidden=_hidden(group, lead, widths, most, max(counts), device),
        back=send(back, device) if ragged else None,
    )


def _hidden(
    group: list[StageRows], lead: int, widths: list[int], most: int, rows: int, device: torch.device
) -> torch.Tensor | None:
    """Which of the own slots, padded to `most`, each row does not see: bool [G, rows or 1, most]; None where none."""
    column = np.arange(most)
    limits = []
    for part, width in zip(group, widths, strict=True):
        if part.sees is None or part.sees[0] == part.sees[-1]:
            limits.append(np.full(rows, width))
        else:
            limits.append(np.pad(part.sees - lead, (0, rows - len(part.sees)), mode="edge"))
    hidden = column >= np.stack(limits)[:, :, None]
    if not hidden.any():
        return None
    alike = (hidden == hidden[:, :1]).all()
    return send(hidden[:, :1] if alike else hidden, device)

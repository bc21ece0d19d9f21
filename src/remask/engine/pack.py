"""Packing: plans of many canvases, at different steps and under different policies, as one step batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Plan
from remask.engine.canvas_state import CanvasState, predicting_rows
from remask.engine.stage_rows import Index, StageRows, send, send_run
from remask.engine.work import make_work
from remask.errors import PlanError
from remask.models.stage import Partial, Pick, Restore, Save, Stage, StepBatch


def pack(
    items: Sequence[tuple[CanvasState, Plan]], device: torch.device, first: int = 0, apart: bool = False
) -> StepBatch:
    """One forward pass over `items`, whose rows follow one another in the order given.

    With `first` only the layers from there on are packed, to go on with the rows that leave the layer before. With
    `apart` every canvas attends on its own; see `make_work`.

    Canvases that lease the same prefix should stand side by side, as they then read it once. The logits of the batch
    come in the same order, each canvas' predicted positions ascending. Plans and canvases are not changed.
    """
    ends = {span.layers.stop for _, plan in items for span in plan.spans}
    ends |= {table.layers.stop for branch, _ in items for table in branch.tables}
    edges = sorted(end for end in ends if end > first)
    stages: list[Stage] = []
    before = _parts(items, first - 1) if first else []
    for start, stop in zip([first, *edges], edges, strict=False):
        parts = _parts(items, start)
        stages.append(_stage(range(start, stop), parts, before, stages[-1] if stages else None, device, apart))
        before = parts
    tokens = np.concatenate([part.branch.canvas.tokens[part.positions] for part in _parts(items, 0)])
    predict = [
        part.rows.start + np.searchsorted(part.positions, predicting_rows(plan.predict, branch.shift))
        for part, (branch, plan) in zip(before, items, strict=True)
    ]
    return StepBatch(
        tokens=send(tokens, device),
        stages=tuple(stages),
        predict=send(np.concatenate(predict), device),
        row_layers=sum(plan.cost for _, plan in items),
    )


def _parts(items: Sequence[tuple[CanvasState, Plan]], layer: int) -> list[StageRows]:
    parts = []
    at = 0
    for branch, plan in items:
        span = next(span for span in plan.spans if layer in span.layers)
        table = next(table for table in branch.tables if layer in table.layers)
        positions = np.flatnonzero(span.rows)
        sees = None if plan.sees is None else plan.sees[positions]
        parts.append(StageRows(branch, span, table, positions, slice(at, at + len(positions)), sees))
        at += len(positions)
    return parts


def _stage(
    layers: range,
    parts: list[StageRows],
    before: list[StageRows],
    previous: Stage | None,
    device: torch.device,
    apart: bool,
) -> Stage:
    same = bool(before) and all(
        np.array_equal(part.positions, old.positions) for part, old in zip(parts, before, strict=True)
    )
    written, slots = _writes(parts)
    partial = _partial(parts, device) if any(part.span.pick or part.span.held is not None for part in parts) else None
    return Stage(
        layers=layers,
        positions=previous.positions
        if same and previous is not None
        else send(np.concatenate([part.positions for part in parts]), device),
        slots=send(slots, device),
        written=None if written is None else send(written, device),
        carry=None if same or not before else _carry(parts, before, device),
        work=make_work(parts if partial is None else _computed_parts(parts), apart),
        restore=() if same or not before else _restores(layers.start, parts, before, device),
        save=_saves(layers.start, parts, device),
        outputs=any(part.branch.outputs for part in parts),
        partial=partial,
    )


def _computed_parts(parts: list[StageRows]) -> list[StageRows]:
    """The same canvases with the rows that are computed, numbered among those. Which ones a pick takes stays open."""
    computed, at = [], 0
    for part in parts:
        count = _computed_count(part)
        if part.sees is not None:
            raise PlanError("all rows are computed where not every row attends to all positions")
        computed.append(replace(part, positions=part.positions[:count], rows=slice(at, at + count)))
        at += count
    return computed


def _computed_count(part: StageRows) -> int:
    chosen = 0 if part.span.pick is None else part.span.pick.count
    return int(part.span.computed.sum()) + chosen


def _partial(parts: list[StageRows], device: torch.device) -> Partial:
    computed: list[Index] = []
    picks = {by: _Picked() for by in ("value", "key")}
    at = 0
    for number, part in enumerate(parts):
        fixed = part.rows.start + np.flatnonzero(part.span.computed[part.positions])
        computed.append(fixed)
        at += len(fixed)
        if part.span.pick is not None:
            among = part.rows.start + np.flatnonzero(part.span.pick.among[part.positions])
            count = part.span.pick.count
            computed.append(among[:count])
            picks[part.span.pick.by].add(number, among, at + np.arange(count))
            at += count
    slots = np.concatenate([part.table.slots[part.positions] for part in parts])
    sent = tuple(found.send(by == "key", device) for by, found in picks.items() if found.rows)
    return Partial(send(np.concatenate(computed), device), sent, send(slots, device))


@dataclass(slots=True)
class _Picked:
    """The canvases of a stage that pick by one kind of vector; see `Pick`."""

    rows: list[Index] = field(default_factory=list)
    owner: list[Index] = field(default_factory=list)
    order: list[Index] = field(default_factory=list)
    target: list[Index] = field(default_factory=list)
    seen: int = 0

    def add(self, number: int, among: Index, target: Index) -> None:
        """Canvas `number` picks of the rows `among` as many as `target` has places."""
        self.rows.append(among)
        self.owner.append(np.full(len(among), number))
        self.order.append(self.seen + np.arange(len(target)))
        self.target.append(target)
        self.seen += len(among)

    def send(self, keys: bool, device: torch.device) -> Pick:
        """As index tensors."""
        lists = (self.rows, self.owner, self.order, self.target)
        rows, owner, order, target = (send(np.concatenate(index), device) for index in lists)
        return Pick(rows, owner, order, target, keys)


def _writes(parts: list[StageRows]) -> tuple[Index | None, Index]:
    """Which of the computed rows write their K/V (None: all), and the slots of those that are known beforehand."""
    rows, slots, frozen, at = [], [], False, 0
    for part in parts:
        fixed = part.positions[part.span.computed[part.positions]]
        keep = np.ones(_computed_count(part), dtype=np.bool_)  # the fixed rows, then those that a pick takes
        if part.span.frozen is not None:
            keep[: len(fixed)] = ~part.span.frozen[fixed]
            frozen = frozen or not keep.all()
        rows.append(at + np.flatnonzero(keep))
        slots.append(part.table.slots[fixed[keep[: len(fixed)]]])
        at += len(keep)
    return np.concatenate(rows) if frozen else None, np.concatenate(slots)


def _carry(parts: list[StageRows], before: list[StageRows], device: torch.device) -> tuple[Tensor, Tensor | None]:
    source, target = [], []
    for part, old in zip(parts, before, strict=True):
        _, here, there = np.intersect1d(part.positions, old.positions, assume_unique=True, return_indices=True)
        source.append(old.rows.start + there)
        target.append(part.rows.start + here)
    rows = np.concatenate(target)
    complete = len(rows) == parts[-1].rows.stop
    return send(np.concatenate(source), device), None if complete else send(rows, device)


def _restores(layer: int, parts: list[StageRows], before: list[StageRows], device: torch.device) -> tuple[Restore, ...]:
    restores = []
    for part, old in zip(parts, before, strict=True):
        joining = np.setdiff1d(part.positions, old.positions, assume_unique=True)
        if not len(joining):
            continue
        if part.branch.restored is None:
            raise PlanError(f"rows that join at layer {layer} must have stored states")
        rows = send_run(part.rows.start + np.searchsorted(part.positions, joining), device)
        restores.append(Restore(rows, part.branch.restored[layer - 1], send_run(joining, device)))
    return tuple(restores)


def _saves(layer: int, parts: list[StageRows], device: torch.device) -> tuple[Save, ...]:
    saves = []
    for part in parts:
        if part.span.save is None or part.span.layers.start != layer:
            continue
        if part.branch.states is None or not part.span.save[part.positions].all():
            raise PlanError(f"layer {layer}: states are kept of all live rows, on a canvas that has room for them")
        saves.append(Save(part.rows, part.branch.states[layer - 1], send_run(part.positions, device)))
    return tuple(saves)

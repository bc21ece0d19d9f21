"""Packing: plans of many canvases, at different steps and under different policies, as one step batch."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, predicting_rows
from remask.engine.stage_rows import StageRows
from remask.engine.stage_work import make_work
from remask.engine.token_buffer import TokenBuffer
from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.runs import Index, send_run
from remask.model.stage import Partial, Pick, Restore, Save, Stage, StepBatch
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Span, Spans, crossing


def pack(
    items: Sequence[tuple[CanvasState, Plan]], device: torch.device, first: int = 0, separately: bool = False
) -> StepBatch:
    """One forward pass over `items`, whose rows follow one another in the order given.

    With `first` only the layers from `first` on are packed; the pass continues with the rows that leave the layer
    before. With `separately` every canvas attends by itself; see `make_work`.

    Canvases that lease the same prefix should be neighbours, because they then read it once. Logits come in the order
    of the canvases, each canvas' predicted positions ascending. Plans and canvases are not changed.
    """
    return _lay_out(items, device, first, separately).fill(items, device)


def pack_layer(items: Sequence[tuple[CanvasState, Plan]], device: torch.device, layer: int, separately: bool) -> Stage:
    """The stage of `layer` >= 1 alone, which continues with the rows that leave the layer before. Changes nothing."""
    before, parts = _parts(items, layer - 1), _parts(items, layer)
    return _stage(range(layer, layer + 1), parts, before, None, device, separately)


class Packer:
    """Packs one pass after the other. Where canvases and spans are those of an earlier pass, only tokens are new.

    It keeps two layouts, because passes alternate between refreshes and steps between refreshes. A returned batch is
    valid until the next pass is packed.
    """

    def __init__(self, device: torch.device, separately: bool, token_buffer: TokenBuffer | None = None) -> None:
        self.device, self.separately, self.token_buffer = device, separately, token_buffer
        self._layouts: deque[_Layout] = deque(maxlen=2)  # the last one first
        self.reused = 0  # passes that reused a layout

    def pack(self, items: Sequence[tuple[CanvasState, Plan]], first: int = 0) -> StepBatch:
        """As the function `pack`. Layouts that start at a later layer are not kept."""
        if first:
            return pack(items, self.device, first, self.separately)
        for layout in self._layouts:
            if layout.serves(items):
                self.reused += 1
                self._layouts.remove(layout)
                break
        else:
            layout = _lay_out(items, self.device, 0, self.separately)
        self._layouts.appendleft(layout)
        if self.token_buffer is None:
            return layout.fill(items, self.device)
        return layout.fill_from(self.token_buffer, items)

    def pack_layer(self, items: Sequence[tuple[CanvasState, Plan]], layer: int) -> Stage:
        """As the function `pack_layer`."""
        return pack_layer(items, self.device, layer, self.separately)

    def forget(self) -> None:
        """Drop the layouts of the last passes, with their canvases and device tensors."""
        self._layouts.clear()


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """A packed pass without its tokens and predictions.

    Attributes:
        canvases: the canvases, each with its spans and how many positions its rows attend to.
        stages: the packed stages.
        starts: first row of each canvas in the last stage.
        row_layers: work of the pass.
        tokens: the tokens of each canvas, and the index of those that enter the first stage; None: all.
        offsets: for each canvas, the difference between a position and its row in the last stage, [N]. None where the
            live rows of a canvas are not consecutive.
        picks: whether layers choose rows on the device.
        entering: places in the token buffer of the rows of the first stage; empty until they are first needed.
    """

    canvases: tuple[tuple[CanvasState, Spans, Reach | None], ...]
    stages: tuple[Stage, ...]
    starts: tuple[int, ...]
    row_layers: int
    tokens: tuple[tuple[Index, Index | None], ...]
    offsets: Index | None
    picks: bool
    entering: list[Tensor] = field(default_factory=list)

    def serves(self, items: Sequence[tuple[CanvasState, Plan]]) -> bool:
        """Whether `items` are the same canvases, with the same spans."""
        if len(items) != len(self.canvases):
            return False
        for (branch, plan), (canvas, spans, sees) in zip(items, self.canvases, strict=True):
            if branch is not canvas or plan.spans is not spans or plan.sees is not sees:
                return False
        return True

    def fill(self, items: Sequence[tuple[CanvasState, Plan]], device: torch.device) -> StepBatch:
        """The batch of `items`, which have this layout. Tokens and predictions are sent in one copy."""
        numbers = [tokens if entering is None else tokens[entering] for tokens, entering in self.tokens]
        tokens, predict = self._sent(numbers, items, device)
        return StepBatch(tokens, self.fresh_stages() if self.picks else self.stages, predict, self.row_layers)

    def fill_from(self, token_buffer: TokenBuffer, items: Sequence[tuple[CanvasState, Plan]]) -> StepBatch:
        """As `fill`, with tokens from the `token_buffer`, after the host's changes were sent to it."""
        device, branches = token_buffer.values.device, [branch for branch, _ in items]
        if not self.entering:
            places = [branch.places[plan.spans[0].index] for branch, plan in items]
            self.entering.append(send(np.concatenate(places), device))
        changed, predict = self._sent(token_buffer.outgoing(branches), items, device)
        token_buffer.write(*changed.view(2, -1))
        for branch in branches:
            branch.sent()
        tokens = token_buffer.tokens(self.entering[0])
        return StepBatch(tokens, self.fresh_stages() if self.picks else self.stages, predict, self.row_layers)

    def fresh_stages(self) -> tuple[Stage, ...]:
        """The stages before their layers have chosen rows."""
        return tuple(map(_unchosen, self.stages))

    def _sent(
        self, numbers: Sequence[Index], items: Sequence[tuple[CanvasState, Plan]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The concatenated `numbers` and the predicted rows, sent in one copy."""
        first = sum(map(len, numbers))
        sent = send(np.concatenate([*numbers, *self._predicting(items)]), device)
        return sent[:first], sent[first:]

    def _predicting(self, items: Sequence[tuple[CanvasState, Plan]]) -> list[Index]:
        """The predicted rows of each canvas in the last stage, or of all of them together."""
        rows = [predicting_rows(plan.predicted, branch.shift) for branch, plan in items]
        if self.offsets is not None:
            return [np.concatenate(rows) + np.repeat(self.offsets, list(map(len, rows)))]
        spans = [plan.spans[-1] for _, plan in items]
        return [_places(*each) for each in zip(spans, rows, self.starts, strict=True)]


def _places(span: Span, positions: Index, start: int) -> Index:
    """Rows of the live `positions` of a span whose first row is `start`."""
    index = span.index
    if isinstance(index, slice):
        places: Index = positions + (start - index.start)
        return places
    return start + np.searchsorted(index, positions)


def _unchosen(stage: Stage) -> Stage:
    """The stage before its layers have chosen rows."""
    if stage.partial is None:
        return stage
    picks = tuple(replace(pick, chosen=[]) for pick in stage.partial.picks)
    return replace(stage, partial=replace(stage.partial, picks=picks))


def _lay_out(items: Sequence[tuple[CanvasState, Plan]], device: torch.device, first: int, separately: bool) -> _Layout:
    ends = {span.layers.stop for _, plan in items for span in plan.spans}
    ends |= {table.layers.stop for branch, _ in items for table in branch.tables}
    edges = sorted(end for end in ends if end > first)
    stages: list[Stage] = []
    before = _parts(items, first - 1) if first else []
    for start, stop in zip([first, *edges], edges, strict=False):
        parts = _parts(items, start)
        stages.append(_stage(range(start, stop), parts, before, stages[-1] if stages else None, device, separately))
        before = parts
    starts = tuple(part.rows.start for part in before)
    last = [part.span.index for part in before]
    offsets = [start - index.start for start, index in zip(starts, last, strict=True) if isinstance(index, slice)]
    return _Layout(
        tuple((branch, plan.spans, plan.sees) for branch, plan in items),
        tuple(stages),
        starts,
        sum(plan.cost for _, plan in items),
        tuple(_entering(branch.canvas.tokens, plan.spans[0].index) for branch, plan in items),
        np.array(offsets, dtype=np.int64) if len(offsets) == len(starts) else None,
        any(stage.partial is not None and len(stage.partial.picks) > 0 for stage in stages),
    )


def _entering(tokens: Index, index: slice | Index) -> tuple[Index, Index | None]:
    return (tokens[index], None) if isinstance(index, slice) else (tokens, index)


def _parts(items: Sequence[tuple[CanvasState, Plan]], layer: int) -> list[StageRows]:
    parts = []
    at = 0
    for branch, plan in items:
        span, table = plan.spans.at(layer), branch.table(layer)
        positions = span.positions
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
    separately: bool,
) -> Stage:
    same = bool(before) and all(
        part.span.rows is old.span.rows or np.array_equal(part.span.rows, old.span.rows)
        for part, old in zip(parts, before, strict=True)
    )
    written, slots = _writes(parts)
    partial, work = None, None if previous is None or previous.partial is not None else previous.work
    if any(part.span.pick or part.span.held is not None for part in parts):
        partial = _partial(layers.start, parts, device)
        work = make_work(_computed_parts(parts), separately)
    elif work is None or not same or not _attend_alike(parts, before):
        work = make_work(parts, separately)
    return Stage(
        layers=layers,
        positions=previous.positions
        if same and previous is not None
        else send(np.concatenate([part.positions for part in parts]), device),
        slots=send(slots, device),
        written=None if written is None else send(written, device),
        carry=None if same or not before else _carry(parts, before, device),
        work=work,
        restore=() if same or not before else _restores(layers.start, parts, before, device),
        save=_saves(layers.start, parts, device),
        outputs=any(part.branch.outputs for part in parts),
        partial=partial,
    )


def _attend_alike(parts: list[StageRows], before: list[StageRows]) -> bool:
    """Whether rows that are the same as in the stage before attend to the same slots."""
    return all(
        part.table is old.table and part.sees is None is old.sees for part, old in zip(parts, before, strict=True)
    )


def _computed_parts(parts: list[StageRows]) -> list[StageRows]:
    """The same canvases with only the rows that are computed, renumbered. Which rows a pick takes is not known yet."""
    computed, at = [], 0
    for part in parts:
        count = part.span.count
        sees = part.sees
        if sees is not None and part.span.pick is None:
            sees = sees[part.span.computed[part.positions]]
        elif sees is not None:
            if len(sees) and sees[0] != sees[-1]:
                raise PlanError("rows are picked where not every row attends to the same positions")
            sees = sees[:count]
        computed.append(replace(part, positions=part.positions[:count], rows=slice(at, at + count), sees=sees))
        at += count
    return computed


def _partial(layer: int, parts: list[StageRows], device: torch.device) -> Partial:
    computed: list[Index] = []
    picks: defaultdict[tuple[bool, int, int], _Picked] = defaultdict(_Picked)  # by keys, every, phase
    at = 0
    for number, part in enumerate(parts):
        fixed = part.rows.start + np.flatnonzero(part.span.computed[part.positions])
        computed.append(fixed)
        at += len(fixed)
        pick = part.span.pick
        if pick is not None:
            among, count = part.rows.start + np.flatnonzero(pick.among[part.positions]), pick.count
            computed.append(among[:count])
            phase = (layer - pick.first) % pick.every
            picks[pick.by == "key", pick.every, phase].add(number, among, at + np.arange(count))
            at += count
    slots = np.concatenate([part.table.slots[part.positions] for part in parts])
    sent = tuple(found.send(*how, device) for how, found in picks.items())
    return Partial(send(np.concatenate(computed), device), sent, send(slots, device))


@dataclass(slots=True)
class _Picked:
    """Canvases of a stage that pick rows by one kind of vector, in the same layers; see `Pick`."""

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

    def send(self, keys: bool, every: int, phase: int, device: torch.device) -> Pick:
        """As index tensors."""
        lists = (self.rows, self.owner, self.order, self.target)
        rows, owner, order, target = (send(np.concatenate(index), device) for index in lists)
        return Pick(rows, owner, order, target, keys, every, phase)


def _writes(parts: list[StageRows]) -> tuple[Index | None, Index]:
    """Which computed rows write their K/V (None: all), and the slots of those that are known before the pass."""
    slots = np.concatenate([part.table.slots[part.span.written_index] for part in parts])
    if all(part.span.writes_all for part in parts):
        return None, slots
    rows, at = [], 0
    for part in parts:
        span, count = part.span, part.span.count
        if span.writes_all:
            rows.append(np.arange(at, at + count))
        else:  # the fixed rows, then the picked ones
            rows += [at + span.written_rows, np.arange(at + span.fixed, at + count)]
        at += count
    return np.concatenate(rows), slots


def _carry(parts: list[StageRows], before: list[StageRows], device: torch.device) -> tuple[Tensor, Tensor | None]:
    source, target = [], []
    for part, old in zip(parts, before, strict=True):
        crossed = crossing(old.span, part.span)
        source.append(old.rows.start + crossed.source)
        target.append(part.rows.start + crossed.target)
    rows = np.concatenate(target)
    complete = len(rows) == parts[-1].rows.stop
    return send(np.concatenate(source), device), None if complete else send(rows, device)


def _restores(layer: int, parts: list[StageRows], before: list[StageRows], device: torch.device) -> tuple[Restore, ...]:
    restores = []
    for part, old in zip(parts, before, strict=True):
        crossed = crossing(old.span, part.span)
        joining, places, found = crossed.joining, crossed.joined, 0
        if not len(joining):
            continue
        for kept in part.branch.restored:
            inside = slice(*np.searchsorted(places, [kept.start, kept.stop]))
            if inside.start < inside.stop:
                rows = send_run(part.rows.start + joining[inside], device)
                positions = send_run(places[inside] - kept.start, device)
                restores.append(Restore(rows, kept.states[layer - 1], positions))
                found += inside.stop - inside.start
        if found < len(places):
            raise PlanError(f"rows that join at layer {layer} must have stored states")
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

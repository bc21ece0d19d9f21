"""Packing: plans of many canvases, at different steps and under different policies, as one step batch.

Passes without an engine are packed here, too.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, TokenBuffer, plain_table, predicting_rows
from remask.engine.stage_work import StageRows, computed_parts, make_near, make_work, neighbour_places, signals_of
from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.config import Sliding
from remask.model.stage import AdapterRows, Index, Partial, Pick, Restore, Save, Stage, StepBatch, send_run
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Mask, Span, Spans, crossing, starts_of
from remask.store.pages import PageRange

Items = list[tuple[CanvasState, Plan]]


@dataclass(frozen=True, slots=True)
class Target:
    """What passes are packed for."""

    device: torch.device  # where their tensors are
    separately: bool = False  # every canvas attends by itself; see `make_work`
    sliding: Sliding | None = None  # the model's layers with windows, if any
    roles: bool = False  # the model computes rows that are denoised otherwise than final ones

    def reach(self, layers: range) -> int | None:
        """How far to each side rows see where some of the `layers` have windows; None where none has."""
        sliding = self.sliding
        return sliding.reach if sliding is not None and any(layer in layers for layer in sliding.layers) else None


def pack(items: Sequence[tuple[CanvasState, Plan]], target: Target, first: int = 0) -> StepBatch:
    """One forward pass over `items`, whose rows follow one another in the order given.

    With `first` only the layers from `first` on are packed: the pass goes on with the rows that leave the layer before.
    Canvases that lease the same prefix should be neighbours, because they then read it once. Logits come in the order
    of the canvases, each canvas' predicted positions ascending.
    """
    return _lay_out(items, target, first).fill(items, target, None)


class Packer:
    """Packs one pass after the other. Where canvases and spans are those of an earlier pass, only tokens are new.

    It keeps two layouts, because passes alternate between refreshes and steps between them. A batch is valid until the
    next one.
    """

    def __init__(self, target: Target, token_buffer: TokenBuffer | None = None) -> None:
        self.target, self.token_buffer = target, token_buffer
        self._layouts: deque[_Layout] = deque(maxlen=2)  # the last one first
        self.reused = 0  # passes that reused a layout

    def pack(self, items: Items, first: int = 0) -> StepBatch:
        """As the function `pack`. Layouts that start at a later layer are not kept."""
        if first:
            return pack(items, self.target, first)
        for layout in self._layouts:
            if layout.serves(items):
                self.reused += 1
                self._layouts.remove(layout)
                break
        else:
            layout = _lay_out(items, self.target, 0)
        self._layouts.appendleft(layout)
        return layout.fill(items, self.target, self.token_buffer)

    def pack_layer(self, items: Items, layer: int) -> Stage:
        """The stage of `layer` >= 1 alone, which continues with the rows that leave the layer before."""
        before, parts = _parts(items, layer - 1, self.target), _parts(items, layer, self.target)
        return _stage(range(layer, layer + 1), parts, before, None, self.target)

    def forget(self) -> None:
        """Drop the layouts of the last passes, with their canvases and device tensors."""
        self._layouts.clear()


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """A packed pass without its tokens and predictions."""

    # The canvases, each with its spans and how many positions its rows attend to
    canvases: tuple[tuple[CanvasState, Spans, Reach | None], ...]
    stages: tuple[Stage, ...]  # the packed stages
    starts: tuple[int, ...]  # first row of each canvas in the last stage
    row_layers: int  # work of the pass
    # The tokens of each canvas, and the index of those that enter the first stage; None: all
    tokens: tuple[tuple[Index, Index | None], ...]
    picks: bool  # whether layers choose rows on the device
    # Places in the token buffer of the rows of the first stage; empty until they are first needed
    entering: list[Tensor] = field(default_factory=list)

    def serves(self, items: Sequence[tuple[CanvasState, Plan]]) -> bool:
        """Whether `items` are the same canvases, with the same spans."""
        if len(items) != len(self.canvases):
            return False
        for (state, plan), (canvas, spans, sees) in zip(items, self.canvases, strict=True):
            if state is not canvas or plan.spans is not spans or plan.sees is not sees:
                return False
        return True

    def fill(
        self, items: Sequence[tuple[CanvasState, Plan]], target: Target, token_buffer: TokenBuffer | None
    ) -> StepBatch:
        """The batch of `items`, which have this layout, with tokens from the `token_buffer` if there is one.

        Tokens, or the host's changes of the buffer, are sent in one copy with the predicted rows of the last stage.
        """
        numbers = list[Index]()
        if token_buffer is not None:
            numbers += token_buffer.outgoing([state for state, _ in items])
        else:
            for whole, entering in self.tokens:
                numbers.append(whole if entering is None else whole[entering])
        first = sum(map(len, numbers))
        for (state, plan), start in zip(items, self.starts, strict=True):
            rows, index = plan.predicted, plan.spans[-1].index
            if state.shift:
                rows = predicting_rows(rows, state.shift)
            if isinstance(index, slice):
                numbers.append(rows + (start - index.start))
            else:
                numbers.append(start + np.searchsorted(index, rows))
        sent = send(np.concatenate(numbers), target.device)
        tokens, predict = sent[:first], sent[first:]
        if token_buffer is not None:
            tokens = self._buffered(items, token_buffer, tokens)
        signals = signals_of(items, target.device) if target.roles else None
        stages = tuple(map(_unchosen, self.stages)) if self.picks else self.stages
        return StepBatch(tokens, stages, predict, self.row_layers, signals)

    def _buffered(
        self, items: Sequence[tuple[CanvasState, Plan]], token_buffer: TokenBuffer, changes: Tensor
    ) -> Tensor:
        """The tokens of `token_buffer` that enter the first stage, once the host's `changes` are written to it."""
        if not self.entering:
            places = [state.places[plan.spans[0].index] for state, plan in items]
            self.entering.append(send(np.concatenate(places), token_buffer.values.device))
        token_buffer.write(*changes.view(2, -1))
        for state, _ in items:
            state.sent()
        return token_buffer.tokens(self.entering[0])


def _unchosen(stage: Stage) -> Stage:
    if stage.partial is None:
        return stage
    picks = tuple(replace(pick, chosen=[]) for pick in stage.partial.picks)
    return replace(stage, partial=replace(stage.partial, picks=picks))


def _lay_out(items: Sequence[tuple[CanvasState, Plan]], target: Target, first: int) -> _Layout:
    ends = {span.layers.stop for _, plan in items for span in plan.spans}
    ends |= {table.layers.stop for state, _ in items for table in state.tables}
    edges = sorted(end for end in ends if end > first)
    stages: list[Stage] = []
    before = _parts(items, first - 1, target) if first else []
    for start, stop in zip([first, *edges], edges, strict=False):
        parts = _parts(items, start, target)
        previous = stages[-1] if stages else None
        stages.append(_stage(range(start, stop), parts, before, previous, target))
        if saves := _leaving(stop, parts):
            # A stage without layers has the rows of the stage before, and only keeps states.
            stages.append(replace(stages[-1], layers=range(stop, stop), carry=None, restore=(), save=saves))
        before = parts
    starts = tuple(part.rows.start for part in before)
    return _Layout(
        tuple((state, plan.spans, plan.sees) for state, plan in items),
        tuple(stage for stage in stages if len(stage.positions)),
        starts,
        sum(plan.cost for _, plan in items),
        tuple(_entering(state.canvas.tokens, plan.spans[0].index) for state, plan in items),
        any(stage.partial is not None and len(stage.partial.picks) > 0 for stage in stages),
    )


def _entering(tokens: Index, index: slice | Index) -> tuple[Index, Index | None]:
    return (tokens[index], None) if isinstance(index, slice) else (tokens, index)


def _parts(items: Sequence[tuple[CanvasState, Plan]], layer: int, target: Target) -> list[StageRows]:
    parts = []
    at = 0
    for state, plan in items:
        span, table = plan.spans.at(layer), state.table(layer)
        positions = span.positions
        sees = None if plan.sees is None else plan.sees[positions]
        behind = target.sliding is not None and target.sliding.behind
        starts = starts_of(positions, plan.sees) if behind else None
        parts.append(StageRows(state, span, table, positions, slice(at, at + len(positions)), sees, starts))
        at += len(positions)
    return parts


def _stage(
    layers: range,
    parts: list[StageRows],
    before: list[StageRows],
    previous: Stage | None,
    target: Target,
) -> Stage:
    same = bool(before) and all(
        part.span.rows is old.span.rows or np.array_equal(part.span.rows, old.span.rows)
        for part, old in zip(parts, before, strict=True)
    )
    written, slots = _writes(parts)
    # Rows that are the same as in the stage before, and attend to the same slots, have its work.
    alike = same and all(
        part.table is old.table and part.sees is None is old.sees for part, old in zip(parts, before, strict=True)
    )
    last = previous if alike else None
    device, reach = target.device, target.reach(layers)
    partial, attending = None, parts
    if any(part.span.pick or part.span.held is not None for part in parts):
        picks = any(part.span.pick for part in parts)
        partial = _partial(layers.start, parts, device, picks and target.sliding is not None)
        attending, last, reach = computed_parts(parts), None, None if picks else reach
    if last is None or last.partial is not None:
        work, near = make_work(attending, target.separately), None
    else:
        work, near = last.work, last.near
    if reach is not None and near is None:
        near = make_near(attending, reach)
    return Stage(
        layers=layers,
        positions=previous.positions
        if same and previous is not None
        else send(np.concatenate([part.positions for part in parts]), device),
        slots=send(slots, device),
        written=None if written is None else send(written, device),
        carry=None if same or not before else _carry(parts, before, device),
        work=work,
        near=near,
        restore=() if same or not before else _restores(layers.start, parts, before, device),
        save=_saves(layers.start, parts, device),
        outputs=any(part.state.outputs for part in parts),
        partial=partial,
        adapters=AdapterRows.of((part.state.adapter, len(part.positions)) for part in parts),
        roles=send(np.concatenate([part.state.canvas.noisy[part.positions] for part in parts]).astype(np.int64), device)
        if target.roles
        else None,
    )


def _partial(layer: int, parts: list[StageRows], device: torch.device, slides: bool) -> Partial:
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
    sent = tuple(picked.send(*how, device) for how, picked in picks.items())
    neighbours = neighbour_places(parts, device) if slides else None
    return Partial(send(np.concatenate(computed), device), sent, send(slots, device), neighbours)


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
        joining, places, states = crossed.joining, crossed.joining_positions, part.state.restored
        if not len(joining):
            continue
        if states is None or places[-1] >= states.shape[1]:
            raise PlanError(f"rows that join at layer {layer} must have stored states")
        rows, positions = send_run(part.rows.start + joining, device), send_run(places, device)
        restores.append(Restore(rows, states[layer - 1], positions))
    return tuple(restores)


def _saves(layer: int, parts: list[StageRows], device: torch.device) -> tuple[Save, ...]:
    saves = []
    for part in parts:
        if part.span.save is None or part.span.layers.start != layer:
            continue
        if part.state.states is None or not part.span.save[part.positions].all():
            raise PlanError(f"layer {layer}: states are kept of all live rows, on a canvas that has room for them")
        saves.append(Save(part.rows, part.state.states[layer - 1], send_run(part.positions, device)))
    return tuple(saves)


def _leaving(stop: int, parts: list[StageRows]) -> tuple[Save, ...]:
    """The saves of canvases whose pass ends with the layer before `stop`, and is gone on with in another."""
    return tuple(
        Save(part.rows, part.state.states[stop - 1], slice(None))
        for part in parts
        if part.state.leaves == stop and part.state.states is not None
    )


def pack_uncached(
    model: Transformer,
    canvases: Sequence[Canvas],
    predict: Sequence[Mask] | None = None,
    sees: Sequence[Reach | None] | None = None,
) -> StepBatch:
    """A pass over `canvases`, whose K/V go to consecutive slots: those of the first from slot 0 on, and so forth.

    The pool that the pass runs on needs pages of one slot. `predict` are the positions whose hidden states the pass
    returns, bool [T] for each canvas; None returns none. `sees` is how many leading positions each row attends to,
    int64 [T] for each canvas; None: all.
    """
    layers, items, slot = range(model.config.layers), [], 0
    for index, canvas in enumerate(canvases):
        tokens = len(canvas)
        extent = PageRange(layers, np.arange(slot, slot + tokens), 1, tokens)
        state = CanvasState(canvas, Ledger(len(layers), tokens, None), (plain_table(extent),), shift=model.config.shift)
        rows = np.ones(tokens, dtype=np.bool_)
        reach = None if sees is None else sees[index]
        wanted = ~rows if predict is None else predict[index]
        items.append((state, Plan((Span(layers, rows),), predict=wanted, sees=reach)))
        slot += tokens
    shape = model.config
    return pack(items, Target(model.device, sliding=shape.sliding, roles=shape.self_conditioning))

"""Packing: plans of many canvases, at different steps and under different policies, become one step batch.

Passes without an engine are packed here, too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, TokenBuffer, plain_table, predicting_rows
from remask.engine.stage_work import StageRows, computed_parts, make_partial, make_sliding_work, make_work, signals_of
from remask.errors import PlanError
from remask.machine.transfers import send
from remask.model.config import Sliding
from remask.model.stage import AdapterRows, Index, Restore, Save, Stage, StepBatch, send_run
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Mask, Span, Spans, crossing, starts_of
from remask.store.pages import Extent

Items = list[tuple[CanvasState, Plan]]


@dataclass(frozen=True, slots=True)
class Target:
    """The device and model for which passes are packed."""

    device: torch.device
    separate: bool = False  # every canvas attends by itself; see `make_work`
    sliding: Sliding | None = None  # the model's layers with windows, if any
    roles: bool = False  # the model computes denoised rows differently from final ones

    def reach(self, layers: range) -> int | None:
        """How many positions to each side rows see in those of `layers` that have windows; None if none has."""
        sliding = self.sliding
        if sliding is None or not any(layer in layers for layer in sliding.layers):
            return None
        return sliding.reach


def pack(items: Sequence[tuple[CanvasState, Plan]], target: Target, first: int = 0) -> StepBatch:
    """One forward pass over `items`, with their rows in this order.

    With `first` > 0 only the layers from `first` on are packed, and the pass goes on with the rows that leave the layer
    before. Canvases that lease the same prefix should be adjacent, because then they read it once. Logits come in the
    order of the canvases, and for each canvas in the order of the predicted positions.
    """
    return _lay_out(items, target, first).fill(items, target, None)


class Packer:
    """Packs one pass after the other. If canvases and spans are those of an earlier pass, only tokens are packed anew.

    It stores two layouts, because passes alternate between refreshes and steps between them. A batch is valid until the
    next one.
    """

    def __init__(self, target: Target, token_buffer: TokenBuffer | None = None) -> None:
        self.target = target
        self.token_buffer = token_buffer
        self._layouts: deque[_Layout] = deque(maxlen=2)  # the last one first
        self.reuses = 0  # passes that reused a layout

    def pack(self, items: Items, first: int = 0) -> StepBatch:
        """See the function `pack`. Layouts that start at a later layer are not stored."""
        if first:
            return pack(items, self.target, first)
        for layout in self._layouts:
            if layout.matches(items):
                self.reuses += 1
                self._layouts.remove(layout)
                break
        else:
            layout = _lay_out(items, self.target, 0)
        self._layouts.appendleft(layout)
        return layout.fill(items, self.target, self.token_buffer)

    def pack_layer(self, items: Items, layer: int) -> Stage:
        """The stage of `layer` >= 1 alone, which continues with the rows that leave the layer before."""
        previous_parts = _parts(items, layer - 1, self.target)
        parts = _parts(items, layer, self.target)
        return _stage(range(layer, layer + 1), parts, previous_parts, previous=None, target=self.target)

    def forget_layouts(self) -> None:
        """Drop the layouts of the last passes, with their canvases and device tensors."""
        self._layouts.clear()


class _CanvasRows(NamedTuple):
    """The rows of a canvas in a pass."""

    state: CanvasState
    spans: Spans
    sees: Reach | None  # how many leading positions each row attends to; None: all


class _FirstTokens(NamedTuple):
    """Where the tokens of a canvas in the first stage are."""

    tokens: Index
    first_index: Index | None  # into `tokens`; None: all of them

    @classmethod
    def of(cls, tokens: Index, index: slice | Index) -> "_FirstTokens":
        """The tokens of a canvas at `index`. A slice gives a view of `tokens`, which stays up to date."""
        return cls(tokens[index], None) if isinstance(index, slice) else cls(tokens, index)


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """A packed pass without its tokens and predictions."""

    canvases: tuple[_CanvasRows, ...]
    stages: tuple[Stage, ...]
    starts: tuple[int, ...]  # first row of each canvas in the last stage
    row_layers: int  # that the pass computes
    first_tokens: tuple[_FirstTokens, ...]  # of each canvas
    picks: bool  # whether layers choose rows on the device
    # Token-buffer slots of the rows of the first stage, one tensor; empty until they are first needed
    first_slots: list[Tensor] = field(default_factory=list)

    def matches(self, items: Sequence[tuple[CanvasState, Plan]]) -> bool:
        """Whether `items` are the same canvases and rows. Compares identity, as repeated plans share their arrays."""
        if len(items) != len(self.canvases):
            return False
        for (state, plan), (laid_state, spans, sees) in zip(items, self.canvases, strict=True):
            if state is not laid_state or plan.spans is not spans or plan.sees is not sees:
                return False
        return True

    def fill(
        self, items: Sequence[tuple[CanvasState, Plan]], target: Target, token_buffer: TokenBuffer | None
    ) -> StepBatch:
        """Send the tokens of `items`, which have this layout, and return their batch.

        With a `token_buffer` the host's changes of it are sent instead. Predicted rows are sent in the same copy.
        """
        indices = list[Index]()
        if token_buffer is not None:
            indices += token_buffer.pending_changes([state for state, _ in items])
        else:
            for canvas_tokens, first_index in self.first_tokens:
                indices.append(canvas_tokens if first_index is None else canvas_tokens[first_index])
        count = sum(map(len, indices))
        for (state, plan), start in zip(items, self.starts, strict=True):
            rows, index = plan.predicted, plan.spans[-1].index
            if state.shift:
                rows = predicting_rows(rows, state.shift)
            if isinstance(index, slice):
                indices.append(rows + (start - index.start))
            else:
                indices.append(start + np.searchsorted(index, rows))
        device_indices = send(np.concatenate(indices), target.device)
        tokens, predict = device_indices[:count], device_indices[count:]
        if token_buffer is not None:
            tokens = self._update_buffer(items, token_buffer, tokens)
        signals = signals_of(items, target.device) if target.roles else None
        stages = tuple(map(_without_choices, self.stages)) if self.picks else self.stages
        return StepBatch(tokens, stages, predict, self.row_layers, signals)

    def _update_buffer(
        self, items: Sequence[tuple[CanvasState, Plan]], token_buffer: TokenBuffer, changes: Tensor
    ) -> Tensor:
        """Write the host's `changes` [2 n] to `token_buffer`. Returns the tokens of the first stage from it."""
        if not self.first_slots:
            slots = [state.buffer_slots[plan.spans[0].index] for state, plan in items]
            self.first_slots.append(send(np.concatenate(slots), token_buffer.values.device))
        token_buffer.write(*changes.view(2, -1))
        for state, _ in items:
            state.mark_sent()
        return token_buffer.tokens(self.first_slots[0])


def _without_choices(stage: Stage) -> Stage:
    """`stage` with no rows picked yet, as the same stage of the last pass may have picked some."""
    if stage.partial is None:
        return stage
    picks = tuple(replace(pick, picked_rows=[]) for pick in stage.partial.picks)
    return replace(stage, partial=replace(stage.partial, picks=picks))


def _lay_out(items: Sequence[tuple[CanvasState, Plan]], target: Target, first: int) -> _Layout:
    """The layout of a pass over `items` from layer `first` on."""
    stops = {span.layers.stop for _, plan in items for span in plan.spans}
    stops |= {table.layers.stop for state, _ in items for table in state.tables}
    edges = sorted(stop for stop in stops if stop > first)
    stages: list[Stage] = []
    previous_parts = _parts(items, first - 1, target) if first else []
    for start, stop in zip([first, *edges], edges, strict=False):
        parts = _parts(items, start, target)
        previous = stages[-1] if stages else None
        stages.append(_stage(range(start, stop), parts, previous_parts, previous, target))
        if saves := _chunk_saves(stop, parts):
            # A stage without layers has the rows of the stage before, and only saves states.
            stages.append(replace(stages[-1], layers=range(stop, stop), carry=None, restore=(), save=saves))
        previous_parts = parts
    return _Layout(
        canvases=tuple(_CanvasRows(state, plan.spans, plan.sees) for state, plan in items),
        stages=tuple(stage for stage in stages if len(stage.positions)),
        starts=tuple(part.rows.start for part in previous_parts),
        row_layers=sum(plan.cost for _, plan in items),
        first_tokens=tuple(_FirstTokens.of(state.canvas.tokens, plan.spans[0].index) for state, plan in items),
        picks=any(stage.partial is not None and len(stage.partial.picks) > 0 for stage in stages),
    )


def _parts(items: Sequence[tuple[CanvasState, Plan]], layer: int, target: Target) -> list[StageRows]:
    """The live rows of each canvas in `layer`."""
    parts = []
    start = 0
    for state, plan in items:
        span, table = plan.spans.at(layer), state.table(layer)
        positions = span.positions
        sees = None if plan.sees is None else plan.sees[positions]
        has_block_windows = target.sliding is not None and target.sliding.behind
        block_starts = starts_of(positions, plan.sees) if has_block_windows else None
        rows = slice(start, start + len(positions))
        parts.append(StageRows(state, span, table, positions, rows, sees, block_starts))
        start = rows.stop
    return parts


def _stage(
    layers: range, parts: list[StageRows], previous_parts: list[StageRows], previous: Stage | None, target: Target
) -> Stage:
    """The stage of `layers`, whose rows are `parts`. The stage before it has `previous_parts`, empty for the first.

    `previous` is the stage before if that was packed too; parts of it are reused.
    """
    device = target.device
    pairs = list(zip(parts, previous_parts, strict=True)) if previous_parts else []
    has_same_rows = bool(pairs) and all(
        part.span.rows is old.span.rows or np.array_equal(part.span.rows, old.span.rows) for part, old in pairs
    )
    # Rows that are the same as in the stage before, and attend to the same slots, have the same work.
    has_same_work = has_same_rows and all(
        part.table is old.table and part.sees is None is old.sees for part, old in pairs
    )
    partial = None
    if any(part.span.pick or part.span.held is not None for part in parts):
        slides = target.sliding is not None and any(part.span.pick for part in parts)
        partial = make_partial(layers.start, parts, device, slides=slides)
    reusable = previous if has_same_work and partial is None else None
    attending = parts if partial is None else computed_parts(parts)
    work, sliding_work = _attention_work(layers, attending, reusable, target)
    written, slots = _writes(parts)
    if has_same_rows and previous is not None:
        positions = previous.positions
    else:
        positions = send(np.concatenate([part.positions for part in parts]), device)
    roles = None
    if target.roles:
        noisy = np.concatenate([part.state.canvas.noisy[part.positions] for part in parts])
        roles = send(noisy.astype(np.int64), device)
    changes_rows = bool(pairs) and not has_same_rows
    return Stage(
        layers=layers,
        positions=positions,
        slots=send(slots, device),
        written_rows=None if written is None else send(written, device),
        carry=_carry(parts, previous_parts, device) if changes_rows else None,
        work=work,
        sliding_work=sliding_work,
        restore=_restores(layers.start, parts, previous_parts, device) if changes_rows else (),
        save=_saves(layers.start, parts, device),
        outputs=any(part.state.keeps_outputs for part in parts),
        partial=partial,
        adapters=AdapterRows.of((part.state.adapter, len(part.positions)) for part in parts),
        roles=roles,
    )


def _attention_work(
    layers: range, attending: list[StageRows], reusable: Stage | None, target: Target
) -> tuple[WorkList, WorkList | None]:
    """The work of the rows that attend, in layers with full attention and in layers with windows (None without such).

    If the device picks rows, there is no work with windows, because only the device knows which rows have them.
    `reusable` is the stage before if all rows attend to the same slots there.
    """
    reach = None if any(part.span.pick for part in attending) else target.reach(layers)
    if reusable is not None and reusable.partial is None:
        work, sliding_work = reusable.work, reusable.sliding_work
    else:
        work, sliding_work = make_work(attending, separate=target.separate), None
    if reach is not None and sliding_work is None:
        sliding_work = make_sliding_work(attending, reach)
    return work, sliding_work


def _writes(parts: list[StageRows]) -> tuple[Index | None, Index]:
    """Which computed rows write their K/V (None: all), and the slots of those that are known before the pass."""
    slots = np.concatenate([part.table.slots[part.span.written_index] for part in parts])
    if all(part.span.writes_all for part in parts):
        return None, slots
    rows = []
    start = 0
    for part in parts:
        span, count = part.span, part.span.count
        if span.writes_all:
            rows.append(np.arange(start, start + count))
        else:  # the fixed rows, then the picked ones
            rows += [start + span.written_rows, np.arange(start + span.fixed, start + count)]
        start += count
    return np.concatenate(rows), slots


def _carry(
    parts: list[StageRows], previous_parts: list[StageRows], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The rows of the previous stage that go on, and the rows that they are in this stage (None: all, in order)."""
    source, target = [], []
    for part, old in zip(parts, previous_parts, strict=True):
        rows = crossing(old.span, part.span)
        source.append(old.rows.start + rows.source)
        target.append(part.rows.start + rows.target)
    target_rows = np.concatenate(target)
    is_complete = len(target_rows) == parts[-1].rows.stop
    return send(np.concatenate(source), device), None if is_complete else send(target_rows, device)


def _restores(
    layer: int, parts: list[StageRows], previous_parts: list[StageRows], device: torch.device
) -> tuple[Restore, ...]:
    """The rows that join at `layer`, with the states from which they restart. Raises `PlanError` if a row has none."""
    restores = []
    for part, old in zip(parts, previous_parts, strict=True):
        rows = crossing(old.span, part.span)
        states = part.state.restore_states
        if not len(rows.joining):
            continue
        if states is None or rows.joining_positions[-1] >= states.shape[1]:
            raise PlanError(f"rows that join at layer {layer} must have stored states")
        stage_rows = send_run(part.rows.start + rows.joining, device)
        restores.append(Restore(stage_rows, states[layer - 1], send_run(rows.joining_positions, device)))
    return tuple(restores)


def _saves(layer: int, parts: list[StageRows], device: torch.device) -> tuple[Save, ...]:
    """The states to save that enter `layer`. Raises `PlanError` if a canvas saves only some rows, or has no room."""
    saves = []
    for part in parts:
        if part.span.save is None or part.span.layers.start != layer:
            continue
        if part.state.states is None or not part.span.save[part.positions].all():
            raise PlanError(f"layer {layer}: states are kept of all live rows, on a canvas that has room for them")
        saves.append(Save(part.rows, part.state.states[layer - 1], send_run(part.positions, device)))
    return tuple(saves)


def _chunk_saves(stop: int, parts: list[StageRows]) -> tuple[Save, ...]:
    """The saves of canvases whose pass ends before layer `stop`, from which a later pass goes on."""
    return tuple(
        Save(part.rows, part.state.states[stop - 1], slice(None))
        for part in parts
        if part.state.stop_layer == stop and part.state.states is not None
    )


def pack_uncached(
    model: Transformer,
    canvases: Sequence[Canvas],
    predict: Sequence[Mask] | None = None,
    sees: Sequence[Reach | None] | None = None,
) -> StepBatch:
    """A full pass over `canvases`, whose K/V go to consecutive slots, from slot 0 of the pool on.

    The pool must have pages of one slot. `predict` has the positions whose hidden states the pass returns, bool [T] for
    each canvas; None returns none. `sees` is how many leading positions each row attends to, int64 [T] for each canvas;
    None: all.
    """
    config = model.config
    layers = range(config.layers)
    items = []
    slot = 0
    for index, canvas in enumerate(canvases):
        length = len(canvas)
        extent = Extent(layers, np.arange(slot, slot + length), page_size=1, length=length)
        ledger = Ledger(config.layers, length, prefix=None)
        state = CanvasState(canvas, ledger, (plain_table(extent),), shift=config.shift)
        rows = np.ones(length, dtype=np.bool_)
        plan = Plan(
            (Span(layers, rows),),
            predict=~rows if predict is None else predict[index],
            sees=None if sees is None else sees[index],
        )
        items.append((state, plan))
        slot += length
    return pack(items, Target(model.device, sliding=config.sliding, roles=config.self_conditioning))

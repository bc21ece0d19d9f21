"""Packed steps, undone: every row of every layer is traced back to its canvas and compared with the plans."""

import random
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.engine.canvas_state import (
    CanvasState,
    allocate_states,
    leased_tables,
    plain_table,
    predicting_rows,
    prefix_canvas,
)
from remask.engine.pack import Packer, Target, pack
from remask.errors import PlanError
from remask.model.stage import Stage, StepBatch
from remask.model.work_list import WorkList
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan, PrefixHit, View
from remask.plan.spans import Span, TopRho
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.store.pages import PageAllocator
from remask.store.prefix import PrefixStore
from tests.engine.support import CPU, MASK_ID
from tests.store.test_prefix_store import match

LAYERS = 5
HERE = Target(CPU)


@dataclass
class Memory:
    """Pages and a store, without tensors; hidden states are one number wide."""

    page_size: int = 3

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(LAYERS, 200, self.page_size)
        self.store = PrefixStore(
            self.allocator, 500, "fifo", b"", lambda tokens: allocate_states(LAYERS, 1, torch.float64, CPU, tokens), 16
        )

    def branch(self, prompt: int, response: int, prefix: int = 0, boundary: int = 0, shift: int = 0) -> CanvasState:
        """A canvas that leases `prefix` tokens in `boundary` layers, or owns all of its slots."""
        canvas = Canvas.masked([7] * prefix + [9] * (prompt - prefix), response, MASK_ID)
        length = len(canvas)
        if not boundary:
            extent = self.allocator.allocate(length, range(LAYERS))
            assert extent is not None
            return CanvasState(canvas, Ledger(LAYERS, length, None), (plain_table(extent),), shift=shift)
        tokens = [7] * prefix
        lease = match(self.store, tokens, boundary) or self.store.reserve(tokens, boundary)
        assert lease is not None
        parts = [(length - prefix, range(boundary)), (length, range(boundary, LAYERS))]
        own = [self.allocator.allocate(size, layers) for size, layers in parts if len(layers)]
        tables = leased_tables(lease, [extent for extent in own if extent is not None])
        hit = PrefixHit(prefix, boundary)
        return CanvasState(
            canvas,
            Ledger(LAYERS, length, hit),
            tables,
            lease,
            lease.entry.states,
            shift=shift,
            prefix=hit,
        )


def view(branch: CanvasState, step: int) -> View:
    canvas = branch.canvas
    block = range(canvas.prompt, len(canvas))
    return View(LAYERS, step, step, block, canvas.prompt, canvas.noisy, canvas.settled, branch.prefix)


def code(item: int, layer: int, position: int) -> float:
    """A number that says which row of which canvas it is, and out of which layer it comes."""
    return item * 1e6 + layer * 1e3 + position


def slots_seen(work: WorkList, rows: int) -> list[list[int]]:
    """The slots that each row attends to, with repeats where one is attended to twice."""
    seen: list[list[int]] = [[] for _ in range(rows)]
    outputs: list[int] = []
    for row, count, slot, slots, output in work.units.tolist():
        reach = [slots] * count if work.reach is None else work.reach[output : output + count].tolist()
        for index in range(count):
            seen[row + index] += work.slots[slot : slot + reach[index]].tolist()
        outputs += range(output, output + count)
    assert outputs == list(range(work.output_count)), "partial results are numbered in order, each once"
    assert all(seen), "a row is not attended for"
    return seen


def check(batch: StepBatch, items: list[tuple[CanvasState, Plan]]) -> None:
    """Runs `batch` on codes instead of hidden states and compares each layer with what the plans say."""
    h: Tensor | None = None
    covered: list[int] = []
    for stage in batch.stages:
        covered += stage.layers
        for layer in stage.layers:
            expected = []
            for index, (branch, plan) in enumerate(items):
                span = next(span for span in plan.spans if layer in span.layers)
                table = next(table for table in branch.tables if layer in table.layers)
                frozen = np.zeros_like(span.rows) if span.frozen is None else span.frozen
                expected += [
                    (index, position, int(table.slots[position]), bool(frozen[position]), table.slots)
                    for position in np.flatnonzero(span.rows).tolist()
                ]
            if layer == stage.layers.start:
                h = enter(stage.layers.start, stage, h, items, len(expected))
            assert h is not None
            if layer == 0:
                tokens = [int(items[index][0].canvas.tokens[position]) for index, position, *_ in expected]
                assert batch.tokens.tolist() == tokens
            codes = [code(index, layer, position) for index, position, *_ in expected]
            assert h[:, 0].tolist() == codes, f"layer {layer} gets the wrong rows"
            assert stage.positions.tolist() == [position for _, position, *_ in expected]
            written = [row for row, item in enumerate(expected) if not item[3]]
            assert (
                stage.written_rows.tolist() if stage.written_rows is not None else list(range(len(expected)))
            ) == written
            assert stage.slots.tolist() == [expected[row][2] for row in written]
            seen = slots_seen(stage.work, len(expected))
            assert [sorted(slots) for slots in seen] == [sorted(item[4].tolist()) for item in expected]
            h = h + 1e3  # the layer's output
    assert covered == list(range(LAYERS))
    assert h is not None
    wanted = [
        code(index, LAYERS, position)
        for index, (branch, plan) in enumerate(items)
        for position in predicting_rows(plan.predicted, branch.shift).tolist()
    ]
    assert h[batch.predict, 0].tolist() == wanted
    assert batch.row_layers == sum(plan.cost for _, plan in items)


def enter(layer: int, stage: Stage, h: Tensor | None, items: list[tuple[CanvasState, Plan]], rows: int) -> Tensor:
    """What stands before a stage's first layer; states of leases are filled with codes beforehand."""
    if h is None:
        assert layer == 0
        assert stage.carry is None
        codes = [
            code(i, 0, p) for i, (_, plan) in enumerate(items) for p in np.flatnonzero(plan.spans[0].rows).tolist()
        ]
        return torch.tensor(codes, dtype=torch.float64)[:, None]
    if stage.carry is not None:
        source, target = stage.carry
        carried = h[source]
        h = torch.full((rows, 1), torch.nan, dtype=torch.float64)
        h[slice(None) if target is None else target] = carried
    for restore in stage.restore:
        assert h[restore.rows].isnan().all(), "a carried row is overwritten"
        h[restore.rows] = restore.states[restore.positions]
    return h


def label_states(items: list[tuple[CanvasState, Plan]]) -> None:
    """Boundary states say what they are; those of a shared entry name the first item that reads it."""
    for index in reversed(range(len(items))):
        states = items[index][0].restore_states
        if states is not None:
            for layer in range(LAYERS - 1):
                for position in range(states.shape[1]):
                    states[layer, position] = code(index, layer + 1, position)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    memory = Memory(page_size=rng.choice([1, 3, 8]))
    states: tuple[Literal["stored", "recomputed"], ...] = ("stored", "recomputed")
    items: list[tuple[CanvasState, Plan]] = []
    restoring: set[int] = set()
    for _ in range(rng.randint(1, 6)):
        prompt, shift = rng.randint(3, 9), rng.randint(0, 1)
        prefix = rng.choice([2, 3, prompt - shift])
        boundary = rng.choice([0, 1, 2, 4, LAYERS])
        branch = memory.branch(prompt, rng.randint(1, 5), prefix, boundary, shift)
        interval = rng.choice([1, 2, None])
        policy: CachePolicy = BiCache(depth=boundary, refresh_interval=interval, boundary_state=rng.choice(states))
        policy = rng.choice([policy, Reuse()]) if boundary == LAYERS else policy
        policy = policy if boundary else rng.choice([Dense(), policy])
        step = rng.randint(0, 3)
        if branch.lease is not None and len(branch.lease.entry) in restoring:
            step = 1  # see `label_states`: this one does not refresh
            policy = BiCache(depth=boundary, refresh_interval=None)
        elif branch.lease is not None:
            restoring.add(len(branch.lease.entry))
        canvas = branch.canvas
        first = np.array([canvas.prompt])
        canvas.write(first, np.array([11]))
        canvas.settle(first, 0)
        items.append((branch, policy.plan(view(branch, step))))
    label_states(items)
    check(pack(items, HERE), items)


def test_neighbours_on_one_prefix_read_it_once() -> None:
    memory = Memory()
    branches = [memory.branch(6 + i, 3, 6, 3) for i in range(3)] + [memory.branch(5, 2)]
    items = [(branch, BiCache(depth=3).plan(view(branch, 1))) for branch in branches]
    batch = pack(items, HERE)
    assert [stage.layers for stage in batch.stages] == [range(3), range(3, 5)]
    shallow, deep = batch.stages
    # The prefix for the rows of three canvases, the rest of each, and a canvas of its own.
    assert shallow.work.units[:, [0, 1, 3]].tolist() == [[0, 12, 6], [0, 3, 3], [3, 4, 4], [7, 5, 5], [12, 7, 7]]
    assert deep.work.units[:, 1].tolist() == [3, 4, 5, 7]
    check(batch, items)


def test_boundaries_of_one_prefix_may_differ() -> None:
    memory = Memory()
    branches = [memory.branch(7, 3, 6, boundary) for boundary in (4, 2, 4, LAYERS)]
    items = [(branch, BiCache(depth=4).plan(view(branch, 1))) for branch in branches]
    batch = pack(items, HERE)
    assert [stage.layers for stage in batch.stages] == [range(2), range(2, 4), range(4, 5)]
    check(batch, items)


def test_rows_that_go_on_are_not_moved() -> None:
    memory = Memory()
    branches = [memory.branch(5, 3, 4, 2), memory.branch(6, 2)]
    items = [(branch, BiCache(depth=2).plan(view(branch, 1))) for branch in branches]
    deep = pack(items, HERE).stages[1]
    assert deep.carry is None
    assert deep.restore == ()


def test_a_refresh_restores_the_prefix_at_the_boundary() -> None:
    memory = Memory()
    branch = memory.branch(5, 3, 4, 2)
    items = [(branch, BiCache(depth=2).plan(view(branch, 0)))]
    label_states(items)
    batch = pack(items, HERE)
    restore = batch.stages[1].restore[0]
    assert branch.restore_states is not None
    assert restore.rows == slice(0, 4)
    assert restore.states.data_ptr() == branch.restore_states[1].data_ptr()  # in place, not a copy
    check(batch, items)


def test_the_prefix_pass_keeps_what_leaves_every_layer_but_the_last() -> None:
    memory = Memory()
    lease = memory.store.reserve([1, 2, 3, 4], 2)
    assert lease is not None
    branch, plan = prefix_canvas(lease.entry, LAYERS)
    other = memory.branch(4, 2)
    items = [(other, Dense().plan(view(other, 0))), (branch, plan)]
    batch = pack(items, HERE)
    check(batch, items)
    saves = [stage.save for stage in batch.stages]
    assert [len(save) for save in saves] == [0] + [1] * (LAYERS - 1)
    for layer, save in enumerate(saves[1:], 1):
        assert save[0].rows == slice(6, 10)
        assert save[0].states.shape == (4, 1)
        assert save[0].states.data_ptr() == lease.entry.states[layer - 1].data_ptr()


def test_a_new_position_without_states_cannot_join() -> None:
    memory = Memory()
    branch = memory.branch(3, 2)
    plan = Dense().plan(view(branch, 0)).cut(2)
    rows = plan.spans[0].rows.copy()
    rows[0] = False
    plan = plan.over((replace(plan.spans[0], rows=rows), plan.spans[1]))
    with pytest.raises(PlanError, match="rows that join at layer 2"):
        pack([(branch, plan)], HERE)


def test_states_need_room_and_all_live_rows() -> None:
    memory = Memory()
    branch = memory.branch(3, 2)
    plan = Dense().plan(view(branch, 0)).cut(1)
    saving = plan.over(plan.spans.map(lambda span: replace(span, save=span.rows) if span.layers.start else span))
    with pytest.raises(PlanError, match="layer 1: states are kept of all live rows"):
        pack([(branch, saving)], HERE)
    branch.states = allocate_states(LAYERS, 1, torch.float64, CPU, 5)
    assert len(pack([(branch, saving)], HERE).stages[1].save) == 1
    partial = plan.over(plan.spans.map(lambda span: replace(span, save=~span.rows) if span.layers.start else span))
    with pytest.raises(PlanError, match="states are kept of all live rows"):
        pack([(branch, partial)], HERE)


def test_nothing_is_changed() -> None:
    memory = Memory()
    branch = memory.branch(6, 3, 4, 2)
    plan = BiCache(depth=2, boundary_state="recomputed").plan(view(branch, 0))
    before = [(span.rows.copy(), None if span.frozen is None else span.frozen.copy()) for span in plan.spans]
    tokens, written = branch.canvas.tokens.copy(), branch.ledger.written.copy()
    batch = pack([(branch, plan)], HERE)
    batch.tokens.fill_(0)
    assert np.array_equal(branch.canvas.tokens, tokens)
    assert np.array_equal(branch.ledger.written, written)
    for span, (rows, frozen) in zip(plan.spans, before, strict=True):
        assert np.array_equal(span.rows, rows)
        assert (span.frozen is None) == (frozen is None)
        if span.frozen is not None and frozen is not None:
            assert np.array_equal(span.frozen, frozen)


def test_layers_without_rows_are_passed_through() -> None:
    """A canvas may sit out some layers while another computes."""
    memory = Memory()
    idle, busy = memory.branch(3, 2), memory.branch(4, 1)
    none = np.zeros(5, dtype=np.bool_)
    rows = view(idle, 0).everything
    resting = Plan((Span(range(2), rows), Span(range(2, LAYERS), none)), predict=none)
    items = [(idle, resting), (busy, Dense().plan(view(busy, 0)))]
    check(pack(items, HERE), items)


def test_held_rows_leave_the_others_what_they_see() -> None:
    branch, sees = Memory().branch(3, 3), np.array([3, 3, 3, 6, 6, 6])
    rows, held = np.ones(6, dtype=np.bool_), np.array([False, True, False, False, True, True])
    plan = Plan((Span(range(LAYERS), rows, held=held),), predict=~rows, sees=sees)
    (stage,) = pack([(branch, plan)], HERE).stages
    assert stage.partial is not None
    assert stage.partial.computed.tolist() == [0, 2, 3]
    seen: list[int] = []
    for row, count, _, slots, _ in stage.work.units.tolist():
        reach = stage.work.reach
        seen += [slots] * count if reach is None else reach[row : row + count].tolist()
    assert seen == [3, 3, 6]


def test_picks_where_not_all_is_seen_are_refused() -> None:
    """Which rows will be chosen is not known when what they see is packed."""
    branch, rows = Memory().branch(3, 3), np.ones(6, dtype=np.bool_)
    spans = (Span(range(1), rows), Span(range(1, LAYERS), rows, pick=TopRho(rows, 2)))
    with pytest.raises(PlanError, match="not every row attends to the same positions"):
        pack([(branch, Plan(spans, predict=~rows, sees=np.array([3, 3, 3, 6, 6, 6])))], HERE)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_packing_may_begin_at_a_later_layer(first: int) -> None:
    """The stages of the whole pass, of which those before are as they ran."""
    memory = Memory()
    lone, lease = memory.branch(5, 3), memory.branch(6, 3, 4, 2)
    rows = np.arange(8) % 3 != 0
    whole = tuple(Span(range(i, i + 1), rows if i < first else np.ones(8, dtype=np.bool_)) for i in range(LAYERS))
    lone.restore_states = allocate_states(LAYERS, 1, torch.float64, CPU, 8)
    items = [(lone, Plan(whole, predict=np.arange(8) == 7)), (lease, Reuse().plan(view(lease, 1)))]
    label_states(items)
    everything, rest = pack(items, HERE), pack(items, HERE, first=first)
    assert [stage.layers for stage in rest.stages] == [s.layers for s in everything.stages if s.layers.start >= first]
    assert rest.predict.tolist() == everything.predict.tolist()
    for stage, other in zip(rest.stages, everything.stages[-len(rest.stages) :], strict=True):
        for one, two in ((stage.positions, other.positions), (stage.slots, other.slots)):
            assert one.tolist() == two.tolist()
        assert (stage.carry is None) == (other.carry is None)
    (restore,) = rest.stages[0].restore
    assert not isinstance(restore.rows, slice)  # scattered positions
    assert not isinstance(restore.positions, slice)
    assert restore.rows.tolist() == restore.positions.tolist() == [0, 3, 6]
    check(everything, items)


def test_layouts_of_the_last_two_passes_serve_again() -> None:
    memory = Memory()
    branches = [memory.branch(6, 4, prefix=3, boundary=2), memory.branch(5, 4)]
    policies: list[CachePolicy] = [BiCache(depth=2, refresh_interval=4), Reuse().without_prefix]
    views = [[view(branch, step) for branch in branches] for step in (0, 1)]  # a refresh, and a pass between two
    refresh, between = (
        [(branch, policy.plan(seen)) for branch, policy, seen in zip(branches, policies, each, strict=True)]
        for each in views
    )
    packer = Packer(HERE)
    first = packer.pack(refresh)
    packer.pack(between)
    branches[0].canvas.write(np.array([7]), np.array([5]))
    branches[0].canvas.settle(np.array([7]), 0)
    later = [(branch, plan.predicting(plan.predict & branch.canvas.noisy)) for branch, plan in refresh]
    again, anew = packer.pack(later), pack(later, HERE)
    assert packer.reuses == 1
    assert again.stages is first.stages
    assert again.tokens.tolist() == anew.tokens.tolist() != first.tokens.tolist()
    assert again.predict.tolist() == anew.predict.tolist()
    assert len(again.predict) == len(first.predict) - 1
    packer.pack(refresh[:1])
    packer.pack(between)
    assert packer.reuses == 1
    packer.forget_layouts()
    packer.pack(between)
    assert packer.reuses == 1

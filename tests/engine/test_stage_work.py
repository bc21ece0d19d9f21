"""Rows that see a part of their canvas: work lists, and attention over them, against a softmax over explicit keys."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, SlotTable
from remask.engine.stage_work import SLIDING_TILE, TILE, StageRows, make_sliding_work, make_work, neighbour_places
from remask.model.attention import attend_sliding
from remask.model.attention_torch import TILE_ROWS, TorchAttention
from remask.model.stage import Index, Neighbours, runs
from remask.plan.canvas import Canvas, Ledger
from remask.plan.spans import Span
from tests.engine.test_attention import naive

DIM = 4
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])


@dataclass
class Layout:
    """Parts of some canvases in a pool of slots, and row by row what each should attend to."""

    rng: random.Random
    slots: int = 600

    def __post_init__(self) -> None:
        self.free = list(range(self.slots))
        self.parts: list[StageRows] = []
        self.keys: list[list[int]] = []

    def claim(self, count: int, scattered: bool = False) -> list[int]:
        if scattered:
            self.rng.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        self.free.sort()
        return taken

    def add(self, sees: list[int] | None, positions: list[int], own: list[int], shared: list[int], chain: int) -> None:
        """A canvas whose slots are `shared` and then `own`; `sees` holds a limit for each of `positions`."""
        length = len(shared) + len(own)
        canvas = Canvas((), [0] * length, length)
        common = tuple(runs(np.array(shared))) if shared else ()
        table = SlotTable(range(1), np.array(shared + own), common, np.array(own))
        state = CanvasState(canvas, Ledger(1, length, None), (table,), page_key=chain)
        at = len(self.keys)
        self.keys += [(shared + own)[: length if sees is None else sees[row]] for row in range(len(positions))]
        span = Span(range(1), np.ones(length, dtype=np.bool_))
        limits = None if sees is None else np.array(sees)
        self.parts.append(StageRows(state, span, table, np.array(positions), slice(at, at + len(positions)), limits))


def check(layout: Layout, heads: int, kv_heads: int, cap: float | None = None, sink: bool = False) -> None:
    """Whole canvases, and each apart. Slots that nobody sees are NaN."""
    q = torch.randn(len(layout.keys), heads, DIM).double() * 2
    k, v = (torch.randn(layout.slots, kv_heads, DIM).double() for _ in range(2))
    unseen = torch.ones(layout.slots, dtype=torch.bool)
    unseen[[slot for row in layout.keys for slot in row]] = False
    k[unseen], v[unseen] = torch.nan, torch.nan
    extra = (torch.randn(kv_heads, DIM).double(), torch.randn(kv_heads, DIM).double()) if sink else None
    expected = naive(q, k, v, layout.keys, cap, extra)
    for apart in (False, True):
        out = TorchAttention(cap)(q, k, v, make_work(layout.parts, separate=apart), extra)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    parts = [part for part in layout.parts if len(part.positions)]
    limits = [np.full(len(part.positions), len(part.table.slots)) if part.sees is None else part.sees for part in parts]
    # Elsewhere rows stand behind what they see, or behind all slots.
    if all(
        (part.positions < np.minimum(own, len(part.table.slots))).all() for part, own in zip(parts, limits, strict=True)
    ):
        check_near(parts, limits, q, (k, v), cap, extra)


def check_near(
    parts: list[StageRows],
    limits: list[Index],
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    cap: float | None,
    extra: tuple[Tensor, Tensor] | None,
) -> None:
    """The same where rows see their neighbours alone: each row stands in one unit, and unseen slots are NaN."""
    for reach in (0, 1, 5, 200):
        keys = [
            part.table.slots[max(0, position - reach) : min(position + reach + 1, end)].tolist()
            for part, ends in zip(parts, limits, strict=True)
            for position, end in zip(part.positions, ends, strict=True)
        ]
        seen = torch.zeros(len(kv[0]), 1, 1, dtype=torch.bool)
        seen[[slot for row in keys for slot in row]] = True
        k, v = (each.where(seen, torch.nan) for each in kv)
        expected = naive(q, k, v, keys, cap, extra)
        work = make_sliding_work(parts, reach)
        assert work.owners.tolist() == list(range(len(keys)))
        assert work.pair_count < len(keys) * (2 * reach + 1 + SLIDING_TILE)
        torch.testing.assert_close(TorchAttention(cap)(q, k, v, work, extra), expected, rtol=0, atol=1e-12)
        places = neighbour_places(parts, torch.device("cpu"))
        torch.testing.assert_close(attend_sliding(q, k, v, places, reach, extra, cap), expected, rtol=0, atol=1e-12)


def test_no_rows_attend_to_nothing() -> None:
    """As in a pass whose rows in the last layers are all left out."""
    q, k = torch.zeros(0, 4, DIM), torch.zeros(8, 2, DIM)
    places = Neighbours(slots=torch.arange(8), places=torch.zeros(3, 0, dtype=torch.int64))
    assert attend_sliding(q, k, k, places, reach=3).shape == (0, 4 * DIM)


def block_limits(length: int, block: int) -> list[int]:
    return [min((position // block + 1) * block, length) for position in range(length)]


@HEADS
@pytest.mark.parametrize("seed", range(4))
def test_canvases_of_their_own(seed: int, heads: int, kv_heads: int) -> None:
    rng = random.Random(seed)
    layout = Layout(rng)
    for _ in range(4):
        length = rng.randint(1, 40)
        start = rng.randint(0, length - 1)
        own = layout.claim(length, scattered=rng.random() < 0.5)
        kind = rng.choice(["all", "blocks", "clean"])
        limits = block_limits(length, rng.choice([1, 3, 4, 8]))
        if kind == "clean":
            clean = rng.randint(1, length)
            limits = [clean if position < clean else length for position in range(length)]
        positions = list(range(start, length))
        layout.add(None if kind == "all" else limits[start:], positions, own, [], 0)
    check(layout, heads, kv_heads)
    check(layout, heads, kv_heads, cap=3.0, sink=True)
    check(layout, heads, kv_heads, cap=50.0)


@HEADS
@pytest.mark.parametrize("seed", range(6))
def test_canvases_that_read_common_pages(seed: int, heads: int, kv_heads: int) -> None:
    """Rows of several blocks, beside canvases with other pages in common and with none."""
    rng = random.Random(seed)
    layout = Layout(rng)
    for chain in (1, 2):
        shared = layout.claim(rng.choice([4, 8, 12]), scattered=chain == 2)
        for _ in range(rng.randint(1, 4)):
            block = rng.choice([2, 4])
            length = len(shared) + rng.randint(1, 6) * block
            limits = block_limits(length, block)
            start = rng.randrange(len(shared), length, block)
            stop = rng.randrange(start + block, length + 1, block)
            own = layout.claim(length - len(shared), scattered=rng.random() < 0.3)
            positions = list(range(start, stop))
            if rng.random() < 0.2:
                layout.add(None, positions, own, shared, chain)
            else:
                layout.add(limits[start:stop], positions, own, shared, chain)
        layout.add(block_limits(9, 3), list(range(9)), layout.claim(9), [], 0)
    check(layout, heads, kv_heads)


@pytest.mark.parametrize(("length", "block"), [(300, 4), (300, 64), (300, 100), (129, 128), (280, 280)])
def test_long_prefills_are_masked_in_tiles(length: int, block: int) -> None:
    """Many rows that see the same need no mask; others are masked a tile at a time, over what they see at most."""
    layout = Layout(random.Random(0))
    layout.add(block_limits(length, block), list(range(length)), layout.claim(length), [], 0)
    (part,) = layout.parts
    assert part.sees is not None
    work = make_work([part])
    first, rows, slot, slots, _ = work.units.T
    assert first[1:].tolist() == (first + rows)[:-1].tolist()
    assert slot.tolist() == [0] * len(slot), "all read one list of slots"
    assert slots.tolist() == [part.sees[row - 1] for row in first + rows], "over what they see at most"
    reach = np.repeat(slots, rows) if work.reach is None else work.reach
    alike = [bool((reach[at : at + count] == most).all()) for at, count, most in zip(first, rows, slots, strict=True)]
    assert max(rows[~np.array(alike)], default=0) <= TILE
    assert sum(alike) >= length // block if block >= TILE // 2 else not any(alike)
    check(layout, 2, 1)
    check(layout, 2, 1, cap=2.0, sink=True)


@pytest.mark.parametrize("clean", [1, 20, 70])
def test_a_short_prompt_before_much_noise(clean: int) -> None:
    layout = Layout(random.Random(0))
    layout.add([clean] * clean + [200] * (200 - clean), list(range(200)), layout.claim(200), [], 0)
    work = make_work(layout.parts)
    assert work.units.tolist() == [[0, clean, 0, clean, 0], [clean, 200 - clean, 0, 200, clean]]
    assert work.reach is None
    check(layout, 2, 1, cap=2.0, sink=True)


def test_more_rows_than_a_tile_of_scores() -> None:
    layout = Layout(random.Random(0), slots=700)
    length = TILE_ROWS + 107
    clean = TILE_ROWS // 2 + 3
    limits = [clean] * clean + [length] * (length - clean)
    layout.add(limits, list(range(length)), layout.claim(length), [], 0)
    check(layout, 2, 2, cap=4.0, sink=True)


def test_a_common_run_is_one_unit() -> None:
    """Where all rows see all, there are no limits. A canvas that shares with nobody is a unit of its own."""
    layout = Layout(random.Random(0))
    shared = layout.claim(8)
    for _ in range(3):
        layout.add([12] * 4, list(range(8, 12)), layout.claim(4), shared, 1)
    layout.add(None, [8, 9], layout.claim(2), layout.claim(8), 2)
    work = make_work(layout.parts)
    assert work.reach is None
    units = [[0, 12, 8], [0, 4, 4], [4, 4, 4], [8, 4, 4], [12, 2, 10]]
    assert work.units[:, [0, 1, 3]].tolist() == units
    assert work.output_count == 12 + 12 + 2
    check(layout, 2, 2)
    check(layout, 4, 2, cap=1.0, sink=True)


def test_rows_that_see_nothing_of_their_own() -> None:
    """A slot of their own may be unwritten, so it must not be read."""
    layout = Layout(random.Random(0))
    shared = layout.claim(8)
    layout.add([8, 8, 8], [8, 9, 10], layout.claim(3), shared, 1)
    layout.add([8, 10], [8, 9], layout.claim(2), shared, 1)
    check(layout, 2, 2)
    assert make_work(layout.parts).units[:, [0, 1, 3]].tolist() == [[0, 5, 8], [3, 2, 2]]


def test_rows_of_the_common_run_itself() -> None:
    """Two canvases read a run of six slots. One computes its rows too, and they see all of it or a part."""
    for sees in (None, [3, 3, 3, 6, 6, 6, 10, 10, 10, 10]):
        layout = Layout(random.Random(0), slots=40)
        shared = layout.claim(6)
        layout.add(sees, list(range(10)), layout.claim(4), shared, chain=1)
        layout.add(None, list(range(6, 10)), layout.claim(4), shared, chain=1)
        rows = make_work(layout.parts).units[:, [0, 1, 3]].tolist()
        assert rows == ([[0, 14, 6], [0, 10, 4], [10, 4, 4]] if sees is None else [[0, 10, 10], [10, 4, 10]])
        check(layout, 2, 2)


def test_no_rows_are_no_work() -> None:
    assert len(make_work([]).units) == 0
    layout = Layout(random.Random(0))
    layout.add(None, [], layout.claim(3), [], 0)
    for apart in (False, True):
        assert len(make_work(layout.parts, separate=apart).units) == 0

"""Attention by every executor, over any work list, against a softmax over explicit keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remask.model import attention_torch
from remask.model.attention import Sink
from remask.model.attention_torch import TorchAttention
from remask.model.work_list import WorkList, WorkListBuilder
from tests.device import device
from tests.engine.executors import EXECUTORS, NEEDS_TRITON, QUICK, Make

pytestmark = pytest.mark.usefixtures("on_device")
# PyTorch's attention makes other calls on a GPU: other kernels, whose bits depend on a call's size, and larger pieces.
CPU_CALLS = pytest.mark.skipif(
    device() != "cpu", reason="tells which calls a CPU makes; on a GPU they are others: run it without --device"
)
SLOTS = 96


def naive(
    q: Tensor, k: Tensor, v: Tensor, keys: Sequence[Sequence[int]], cap: float | None, sink: Sink | None
) -> Tensor:
    """Row by row, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, share = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for row, slots in enumerate(keys):
        for head in range(q.shape[1]):
            group = head // share
            held_k, held_v = k[list(slots), group], v[list(slots), group]
            if sink is not None:
                held_k = torch.cat([held_k, sink[0][group].double()[None]])
                held_v = torch.cat([held_v, sink[1][group].double()[None]])
            scores = held_k @ q[row, head] / math.sqrt(q.shape[2])
            if cap is not None:
                scores = cap * (scores / cap).tanh()
            out[row, head] = scores.softmax(0) @ held_v
    return out.flatten(1)


@dataclass
class Case:
    """A work list, and row by row the slots that it stands for."""

    builder: WorkListBuilder = field(default_factory=WorkListBuilder)
    keys: dict[int, list[int]] = field(default_factory=dict)

    def add(
        self,
        row: int,
        rows: int,
        slots: Sequence[int],
        reach: Sequence[int] | None = None,
        skip: Sequence[int] | None = None,
    ) -> None:
        """Rows see `slots`, or the first `reach` of them without the first `skip` of these."""
        limits = [None if limit is None else np.array(limit) for limit in (reach, skip)]
        self.builder.add(row, rows, self.builder.add_slots(np.array(slots)), len(slots), *limits)
        for index in range(rows):
            end, first = len(slots) if reach is None else reach[index], 0 if skip is None else skip[index]
            self.keys.setdefault(row + index, []).extend(slots[first:end])

    def check(
        self,
        make: Make,
        heads: tuple[int, int] = (4, 2),
        dim: int = 8,
        cap: float | None = None,
        sink: bool = False,
        dtype: torch.dtype = torch.float32,
        tolerance: float = 3e-6,
    ) -> None:
        """Slots that nobody sees are NaN, and nothing that is passed in may change."""
        keys = [self.keys[row] for row in range(len(self.keys))]
        q = (torch.randn(len(keys), heads[0], dim) * 2).to(dtype)
        k, v = (torch.randn(SLOTS, heads[1], dim).to(dtype) for _ in range(2))
        unused = [slot for slot in range(SLOTS) if not any(slot in row for row in keys)]
        k[unused], v[unused] = torch.nan, torch.nan
        extra = (torch.randn(heads[1], dim).to(dtype), torch.randn(heads[1], dim).to(dtype)) if sink else None
        before = [x.clone() for x in (q, k, v)]
        out = make(cap)(q, k, v, self.builder.build(), extra)
        assert (out.shape, out.dtype) == ((len(keys), heads[0] * dim), dtype)
        expected = naive(q, k, v, keys, cap, extra)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        for now, then in zip((q, k, v), before, strict=True):
            assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ragged canvases: alone or behind a common run, in any slots, with limits for some rows."""
    case, row = Case(), 0
    free = draw(st.permutations(range(SLOTS)))
    for _ in range(draw(st.integers(1, 3))):
        shared = sorted(free[: draw(st.integers(0, 20))])
        free = free[len(shared) :]
        first = row
        for _ in range(draw(st.integers(1, 3))):
            own, rows = free[: draw(st.integers(1, 9))], draw(st.integers(1, 7))
            free = free[len(own) :]
            own = sorted(own) if draw(st.booleans()) else own
            least = 0 if shared else 1
            reach = draw(st.none() | st.lists(st.integers(least, len(own)), min_size=rows, max_size=rows))
            if reach is not None and max(reach) == 0:
                reach[0] = 1
            own = own if reach is None else own[: max(reach)]
            # Each row sees a slot, as does each slot of the unit a row: the first row skips none.
            ends = [len(own)] * rows if reach is None else reach
            skips = [0, *(draw(st.integers(0, max(0, end - least))) for end in ends[1:])]
            case.add(row, rows, own, reach, draw(st.sampled_from([None, skips])) if ends[0] == len(own) else None)
            row += rows
        if shared:
            case.add(first, row - first, shared)
    return case


@pytest.mark.few(4)
@pytest.mark.parametrize("make", QUICK)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_list(make: Make, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 4e-2}[dtype]

    @settings(max_examples=25)
    @given(cases(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([None, 2.0, 60.0]), st.booleans())
    def check(case: Case, heads: tuple[int, int], cap: float | None, sink: bool) -> None:
        case.check(make, heads, 8, cap, sink, dtype, tolerance)

    check()


@pytest.mark.parametrize("make", EXECUTORS[-1:])
def test_any_list_in_the_interpreter(make: Make) -> None:
    @settings(max_examples=8)
    @given(
        cases(),
        st.sampled_from([(2, 2), (4, 2), (3, 1)]),
        st.sampled_from([8, 12]),
        st.sampled_from([None, 2.0]),
        st.booleans(),
        st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def check(case: Case, heads: tuple[int, int], dim: int, cap: float | None, sink: bool, dtype: torch.dtype) -> None:
        case.check(make, heads, dim, cap, sink, dtype, 3e-6 if dtype == torch.float32 else 4e-2)

    check()


@pytest.mark.parametrize("make", EXECUTORS)
def test_a_sink_beside_one_unit(make: Make) -> None:
    """Its weight is merged with that of one partial result."""
    case = Case()
    case.add(0, 3, range(5))
    case.add(3, 2, range(9, 12))
    case.check(make, (3, 1), sink=True)


@NEEDS_TRITON
def test_a_size_that_knows_no_sink_is_refused() -> None:
    from remask.model.attention_triton import TritonAttention

    attention, work, q = TritonAttention(), WorkList.of(2, 3), torch.zeros(2, 4, 8)
    k = torch.zeros(3, 2, 8)
    size = attention.size(work, 4, 2)
    numbers = torch.from_numpy(attention.pack(work, 4, 2, size))
    with pytest.raises(ValueError, match="computed without a sink"):
        attention.run(q, k, k, numbers, size, (k[0], k[0]))


@pytest.mark.parametrize("make", EXECUTORS[-1:])
def test_the_widest_heads_and_pieces_of_a_long_canvas(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.add(0, 3, range(50))
    case.check(make, (1, 1), 256)
    from remask.model import attention_triton

    monkeypatch.setattr(attention_triton, "CHUNK", 16)
    monkeypatch.setattr(attention_triton, "TILE", 4)
    case.add(1, 2, range(60, 90), [3, 30])
    case.check(make, (2, 1), 8)


@NEEDS_TRITON
@pytest.mark.parametrize(("heads", "groups"), [(32, 32), (28, 4)])
@pytest.mark.parametrize(
    ("canvases", "rows", "whole"), [(1, 1280, True), (32, 1280, True), (32, 32, True), (1, 32, False), (2, 8, False)]
)
def test_k_and_v_are_cut_where_programs_are_few(canvases: int, rows: int, whole: bool, heads: int, groups: int) -> None:
    """Rows that keep a device busy leave no partial results; else there are as many programs as it takes, or nearly."""
    from remask.model.attention_triton import PROGRAMS, TritonAttention

    builder, length = WorkListBuilder(), 1280
    for number in range(canvases):
        own = builder.add_slots(np.arange(length) + length * number)
        builder.add(number * rows, rows, own, length, None)
    size = TritonAttention(None).size(builder.build(), heads, groups)
    if groups == heads:
        assert size.merges is not whole
    assert size.merges or size.output_count == canvases * rows
    assert size.unit_count * groups >= 0.6 * min(PROGRAMS, len(range(0, canvases * rows, 64)) * groups * length // 64)


@settings(max_examples=30)
@given(cases(), st.integers(1, 9), st.integers(1, 20), st.integers(1, 12))
def test_pieces_are_the_same_attention(case: Case, rows: int, slots: int, shortest: int) -> None:
    """What is cut in any way has the same result, and units of the size that was asked for."""
    work = case.builder.build()
    q, k, v = torch.randn(len(case.keys), 2, 4), torch.randn(SLOTS, 2, 4), torch.randn(SLOTS, 2, 4)
    cut, runs, whole = work.cut(rows, slots), work.cut_at_runs(shortest), work.ungroup(slots, shortest)
    assert (cut.units[:, 1] <= rows).all()
    assert (cut.units[:, 3] <= slots).all()
    for each in (cut, runs, whole):
        assert each.units[:, 4].tolist() == (np.cumsum(each.units[:, 1]) - each.units[:, 1]).tolist()
        assert sorted(set(each.owners.tolist())) == sorted(case.keys)
        assert each.reach is None or len(each.reach) == each.output_count
        for make in (TorchAttention, lambda cap: TorchAttention(cap, fused=False)):
            torch.testing.assert_close(make(None)(q, k, v, each), make(None)(q, k, v, work), rtol=0, atol=3e-6)
    assert cut.pair_count <= work.pair_count


def test_runs_are_cut_where_they_are_long() -> None:
    builder = WorkListBuilder()
    builder.add(0, 3, builder.add_slots(np.r_[10:20, 40:52, 5:6]), 23, np.array([8, 12, 23]))
    work = builder.build()
    assert work.cut_at_runs(8) is work, "7.7 slots a run"
    cut = work.cut_at_runs(7)
    assert cut.units.tolist() == [[0, 3, 0, 10, 0], [0, 3, 10, 12, 3], [0, 3, 22, 1, 6]]
    assert cut.reach is not None
    assert cut.reach.tolist() == [8, 10, 10, 0, 2, 12, 0, 0, 1]
    assert work.pair_count == 69
    assert WorkList.of(2, 5).cut_at_runs(1).units.tolist() == [[0, 2, 0, 5, 0]]


def test_rows_of_several_small_units_become_rows_of_one() -> None:
    builder = WorkListBuilder()
    builder.add(0, 5, builder.add_slots(np.arange(8)), 8, None)  # a prefix of two canvases
    builder.add(0, 2, builder.add_slots(np.arange(20, 23)), 3, None)
    builder.add(2, 3, builder.add_slots(np.arange(8, 12)), 4, None)  # which stands right behind it
    builder.add(5, 4, builder.add_slots(np.arange(40, 50)), 10, None)
    builder.add(9, 2, builder.add_slots(np.arange(60, 70)), 10, None)  # a prefix of two more, one of which is long
    builder.add(9, 1, builder.add_slots(np.arange(70, 72)), 2, None)
    builder.add(10, 1, builder.add_slots(np.arange(80, 90)), 10, None)
    work = builder.build()
    whole = work.ungroup(12, 6)
    apart = [[5, 4, 10], [9, 2, 10], [9, 1, 2], [10, 1, 10]]
    assert whole.units[:, [0, 1, 3]].tolist() == [*apart, [0, 2, 11], [2, 3, 12]]
    assert whole.slots[whole.units[4, 2] :].tolist() == [*range(8), 20, 21, 22, *range(12)]
    assert work.ungroup(12, 5) is work, "one of the two would have two runs of 5.5 slots, which are read in place"
    assert work.ungroup(10, 6) is work
    assert work.ungroup(12, 99).units[:, [0, 1, 3]].tolist() == [*apart, [0, 2, 11], [2, 3, 12]]
    assert len(work.ungroup(20, 99).units) == 5


@CPU_CALLS
@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_canvases_that_are_alike_are_one_call_and_keep_their_bits(heads: int, groups: int, shared: int) -> None:
    """Each has the result that it has alone, whatever stands between them and wherever their slots are."""
    rows, own, dim = 5, 11, 8
    q, k, v = torch.randn(4 * rows + 2, heads, dim), torch.randn(SLOTS, groups, dim), torch.randn(SLOTS, groups, dim)
    common, builder = list(range(shared)), WorkListBuilder()
    canvases = {0: [*common, *range(60, 71)], 5: [*common, *range(20, 31)], 12: [*common, *range(75, 86)]}
    canvases[17] = [*common, *range(40, 51)]
    if shared:
        builder.add(0, 10, builder.add_slots(np.arange(shared)), shared, None)
        builder.add(12, 10, builder.add_slots(np.arange(shared)), shared, None)
    for row, slots in canvases.items():
        builder.add(row, rows, builder.add_slots(np.array(slots[shared:])), own, None)
    builder.add(10, 2, builder.add_slots(np.arange(86, 96)), 10, None)
    work = builder.build()
    attention = TorchAttention()
    out = attention(q, k, v, work)
    for row, slots in canvases.items():
        alone = WorkListBuilder()
        alone.add(0, rows, alone.add_slots(np.array(slots)), len(slots), None)
        assert torch.equal(out[row : row + rows], attention(q[row : row + rows], k, v, alone.build()))
    with Sizes() as few:
        attention(q, k, v, work)
    single = WorkListBuilder()
    single.add(0, rows, single.add_slots(np.array(canvases[0])), shared + own, None)
    with Sizes() as one:
        attention(q[:rows], k, v, single.build())
    assert few.fused == 2 * one.fused == 2


def test_what_a_list_is_prepared_for_is_made_once() -> None:
    made: list[int] = []

    def make(work: WorkList, number: int) -> int:
        made.append(number)
        return number + len(work.units)

    work = WorkList.of(2, 3)
    assert [work.derive(make, number) for number in (1, 2, 1, 2)] == [2, 3, 2, 3]
    assert made == [1, 2]


@pytest.mark.parametrize("make", EXECUTORS)
def test_no_rows(make: Make) -> None:
    q, kv = torch.randn(0, 4, 8), torch.randn(SLOTS, 2, 8)
    assert make(None)(q, kv, kv, WorkListBuilder().build()).shape == (0, 32)


@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("cap", [None, 100.0])
def test_sharp_scores_stay_finite(make: Make, cap: float | None) -> None:
    for extreme in (30.0, 1000.0):
        case = Case()
        case.add(0, 3, range(4))
        case.add(0, 1, [20])
        case.add(1, 2, [30, 31], [0, 2])
        q, kv = torch.randn(3, 2, 8) * extreme, torch.randn(SLOTS, 2, 8)
        expected = naive(q, kv, kv, list(case.keys.values()), cap, None)
        # A score of some thousands has an error of some ten thousandths in float32.
        torch.testing.assert_close(make(cap)(q, kv, kv, case.builder.build()).double(), expected, rtol=0, atol=5e-3)


@dataclass
class Layout:
    """Rows of one canvas that attend to a prefix and to slots of its own, or to one run."""

    rows: int
    common: int
    own: int

    def list(self, gap: int = 7) -> WorkList:
        builder = WorkListBuilder()
        for start, count in ((0, self.common), (self.common + gap, self.own)):
            if count:
                builder.add(0, self.rows, builder.add_slots(np.arange(start, start + count)), count, None)
        return builder.build()


@pytest.mark.few(3)
@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("layout", [Layout(32, 160, 0), Layout(32, 120, 40)], ids=["one run", "behind a prefix"])
def test_bfloat16_is_as_precise_as_fused_attention(make: Make, layout: Layout) -> None:
    """The error against float64 is at most 1.2 times that of PyTorch's own, at scores of any spread."""
    keys = torch.cat([torch.arange(layout.common), torch.arange(layout.own) + layout.common + 7])
    for deviation in (1, 2, 3, 4):
        q = (torch.randn(layout.rows, 2, 32) * deviation).bfloat16()  # scores are of this deviation
        k, v = (torch.randn(176, 2, 32).bfloat16() for _ in range(2))
        whole_q, whole_k, whole_v = (x.transpose(0, 1)[None] for x in (q, k[keys], v[keys]))
        exact = F.scaled_dot_product_attention(whole_q.double(), whole_k.double(), whole_v.double())
        fused = F.scaled_dot_product_attention(whole_q, whole_k, whole_v)
        out = make(None)(q, k, v, layout.list()).view(q.shape).transpose(0, 1)[None]
        error, allowed = ((x.double() - exact).square().mean().sqrt() for x in (out, fused))
        assert error <= 1.2 * allowed, f"{error / allowed:.2f} times as large at deviation {deviation}"


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes (views of what was there are none), and counts fused calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest, self.calls, self.fused = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.fused += "flash_attention" in str(func)
        known = {x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, x.numel())
                self.calls += 1
        return out


@CPU_CALLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_nothing_of_the_size_of_the_scores_is_kept(cap: float | None, dtype: torch.dtype) -> None:
    rows, heads, dim, common, own = 600, 4, 16, 2500, 700
    q, k, v = (torch.randn(count, heads, dim, dtype=dtype) for count in (rows, 3300, 3300))
    layout = Layout(rows, common, own)
    with Sizes() as sizes:
        TorchAttention(cap)(q, k, v, layout.list())
    piece = attention_torch.CHUNK * heads * dim
    assert sizes.largest <= max(attention_torch.CPU_SCORES, rows * heads * dim, piece) < rows * heads * common / 4


@CPU_CALLS
def test_runs_are_read_in_place() -> None:
    """A canvas of one run, and one behind a prefix: no operation makes a tensor of the size of K."""
    q, k, v = torch.randn(4, 2, 8), torch.randn(500, 2, 8), torch.randn(500, 2, 8)
    for layout, calls in ((Layout(4, 400, 0), 2), (Layout(4, 300, 100), None)):
        work, attention = layout.list(), TorchAttention()
        attention(q, k, v, work)
        with Sizes() as sizes:
            attention(q, k, v, work)
        assert sizes.largest <= q.numel()
        assert calls is None or sizes.calls == calls, "one fused call, which returns a tensor and its sums"

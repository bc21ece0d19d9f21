"""Attention over runs and slots against a softmax over explicit keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.models.attention import SdpaAttention
from remask.models.stage import Cascade, Direct, Segments

SLOTS, DIM = 64, 8


def naive(q: Tensor, k: Tensor, v: Tensor, keys: Sequence[Sequence[int]]) -> Tensor:
    """Row by row, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for row, slots in enumerate(keys):
        for head in range(q.shape[1]):
            scores = torch.stack([q[row, head] @ k[slot, head // share] for slot in slots]) / math.sqrt(q.shape[2])
            out[row, head] = sum(w * v[slot, head // share] for w, slot in zip(scores.softmax(0), slots, strict=True))
    return out.flatten(1)


@dataclass(frozen=True)
class Member:
    """One canvas of a cascade: how many rows it has, and its own slots."""

    rows: int
    own: tuple[int, ...]


def cascade(start: int, common: tuple[slice, ...], members: Sequence[Member]) -> tuple[Cascade, list[list[int]]]:
    """The segment and, row by row, the slots it stands for. Padding is written out by hand."""
    most, widest = max(m.rows for m in members), max(len(m.own) for m in members)
    own = torch.tensor([[*m.own, *[m.own[-1]] * (widest - len(m.own))] for m in members])
    hidden = torch.tensor([[[i >= len(m.own) for i in range(widest)]] for m in members])
    ragged = len({m.rows for m in members}) > 1
    queries, back, keys, at = [], [], [], 0
    shared = [slot for run in common for slot in range(run.start, run.stop)]
    for index, member in enumerate(members):
        queries.append([at + min(i, member.rows - 1) for i in range(most)])
        back += [index * most + i for i in range(member.rows)]
        keys += [[*shared, *member.own]] * member.rows
        at += member.rows
    segment = Cascade(
        rows=slice(start, start + at),
        common=common,
        own=own,
        queries=torch.tensor(queries) if ragged else None,
        hidden=hidden if hidden.any() else None,
        back=torch.tensor(back) if ragged else None,
    )
    return segment, keys


def tensors(rows: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    return draw(rows, heads, DIM) * 2, draw(SLOTS, kv_heads, DIM), draw(SLOTS, kv_heads, DIM)


def check(segments: Segments, keys: list[list[int]], heads: int, kv_heads: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)):
        q, k, v = tensors(len(keys), heads, kv_heads, dtype)
        used = sorted({slot for row in keys for slot in row})
        unused = [slot for slot in range(SLOTS) if slot not in used]
        k[unused], v[unused] = torch.nan, torch.nan
        before = (q.clone(), k.clone(), v.clone())
        out = SdpaAttention()(q, k, v, segments)
        assert out.shape == (len(keys), heads * DIM)
        assert out.dtype == dtype
        assert torch.allclose(out.double(), naive(q, k, v, keys), atol=tolerance, rtol=tolerance)
        for now, then in zip((q, k, v), before, strict=True):
            assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])


@HEADS
def test_a_run_is_read_in_place(heads: int, kv_heads: int) -> None:
    check((Direct(slice(0, 5), slice(3, 12)),), [list(range(3, 12))] * 5, heads, kv_heads)


@HEADS
def test_scattered_slots(heads: int, kv_heads: int) -> None:
    slots = [40, 3, 4, 17, 60]
    check((Direct(slice(0, 3), torch.tensor(slots)),), [slots] * 3, heads, kv_heads)


@HEADS
@pytest.mark.parametrize(
    "members",
    [
        [Member(3, (20, 21, 22))],
        [Member(2, (20, 21)), Member(2, (30, 31))],
        [Member(2, (20, 21)), Member(4, (30, 31))],
        [Member(3, (20, 21, 22)), Member(3, (30,))],
        [Member(1, (20,)), Member(4, (30, 33, 36, 31)), Member(2, (41, 40))],
        [Member(5, (63, 0, 20)), Member(1, (30, 33, 36, 31, 50))],
    ],
    ids=["one", "even", "ragged rows", "ragged slots", "ragged", "fragmented"],
)
@pytest.mark.parametrize(
    "common",
    [(slice(4, 12),), (slice(8, 9),), (slice(10, 14), slice(4, 6), slice(16, 19))],
    ids=["run", "slot", "runs"],
)
def test_cascades(heads: int, kv_heads: int, members: list[Member], common: tuple[slice, ...]) -> None:
    segment, keys = cascade(0, common, members)
    check((segment,), keys, heads, kv_heads)


def test_segments_stand_side_by_side() -> None:
    first = (Direct(slice(0, 2), slice(0, 3)), [[0, 1, 2]] * 2)
    second, keys = cascade(2, (slice(4, 8),), [Member(2, (20, 22)), Member(1, (30,))])
    third = (Direct(slice(5, 6), torch.tensor([9, 50])), [[9, 50]])
    check((first[0], second, third[0]), [*first[1], *keys, *third[1]], 4, 2)


def test_no_segments_are_no_rows() -> None:
    q, k, v = tensors(0, 4, 2)
    assert SdpaAttention()(q, k, v, ()).shape == (0, 32)


@pytest.mark.parametrize("extreme", [30.0, 100.0])
def test_sharp_scores_stay_finite(extreme: float) -> None:
    segment, keys = cascade(0, (slice(0, 4),), [Member(1, (20,)), Member(2, (30, 31))])
    q, k, v = tensors(3, 4, 4)
    out = SdpaAttention()(q * extreme, k, v, (segment,))
    assert torch.allclose(out.double(), naive(q * extreme, k, v, keys), atol=1e-4)


def test_random_layouts(rng: np.random.Generator) -> None:
    for _ in range(25):
        slots = rng.permutation(np.arange(20, SLOTS)).tolist()
        members = []
        for _ in range(int(rng.integers(1, 5))):
            width = int(rng.integers(1, 7))
            members.append(Member(int(rng.integers(1, 5)), tuple(slots[:width])))
            slots = slots[width:]
        cut = int(rng.integers(1, 19))
        segment, keys = cascade(0, (slice(0, cut), slice(cut, 20))[: int(rng.integers(1, 3))], members)
        q, k, v = tensors(len(keys), 4, 2)
        assert torch.allclose(SdpaAttention()(q, k, v, (segment,)).double(), naive(q, k, v, keys), atol=5e-6)

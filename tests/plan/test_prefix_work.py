"""What a plan does with the prefix, against plans written by hand and against the policies' own arithmetic."""

import numpy as np
import pytest

from remask.plan.pass_cost import LayerWork, layer_work
from remask.plan.plan import NEVER, Plan, PrefixHit, View
from remask.plan.spans import Mask, Span, TopRho, rows_of
from remask.policies import BiCache, DkvDecode, Reuse

LAYERS, PREFIX, LENGTH = 6, 5, 12
HIT = PrefixHit(PREFIX, 4)
LEAD = rows_of([range(PREFIX)], LENGTH)


def some(*positions: int) -> Mask:
    mask = np.zeros(LENGTH, dtype=np.bool_)
    mask[list(positions)] = True
    return mask


def view(step: int, hit: PrefixHit | None = HIT) -> View:
    noisy = np.arange(LENGTH) >= 8
    settled = np.where(noisy, NEVER, -1).astype(np.int32)
    return View(LAYERS, step, step, range(8, LENGTH), 8, noisy, settled, hit)


def test_a_refresh_of_bicache() -> None:
    policy = BiCache(depth=4, refresh_interval=3)
    told = layer_work(policy.plan(view(3)), LEAD, HIT)
    shallow = LayerWork(range(4), rows=7, reused=5, leased=5, restored=0, refreshed=0)
    deep = LayerWork(range(4, 6), rows=12, reused=0, leased=0, restored=5, refreshed=5)
    assert told == (shallow, deep)


def test_between_refreshes_the_prefix_is_reused_in_all_layers() -> None:
    policy = BiCache(depth=4, refresh_interval=3)
    told = layer_work(policy.plan(view(4)), LEAD, HIT)
    assert [(work.rows, work.reused, work.leased, work.restored, work.refreshed) for work in told] == [
        (7, 5, 5, 0, 0),
        (7, 5, 0, 0, 0),
    ]


def test_rows_that_do_not_write_leave_the_leased_pages_in_use() -> None:
    policy = BiCache(depth=4, boundary_state="recomputed")
    shallow, deep = layer_work(policy.plan(view(0)), LEAD, HIT)
    assert (shallow.rows, shallow.reused, shallow.leased, shallow.refreshed) == (12, 5, 5, 0)
    assert (deep.rows, deep.restored, deep.refreshed) == (12, 0, 5)


def test_a_plan_is_cut_where_the_lease_ends() -> None:
    hit = PrefixHit(PREFIX, 2)
    told = layer_work(Plan((Span(range(LAYERS), some(7, 8)),), some(7)), LEAD, hit)
    assert [(work.layers, work.leased) for work in told] == [(range(2), 5), (range(2, 6), 0)]


def test_keys_of_the_layer_above_the_boundary_may_be_leased_too() -> None:
    hit = PrefixHit(PREFIX, 2, 3)
    shallow, above, deep = layer_work(BiCache(depth=2).plan(view(0, hit)), LEAD, hit)
    assert (shallow.layers, shallow.leased, shallow.restored) == (range(2), PREFIX, 0)
    assert above == LayerWork(range(2, 3), LENGTH, reused=PREFIX, leased=PREFIX, restored=PREFIX, refreshed=0)
    assert (deep.layers, deep.leased, deep.restored, deep.refreshed) == (range(3, LAYERS), 0, 0, PREFIX)


def test_without_a_lease_the_prefix_is_the_requests_own() -> None:
    told = layer_work(DkvDecode().plan(view(0, None)), LEAD, None)
    assert told == (LayerWork(range(LAYERS), LENGTH, 0, 0, 0, PREFIX),)
    assert layer_work(Plan((Span(range(LAYERS), some(9)),), some(9)), LEAD, None)[0].reused == PREFIX


def test_reuse_reads_the_store_in_all_layers() -> None:
    hit = PrefixHit(PREFIX, LAYERS)
    (told,) = layer_work(Reuse().plan(view(0, hit)), LEAD, hit)
    assert (told.layers, told.rows, told.leased) == (range(LAYERS), LENGTH - PREFIX, PREFIX)


@pytest.mark.parametrize("prefix", [0, PREFIX])
def test_held_and_chosen_rows(prefix: int) -> None:
    everything = np.ones(LENGTH, dtype=np.bool_)
    held = Span(range(2), everything, held=some(0, 1, 2))
    pick = Span(range(2, LAYERS), everything, pick=TopRho(some(0, 1, 10), 2))
    first, second = layer_work(Plan((held, pick), some(11)), rows_of([range(prefix)], LENGTH), None)
    assert (first.rows, first.reused, first.refreshed) == (9, min(prefix, 3), max(prefix - 3, 0))
    assert (second.rows, second.reused, second.refreshed) == (11, min(prefix, 2), max(prefix - 2, 0))

"""The meter against counts made by hand, and against a count that follows every K/V row by itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.plan.canvas import Ledger
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Span, TopRho
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual
from remask.policies.dkv import DkvDecode
from remask.policies.dllm import DllmCache
from remask_lab.observe import CacheMeter
from tests.policies.views import Walk


def rows(length: int, *positions: int) -> Mask:
    out = np.zeros(length, dtype=np.bool_)
    out[list(positions)] = True
    return out


def metered(layers: int, length: int, plans: list[Plan], prefix: PrefixHit | None = None) -> CacheMeter:
    ledger, meter = Ledger(layers, length, prefix), CacheMeter()
    for plan in plans:
        ledger.enter(plan)
        meter.note(ledger, plan)
    return meter


def plan_of(*spans: Span) -> Plan:
    return Plan(spans, predict=np.zeros_like(spans[0].rows))


EVERYTHING = rows(4, 0, 1, 2, 3)


def test_nothing_is_cached_where_everything_is_computed() -> None:
    meter = metered(2, 4, [plan_of(Span(range(2), EVERYTHING))] * 3)
    assert (meter.passes, meter.cache_ratio, meter.staleness, meter.upper_bound) == (3, 0.0, 0.0, False)


def test_without_a_pass_there_is_nothing_to_say() -> None:
    meter = CacheMeter()
    assert (meter.passes, meter.cache_ratio, meter.staleness) == (0, 0.0, 0.0)


def test_ages_grow_until_a_row_is_written_again() -> None:
    full, one = Span(range(2), EVERYTHING), Span(range(2), rows(4, 3))
    meter = metered(2, 4, [plan_of(full), plan_of(one), plan_of(one), plan_of(full)])
    assert meter.cache_ratio == (0 + 3 / 4 + 3 / 4 + 0) / 4
    assert meter.staleness == (0 + 3 * 1 / 4 + 3 * 2 / 4 + 0) / 4


def test_a_layer_in_which_nobody_attends_has_no_staleness_but_is_cached() -> None:
    live = rows(4, 2, 3)
    held = Span(range(1, 2), live, held=live)
    meter = metered(2, 4, [plan_of(Span(range(2), EVERYTHING)), plan_of(Span(range(1), live), held)])
    assert held.cost == 0
    assert meter.cache_ratio == (0 + (2 / 4 + 1) / 2) / 2
    assert meter.staleness == (0 + 2 / 4) / 2


def test_rows_that_are_held_nowhere_computed_leave_no_age() -> None:
    nobody = plan_of(Span(range(1), EVERYTHING, held=EVERYTHING))
    meter = metered(1, 4, [plan_of(Span(range(1), EVERYTHING)), nobody])
    assert (meter.cache_ratio, meter.staleness) == (0.5, 0.0)


def test_what_is_lent_was_written_before_the_first_pass() -> None:
    own = plan_of(Span(range(2), rows(4, 2, 3)))
    meter = metered(2, 4, [own, own], PrefixHit(2, 2))
    assert meter.cache_ratio == 0.5
    assert meter.staleness == ((1 + 1) / 4 + (2 + 2) / 4) / 2


def test_what_nobody_has_written_or_seen_has_no_age() -> None:
    """Causal rows: the first pass writes two positions and sees no others, the second writes the next two."""
    sees = np.array([2, 2, 4, 4])
    passes = [replace(plan_of(Span(range(1), rows(4, *positions))), sees=sees) for positions in ((0, 1), (2, 3))]
    meter = metered(1, 4, passes)
    assert meter.cache_ratio == (0 + 2 / 4) / 2
    assert meter.staleness == (0 + 2 * 1 / 4) / 2


def test_rows_chosen_on_the_device_count_as_computed_and_bound_the_age() -> None:
    full = plan_of(Span(range(1), EVERYTHING))
    picks = plan_of(Span(range(1), EVERYTHING, pick=TopRho(EVERYTHING, 3)))
    meter = metered(1, 4, [full, picks])
    assert meter.upper_bound
    assert meter.cache_ratio == (0 + 1 / 4) / 2
    assert meter.staleness == (0 + 1) / 2


POLICIES: list[CachePolicy] = [
    Dense(),
    BlockDual(),
    DkvDecode(3),
    DllmCache(2, 3, 0.5, select="random"),
    DllmCache(100, 4, 0.0),
    BiCache(DkvDecode(2), 1),
    Reuse(),
]


@given(st.sampled_from(POLICIES), st.integers(1, 3), st.integers(0, 9))
def test_a_count_row_by_row_comes_to_the_same(policy: CachePolicy, layers: int, seed: int) -> None:
    walk = Walk(layers=layers, prompt=3, block_length=4, seed=seed)
    ledger, meter = Ledger(layers, walk.length, None), CacheMeter()
    written = [[-9] * walk.length for _ in range(layers)]
    ratios, ages = [], []
    for number, view in enumerate(walk.views()):
        plan = policy.plan(view)
        ledger.enter(plan)
        meter.note(ledger, plan)
        old, attended = 0, []
        for layer in range(layers):
            span = next(span for span in plan.spans if layer in span.layers)
            for position in range(walk.length):
                if span.computed[position]:
                    written[layer][position] = number
                old += written[layer][position] != number
            if span.computed.any():
                attended += [number - step for step in written[layer]]
        ratios.append(old / (layers * walk.length))
        ages.append(sum(attended) / len(attended))
    assert meter.passes == len(ratios)
    assert meter.cache_ratio == pytest.approx(sum(ratios) / len(ratios))
    assert meter.staleness == pytest.approx(sum(ages) / len(ages))

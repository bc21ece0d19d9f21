"""`bicache` beside its inner policy and `reuse`, and the table that gives its depth."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.canvas import Ledger
from remask.plan.plan import PrefixHit, View
from remask.plan.spans import SpanMemo
from remask.policies import BiCache, Dense, Reuse
from remask.policies.base import RequestFacts
from remask.policies.bicache import DepthLookup, WithinRequest, percent
from tests.policies.views import MAX_LAYERS, layer_rows, same, views

INTERVALS = st.none() | st.integers(1, 9)
STATES: st.SearchStrategy[Literal["stored", "recomputed"]] = st.sampled_from(["stored", "recomputed"])


@given(views(prefix=True), INTERVALS, STATES)
def test_at_all_layers_it_is_reuse(view: View, interval: int | None, state: Literal["stored", "recomputed"]) -> None:
    assert view.prefix is not None
    view = replace(view, prefix=PrefixHit(view.prefix.length, view.layers))
    policy = BiCache(depth=view.layers, refresh_interval=interval, boundary_state=state)
    assert same(policy.plan(view), Reuse().plan(view))


@given(views(prefix=False), st.integers(0, MAX_LAYERS), INTERVALS, STATES)
def test_without_a_prefix_it_is_the_inner_policy(
    view: View, depth: int, interval: int | None, state: Literal["stored", "recomputed"]
) -> None:
    policy = BiCache(depth=depth, refresh_interval=interval, boundary_state=state)
    assert same(policy.plan(view), Dense().plan(view))


@given(views(prefix=True), INTERVALS, STATES, st.data())
def test_canvases_that_lease_alike_have_the_same_spans(
    view: View, interval: int | None, state: Literal["stored", "recomputed"], data: st.DataObject
) -> None:
    assert view.prefix is not None
    policy = BiCache(depth=2, refresh_interval=interval, boundary_state=state)
    plan, other = policy.plan(view), policy.plan(replace(view, memo=SpanMemo()))
    assert plan.spans is other.spans
    hit = PrefixHit(data.draw(st.integers(1, view.prompt)), data.draw(st.integers(1, view.layers)))
    apart = policy.plan(replace(view, prefix=hit, memo=SpanMemo()))
    assert (apart.spans is plan.spans) == (hit == view.prefix)


@given(views(prefix=False), INTERVALS, st.data())
def test_at_depth_0_the_prefix_is_refreshed_within_the_request(
    view: View, interval: int | None, data: st.DataObject
) -> None:
    """Equation 5 with b = 0: all layers are deep ones."""
    prefix = data.draw(st.integers(1, view.prompt))
    policy = BiCache(depth=0, refresh_interval=interval, within_request=True).within(prefix)
    plan = policy.plan(view)
    refresh = view.step == 0 or (interval is not None and view.step % interval == 0)
    live = [refresh or p >= prefix for p in range(view.length)]
    for layer in range(view.layers):
        assert layer_rows(plan, layer) == (live, [False] * view.length)
    assert plan.predict.tolist() == view.candidates.tolist()
    assert plan.refreshes == refresh
    ledger = Ledger(view.layers, view.length, None)
    for step in range(6):
        ledger.enter(policy.plan(replace(view, step=step)))


def test_when_a_prefix_is_refreshed_within_the_request() -> None:
    table = DepthLookup({90: 2})
    for policy in (BiCache(depth=table, within_request=True), BiCache(depth=0, within_request=True)):
        assert policy.within(3) == WithinRequest(Dense(), 3, 16)
        assert policy.within(0) == Dense()
        assert policy.within(3).traits.schedule.idle_passes == "all"
    for policy in (BiCache(depth=0), BiCache(depth=table)):
        assert policy.within(3) == Dense()
    assert Reuse().within(3) == Reuse().without_prefix


def test_depth_0_leases_nothing() -> None:
    assert BiCache(depth=0).boundary(10, 20, 4) == 0
    assert BiCache(depth=DepthLookup({60: 2})).boundary(10, 20, 4) == 0


def test_the_defaults_are_the_papers() -> None:
    policy = BiCache()
    assert policy.refresh_interval == 16
    assert policy.boundary_state == "stored"
    assert policy.traits.schedule.idle_passes == "all"


@given(views(prefix=True), INTERVALS, st.booleans())
def test_rows_and_costs_are_the_papers(view: View, interval: int | None, leased_above: bool) -> None:
    assert view.prefix is not None
    length, boundary = view.prefix.length, view.prefix.boundary
    policy = BiCache(depth=boundary, refresh_interval=interval)
    leased = policy.leased_layers(boundary, view.layers) if leased_above else boundary
    plan = policy.plan(replace(view, prefix=PrefixHit(length, boundary, leased)))
    refresh = view.step == 0 or (interval is not None and view.step % interval == 0)
    suffix = view.length - length
    deep = view.layers - boundary
    assert plan.cost == suffix * view.layers + (length * deep if refresh else 0)
    assert [layer for span in plan.spans for layer in span.layers] == list(range(view.layers))
    for layer in range(view.layers):
        live = [p >= length or (refresh and layer >= boundary) for p in range(view.length)]
        frozen = [refresh and p < length and boundary <= layer < leased for p in range(view.length)]
        assert layer_rows(plan, layer) == (live, frozen)
    assert plan.predict.tolist() == view.candidates.tolist()


@given(views(prefix=True), INTERVALS)
def test_recomputed_states_see_the_suffix_and_leave_leased_rows_alone(view: View, interval: int | None) -> None:
    assert view.prefix is not None
    length, boundary = view.prefix.length, view.prefix.boundary
    plan = BiCache(depth=boundary, refresh_interval=interval, boundary_state="recomputed").plan(view)
    refresh = view.step == 0 or (interval is not None and view.step % interval == 0)
    if not refresh or boundary == view.layers:
        assert same(plan, BiCache(depth=boundary, refresh_interval=interval).plan(view))
        return
    assert plan.cost == view.length * view.layers
    for layer in range(view.layers):
        live, frozen = layer_rows(plan, layer)
        assert all(live)
        assert frozen == [p < length and layer < boundary for p in range(view.length)]


@given(views(prefix=True), INTERVALS, STATES)
def test_plans_can_be_run_step_after_step(
    view: View, interval: int | None, state: Literal["stored", "recomputed"]
) -> None:
    assert view.prefix is not None
    boundary = view.prefix.boundary
    policy = BiCache(depth=boundary, refresh_interval=interval, boundary_state=state)
    view = replace(view, prefix=replace(view.prefix, layers=policy.leased_layers(boundary, view.layers)))
    ledger = Ledger(view.layers, view.length, view.prefix)
    noisy = view.noisy.copy()
    for step in range(6):
        ledger.enter(policy.plan(replace(view, step=step)))
    assert np.array_equal(view.noisy, noisy)


def test_a_given_depth_must_fit_the_model() -> None:
    fits = RequestFacts(layers=4, shift=0, ordered=False, canvas=12, response=8)
    BiCache(depth=4).check(fits)
    BiCache(depth=DepthLookup({0: 9})).check(fits)  # a table of a deeper model is cut at the last layer
    assert BiCache(depth=4).boundary(10, 20, 4) == 4
    with pytest.raises(ConfigError, match=r"depth=5 exceeds the model's 4 layers; use 0 to 4"):
        BiCache(depth=5).check(fits)


def test_a_table_gives_the_depth_of_the_ratio_within_the_model() -> None:
    policy = BiCache(depth=DepthLookup({50: 2, 90: 8}))
    assert policy.boundary(49, 100, 4) == 0
    assert policy.boundary(50, 100, 4) == 2
    assert policy.boundary(95, 100, 4) == 4


def test_what_cannot_be_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="both would own the shared prefix"):
        BiCache(inner=BiCache())
    with pytest.raises(ConfigError, match="within_request=True says what happens at depth 0, and depth=2"):
        BiCache(depth=2, within_request=True)


@pytest.mark.parametrize(
    ("prefix", "canvas", "expected"),
    [
        (1, 8, 12),
        (27, 200, 14),
        (25, 200, 12),
        (1, 2, 50),
        (0, 7, 0),
        (7, 7, 100),
        (1, 3, 33),
        (2, 3, 67),
        (1, 1000, 0),
    ],
)
def test_halves_round_to_even(prefix: int, canvas: int, expected: int) -> None:
    assert percent(prefix, canvas) == expected


@pytest.mark.parametrize("entries", [{1: 3, 2: 2}, {5: 0, 90: -1}, {0: -1}])
def test_depths_must_not_decrease(entries: dict[int, int]) -> None:
    with pytest.raises(ConfigError, match="depths must not decrease"):
        DepthLookup(entries)


@pytest.mark.parametrize("entries", [{-1: 1}, {101: 1}, {0: 1, 200: 3}])
def test_ratios_are_percents(entries: dict[int, int]) -> None:
    with pytest.raises(ConfigError, match="percents from 0 to 100"):
        DepthLookup(entries)


def test_entries_are_ordered_and_cannot_be_changed() -> None:
    source = {50: 3, 10: 1}
    table = DepthLookup(source)
    source[10] = 99
    assert list(table.entries.items()) == [(10, 1), (50, 3)]
    with pytest.raises(TypeError):
        table.entries[0] = 1  # type: ignore[index]


@given(st.dictionaries(st.integers(0, 100), st.integers(0, 40)), st.integers(1, 300), st.data())
def test_lookup_is_the_definition_and_monotone(entries: dict[int, int], canvas: int, data: st.DataObject) -> None:
    increasing = dict(zip(sorted(entries), sorted(entries.values()), strict=True))
    table = DepthLookup(increasing)
    first, second = sorted(data.draw(st.tuples(st.integers(0, canvas), st.integers(0, canvas))))
    keys = [key for key in increasing if key <= round(first / canvas * 100)]
    assert table.depth(first, canvas) == (increasing[max(keys)] if keys else 0)
    assert table.depth(first, canvas) <= table.depth(second, canvas)

"""`acache`: the pass that tells, the anchors that follow from it, and when they are computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from remask.errors import ConfigError, PlanError
from remask.plan.plan import NEVER, Plan, PrefixHit, View
from remask.plan.spans import Span
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, DepthLookup, DllmCache, Reuse, parse
from remask_caches.acache import ACache, Weigh
from remask_caches.elastic import ElasticCache
from tests.policies.views import no_table

LAYERS, LENGTH = 3, 14
HIT = PrefixHit(5, LAYERS, LAYERS, copied=True)
STORED = [0, 1, 2, 3, 4]


def view(step: int = 0, block_step: int = 0, weights: Any = None, **more: Any) -> View:
    """Two blocks of 3 behind a prompt of 8; the first one is settled from step 3 on."""
    start = 8 if step < 3 else 11
    noisy = np.arange(LENGTH) >= start
    settled = np.where(noisy, NEVER, -1).astype(np.int32)
    told = None if weights is None else np.array(weights, dtype=np.float32)
    found = View(LAYERS, step, block_step, range(start, start + 3), 8, noisy, settled, HIT, hook_output=told)
    return replace(found, **more)


WEIGHTS = [0.1, 0.7, 0.7, 0.2, 0.9, *[0.0] * 9]


def rows(plan: Plan) -> list[list[int]]:
    return [span.positions.tolist() for span in plan.spans for _ in span.layers]


def test_the_first_pass_computes_what_is_not_stored_and_predicts_nothing() -> None:
    plan = ACache().plan(view())
    others = [place for place in range(LENGTH) if place not in STORED]
    assert rows(plan) == [others] * LAYERS
    assert plan.fills
    assert plan.refreshes
    assert isinstance(plan.hook, Weigh)
    assert plan.hook.rows.nonzero()[0].tolist() == list(range(8, 14)), "all masks, of later blocks too"
    assert plan.hook.among.nonzero()[0].tolist() == STORED
    plan.check(LENGTH)


@pytest.mark.parametrize(
    ("ratio", "anchors"), [(0.1, [4]), (0.2, [4]), (0.21, [1, 4]), (0.6, [1, 2, 4]), (0.8, [1, 2, 3, 4])]
)
def test_anchors_are_those_with_the_most_attention_and_the_first_of_equal_ones(
    ratio: float, anchors: list[int]
) -> None:
    told = view(pass_index=1, weights=WEIGHTS)
    assert ACache(ratio=ratio).anchors(told, HIT).nonzero()[0].tolist() == anchors
    plan = ACache(ratio=ratio).plan(told)
    assert rows(plan) == [sorted({*range(LENGTH)} - {*STORED} | {*anchors})] * LAYERS
    assert plan.transfer is None
    assert plan.refreshes


def test_all_and_no_anchors_need_no_telling() -> None:
    assert rows(ACache(ratio=1.0).plan(view())) == [list(range(LENGTH))] * LAYERS
    assert rows(ACache(ratio=0.0).plan(view())) == rows(Reuse().plan(view()))
    assert not ACache(ratio=0.0).plan(view()).fills


def test_anchors_are_computed_where_blocks_begin() -> None:
    policy = ACache(ratio=0.2)
    later = view(step=1, block_step=1, weights=WEIGHTS)
    assert rows(policy.plan(later))[0] == [*range(5, LENGTH)]
    assert not policy.plan(later).refreshes
    assert 4 in rows(policy.plan(view(step=3, weights=WEIGHTS)))[0]
    dual = ACache(BlockDual(), 0.2)
    assert rows(dual.plan(later)) == [[8, 9, 10]] * LAYERS
    assert rows(dual.plan(view(step=3, weights=WEIGHTS))) == [[*range(4, LENGTH)]] * LAYERS


def test_anchors_may_be_computed_within_a_block_too() -> None:
    policy, first = ACache(ratio=0.2, anchor_interval=2), view(step=1, block_step=1, weights=WEIGHTS)
    assert 4 not in rows(policy.plan(first))[0]
    third = policy.plan(view(step=2, block_step=2, weights=WEIGHTS))
    assert rows(third) == [[*range(4, LENGTH)]] * LAYERS
    assert third.refreshes
    dual = ACache(BlockDual(), 0.2, 2)
    assert rows(dual.plan(view(step=2, block_step=2, weights=WEIGHTS))) == [[4, 8, 9, 10]] * LAYERS
    assert [policy.repeats(view(step=at, block_step=at, weights=WEIGHTS)) for at in (1, 2)] == [0, 0]
    wide = ACache(ratio=0.2, anchor_interval=5)
    assert [wide.repeats(view(step=at, block_step=at, weights=WEIGHTS)) for at in (1, 2)] == [3, 2]


def test_a_fill_pass_of_the_inner_policy_follows_the_first_one() -> None:
    policy = ACache(BlockDual("separate"), 0.2)
    fill = policy.plan(view(pass_index=1, weights=WEIGHTS))
    assert fill.fills
    assert fill.hook is None
    assert 4 in rows(fill)[0]
    assert rows(policy.plan(view(pass_index=2, weights=WEIGHTS))) == [[8, 9, 10]] * LAYERS


@pytest.mark.parametrize("inner", [Dense(), BlockDual()], ids=repr)
def test_what_repeats_is_planned_the_same(inner: CachePolicy) -> None:
    policy = ACache(inner, 0.4)
    assert policy.repeats(view()) == policy.repeats(view(pass_index=1, weights=WEIGHTS)) == 0
    first, second = (view(step=step, block_step=step, weights=WEIGHTS) for step in (1, 2))
    second = replace(second, memo=first.memo)
    assert policy.repeats(first) > 0
    assert policy.plan(first).spans is policy.plan(second).spans


def test_without_a_prefix_it_is_the_inner_policy() -> None:
    none = view(prefix=None)
    assert ACache(BlockDual()).without_prefix == BlockDual()
    assert rows(ACache(BlockDual()).plan(none)) == rows(BlockDual().plan(none))
    assert ACache(BlockDual()).repeats(none) == BlockDual().repeats(none)
    assert ACache().guides(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ACache(BiCache(depth=2)), "acache cannot wrap a policy that reads a stored prefix too"),
        (
            lambda: ACache(BiCache(depth=DepthLookup({100: 2}))),
            "acache cannot wrap a policy that reads a stored prefix",
        ),
        (lambda: ACache(Reuse()), "acache cannot wrap a policy that reads a stored prefix too"),
        (lambda: ACache(DllmCache()), "acache cannot wrap a policy that keeps outputs of rows"),
        (lambda: ACache(ElasticCache()), "acache cannot wrap a policy that keeps inputs of rows"),
        (
            lambda: parse("bicache+acache", {"depth": 2}, no_table),
            "'bicache[+]acache': acache and bicache would both own",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make()


def test_the_registry_knows_it() -> None:
    policy = parse("acache+block-dual", {"ratio": 0.3}, no_table)
    assert policy == ACache(BlockDual(), 0.3)
    assert policy.traits.kinds == ("masked",)


def test_plans_that_tell_of_rows_keep_their_inputs() -> None:
    everything, nothing = np.ones(4, dtype=np.bool_), np.zeros(4, dtype=np.bool_)
    spans = [Span(range(1), everything), Span(range(1, 2), everything, save=everything)]
    Plan(spans, nothing, hook=Weigh(everything, everything)).check(4)
    for bad in ([Span(range(2), everything)], [spans[0], replace(spans[1], save=nothing)]):
        with pytest.raises(PlanError, match="inputs are not kept"):
            Plan(bad, nothing, hook=Weigh(everything, everything)).check(4)
    with pytest.raises(PlanError, match="over no row, or to no position"):
        Plan(spans, nothing, hook=Weigh(nothing, everything)).check(4)
    cut = Plan(spans, nothing, hook=Weigh(everything, everything))
    below = cut.below(np.array([2, 2, 2, 2]), view().memo)
    assert isinstance(below.hook, Weigh)
    assert below.hook.rows.tolist() == [True, True, False, False]

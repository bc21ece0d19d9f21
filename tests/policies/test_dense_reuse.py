from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remask.plan.ledger import Ledger
from remask.plan.plan import PrefixHit, View
from remask.policies import Dense, Reuse
from tests.policies.views import layer_rows, same, views


@given(views())
def test_dense_computes_everything_and_predicts_candidates(view: View) -> None:
    plan = Dense().plan(view)
    assert plan.layers == view.layers
    assert plan.cost == view.layers * view.length
    assert plan.predict.tolist() == [p in view.block and bool(view.noisy[p]) for p in range(view.length)]


@given(views(prefix=True))
def test_reuse_never_computes_the_prefix(view: View) -> None:
    assert view.prefix is not None
    plan = Reuse().plan(view)
    outside = [p >= view.prefix.length for p in range(view.length)]
    for layer in range(view.layers):
        assert layer_rows(plan, layer) == (outside, [False] * view.length)
    assert plan.cost == view.layers * (view.length - view.prefix.length)
    assert plan.predict.tolist() == view.candidates.tolist()


@given(views(prefix=False))
def test_reuse_without_a_prefix_is_none(view: View) -> None:
    assert same(Reuse().plan(view), Dense().plan(view))


@given(views(prefix=True))
def test_plans_can_be_run_and_repeated(view: View) -> None:
    assert view.prefix is not None
    view = replace(view, prefix=PrefixHit(view.prefix.length, view.layers))
    ledger = Ledger(view.layers, view.length, view.prefix)
    noisy = view.noisy.copy()
    for step in range(3):
        ledger.apply(Reuse().plan(replace(view, step=step)))
    assert np.array_equal(view.noisy, noisy)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 32))
def test_boundaries(prefix: int, rest: int, layers: int) -> None:
    assert Dense().boundary(prefix, prefix + rest, layers) == 0
    assert Reuse().boundary(prefix, prefix + rest, layers) == layers


def test_only_none_may_skip_passes_that_transfer_nothing() -> None:
    assert Dense().traits.schedule.idle_passes == "skipped"
    assert Reuse().traits.schedule.idle_passes == "all"

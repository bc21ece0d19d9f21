"""`none`, `reuse` and the block caches."""

from dataclasses import replace

import pytest
from hypothesis import given

from remask.errors import ConfigError
from remask.plan.plan import View
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.base import RequestFacts
from remask.policies.block import BlockDual, BlockPrefix
from tests.policies.views import Walk, layer_rows, positions, rows_of, same, views

DREAM = RequestFacts(layers=3, shift=1, ordered=False, canvas=12, response=8)
PLAIN: list[CachePolicy] = [BlockPrefix(), BlockDual()]


@pytest.mark.parametrize("policy", PLAIN, ids=repr)
def test_a_block_opens_with_a_full_pass_that_transfers(policy: CachePolicy) -> None:
    for view in Walk().views():
        plan = policy.plan(view)
        assert plan.layers == view.layers
        assert positions(plan.predict) == positions(view.candidates)
        assert plan.transfer is None
        stop = view.length if isinstance(policy, BlockPrefix) else view.block.stop
        cached = set(range(view.block.start, stop))
        assert rows_of(plan) == (set(range(view.length)) if view.block_step == 0 else cached)


def test_a_separate_fill_pass_writes_caches_only_and_the_block_follows() -> None:
    policy = BlockDual(fill_pass="separate")
    for view in Walk().views():
        first, second = (policy.plan(replace(view, pass_index=index)) for index in (0, 1))
        block = set(view.block)
        assert rows_of(second) == block
        assert positions(second.predict) == positions(view.candidates)
        assert second.transfer is None
        assert first.fills == (view.block_step == 0)
        assert rows_of(first) == (set(range(view.length)) if first.fills else block)
        assert positions(first.predict) == (set() if first.fills else positions(view.candidates))


def test_a_separate_fill_pass_is_refused_where_rows_predict_their_successors() -> None:
    BlockDual().check(DREAM)
    BlockPrefix().check(DREAM)
    for policy in (BlockDual("separate"), BiCache(BlockDual("separate"), depth=1)):
        with pytest.raises(ConfigError, match=r"fill_pass='separate' .*Dream.* use fill_pass='transfer'"):
            policy.check(DREAM)


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

from dataclasses import replace
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.plan.ledger import Ledger
from remask.policies import BiCache, CachePolicy, parse
from remask.policies.base import RequestFacts
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.depth_lookup import DepthLookup
from tests.policies.views import Walk, positions, rows_of

LLADA = RequestFacts(layers=3, shift=0, ordered=False, canvas=12, response=8)
DREAM = RequestFacts(layers=3, shift=1, ordered=False, canvas=12, response=8)
PLAIN: list[CachePolicy] = [BlockPrefix(), BlockDual()]


def no_table() -> DepthLookup:
    raise AssertionError("the depth table was asked for")


@pytest.mark.parametrize("policy", PLAIN, ids=repr)
def test_a_block_opens_with_a_full_pass_that_transfers(policy: CachePolicy) -> None:
    for view in Walk().views():
        plan = policy.plan(view)
        assert plan.layers == view.layers
        assert positions(plan.predict) == positions(view.candidates)
        assert plan.commit is None
        stop = view.length if isinstance(policy, BlockPrefix) else view.block.stop
        cached = set(range(view.block.start, stop))
        assert rows_of(plan) == (set(range(view.length)) if view.block_step == 0 else cached)


@pytest.mark.parametrize("policy", PLAIN, ids=repr)
def test_where_rows_predict_their_successors_the_full_pass_commits_the_first_position_alone(
    policy: CachePolicy,
) -> None:
    """The row before the block is left out of cached passes, so nobody predicts that position later."""
    for view in Walk(shift=1).views():
        plan = policy.plan(view)
        if view.block_step:
            assert plan.commit is None
            assert positions(plan.predict) == positions(view.candidates)
            continue
        assert rows_of(plan) == set(range(view.length))
        assert plan.commit is not None
        assert not plan.fills
        assert positions(plan.commit) == positions(plan.predict) == {view.block.start}


def test_a_separate_fill_pass_writes_caches_only_and_the_block_follows() -> None:
    policy = BlockDual(fill_pass="separate")
    for view in Walk().views():
        first, second = (policy.plan(replace(view, pass_index=index)) for index in (0, 1))
        block = set(view.block)
        assert rows_of(second) == block
        assert positions(second.predict) == positions(view.candidates)
        assert second.commit is None
        assert first.fills == (view.block_step == 0)
        assert rows_of(first) == (set(range(view.length)) if first.fills else block)
        assert positions(first.predict) == (set() if first.fills else positions(view.candidates))


@pytest.mark.parametrize("policy", [*PLAIN, BlockDual("separate")], ids=repr)
@pytest.mark.parametrize("shift", [0, 1])
def test_plans_read_only_what_was_written_and_change_no_view(policy: CachePolicy, shift: int) -> None:
    walk = Walk(shift=shift, per_step=2, blocks=3)
    ledger = Ledger(walk.layers, walk.length, None)
    for view in walk.views():
        before = view.noisy.copy(), view.settled.copy()
        plan = policy.plan(view)
        ledger.apply(plan)
        if plan.fills:
            ledger.apply(policy.plan(replace(view, pass_index=1)))
        assert (before[0] == view.noisy).all()
        assert (before[1] == view.settled).all()


def test_what_they_say_of_themselves() -> None:
    assert BlockDual() == BlockDual(fill_pass="transfer")
    assert BlockPrefix().traits.schedule.idle_passes == BlockDual().traits.schedule.idle_passes == "within_block"
    assert BlockDual("separate").traits.schedule.idle_passes == "all"
    for policy in (BlockPrefix(), BlockDual(), BlockDual("separate")):
        assert policy.traits.schedule.blockwise
        assert not policy.traits.keeps
        assert not policy.traits.schedule.own_clocks
        assert policy.guides(1)
        assert policy.without_prefix is policy
        assert policy.boundary(3, 9, 4) == 0
        policy.check(LLADA)


def test_a_separate_fill_pass_is_refused_where_rows_predict_their_successors() -> None:
    BlockDual().check(DREAM)
    BlockPrefix().check(DREAM)
    for policy in (BlockDual("separate"), BiCache(BlockDual("separate"), depth=1)):
        with pytest.raises(ConfigError, match=r"fill_pass='separate' .*Dream.* use fill_pass='transfer'"):
            policy.check(DREAM)


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("block-prefix", None, BlockPrefix()),
        ("block-dual", None, BlockDual()),
        ("block-dual", {"fill_pass": "transfer"}, BlockDual()),
        ("block-dual", {"fill_pass": "separate"}, BlockDual("separate")),
        ("bicache+block-prefix", {"depth": 2}, BiCache(BlockPrefix(), 2)),
        (
            "bicache+block-dual",
            {"depth": 2, "refresh_interval": 3, "fill_pass": "separate"},
            BiCache(BlockDual("separate"), 2, 3),
        ),
    ],
)
def test_specs(spec: str, settings: dict[str, Any] | None, expected: CachePolicy) -> None:
    assert parse(spec, settings, no_table) == expected


@pytest.mark.parametrize("value", ["seperate", "", True, 1, ["transfer"]])
def test_unknown_fill_passes_are_refused(value: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown fill_pass .*Available: separate, transfer"):
        parse("block-dual", {"fill_pass": value}, no_table)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("block-prefix", {"fill_pass": "transfer"}, "cache policy 'block-prefix' takes no settings, got 'fill_pass'"),
        ("block-dual", {"fil_pass": "separate"}, r"'fil_pass'. Did you mean 'fill_pass'\?"),
        ("block-dual", {"depth": 1}, "Unknown setting of cache policy 'block-dual' 'depth'"),
        ("bicache+block-prefix", {"depth": 1, "fill_pass": "separate"}, "Unknown setting .* 'fill_pass'"),
        ("block-dul", {}, r"Did you mean 'block-dual'\?"),
        ("block-dual+bicache", {}, "'block-dual' cannot wrap another policy; only bicache, acache can"),
        ("block-dual+block-prefix", {}, "'block-dual' cannot wrap another policy"),
        ("bicache+block-dual+none", {"depth": 1}, "'block-dual' cannot wrap another policy"),
    ],
)
def test_what_cannot_be(spec: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec, settings, no_table)

"""A plan says how many of the block's next steps repeat it: asked all the same, the policy plans the same for these."""

import random
from dataclasses import replace

import numpy as np
import pytest

from remask.plan.canvas import Ledger
from remask.plan.plan import Plan, PrefixHit, View
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.registry import POLICIES as BUILT_IN
from remask.policies.uniform_cache import UniformCache
from tests.policies.views import Walk, same

BLOCKWISE = (BlockPrefix(), BlockDual(), UniformCache(), UniformCache(refresh_next=0), UniformCache(refresh_next=1))
DRIFTING = (UniformCache(drift=0.1), UniformCache(refresh_next=0, drift=0.0))
DLLM = (
    DllmCache(),
    DllmCache(5, 3),
    DllmCache(4, 2, 0.0),
    DllmCache(7, 4, select="random"),
    DllmCache(7, 4, cfg_interval=2),
)
DKV = (DkvDecode(), DkvPrefill(), DkvPd(), DkvGreedy())
INNER: tuple[CachePolicy, ...] = (Dense(), *BLOCKWISE[:2], *DLLM, *DKV, Exact())
OVER = tuple(
    BiCache(inner, 2, interval, state)
    for inner in INNER
    for interval in (None, 1, 3, 5)
    for state in ("stored", "recomputed")
    if state == "stored" or isinstance(inner, BlockDual)
)
POLICIES: tuple[CachePolicy, ...] = (*INNER, *BLOCKWISE[2:], *DRIFTING, Reuse(), *OVER)
REGISTERED = [each for each in BUILT_IN.built_in.values() if "masked" in each.kinds]
NEVER_REPEAT = (DkvDecode, DkvPd, DkvGreedy)


def walk(policy: CachePolicy, seed: int) -> tuple[list[View], list[Plan], list[int]]:
    """The views of a request, what the policy plans for each, asked for every one of them, and how often it repeats."""
    rng = random.Random(seed)
    prefix = rng.choice([None, PrefixHit(3, 2), PrefixHit(2, 1, 2), PrefixHit(2, 3)])
    steps = Walk(prompt=5, block_length=8, blocks=2, ordered=True, idle=(3, 4, 11), seed=seed).views()
    policy = policy if prefix is not None else policy.without_prefix
    views, plans, repeats = [], [], []
    blocks = np.repeat([5, 13, 21], [5, 8, 8])
    for view in steps:
        view.prefix = prefix
        if isinstance(getattr(policy, "inner", policy), Exact):
            view.sees = blocks
        views.append(view)
        plans.append(policy.plan(view))
        repeats.append(policy.repeats(view))
    return views, plans, repeats


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_is_said_to_repeat_is_planned_the_same(policy: CachePolicy) -> None:
    for seed in range(6):
        views, plans, repeats = walk(policy, seed)
        for at, (view, plan) in enumerate(zip(views, plans, strict=True)):
            later = [n for n in range(at + 1, len(views)) if views[n].block == view.block]
            for n in later[: repeats[at]]:
                repeated = plan.repeated(view.block, views[n].noisy)
                assert repeated.again
                assert repeated.spans is plan.spans
                assert repeated.predicted.tolist() == repeated.predict.nonzero()[0].tolist()
                assert repeated.refreshes == plans[n].refreshes
                assert same(repeated, plans[n])
            if repeats[at]:
                assert plan.predict.tolist() == view.candidates.tolist()
                assert plan.transfer is None


def test_most_steps_repeat_the_one_before() -> None:
    """Or nothing would be gained. Where rows depend on what settled last, no step does."""
    for policy in POLICIES:
        inner = policy.inner if isinstance(policy, BiCache) else policy
        _, _, repeats = walk(policy, 0)
        share = sum(number > 0 for number in repeats) / len(repeats)
        if isinstance(inner, NEVER_REPEAT) or (isinstance(inner, DllmCache) and inner.select == "random"):
            assert share == 0
        elif isinstance(inner, Dense | Reuse | BlockDual) and not isinstance(policy, BiCache):
            assert share > 0.8


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("policy", [*POLICIES, *(each.make() for each in REGISTERED)], ids=repr)
def test_plans_read_only_what_was_written_and_change_no_view(policy: CachePolicy, shift: int) -> None:
    inner = getattr(policy, "inner", policy)
    ordered = isinstance(inner, DkvGreedy)
    walk = Walk(shift=shift, block_length=6, blocks=3, ordered=ordered, idle=(1, 2))
    if isinstance(inner, Exact) or (shift and ordered):
        return  # they refuse such models
    ledger = Ledger(walk.layers, walk.length, None)
    for view in walk.views():
        view = replace(view, hook_output=np.empty(0, dtype=np.int64))
        before = view.noisy.copy(), view.settled.copy()
        for index in range(2):
            plan = policy.plan(replace(view, pass_index=index))
            ledger.enter(plan)
            if not plan.fills:
                break
        assert np.array_equal(before[0], view.noisy)
        assert np.array_equal(before[1], view.settled)

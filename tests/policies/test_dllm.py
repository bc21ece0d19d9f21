from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.plan import Plan
from remask.policies import BiCache
from remask.policies.base import RequestFacts
from remask.policies.dllm import DllmCache
from tests.policies.views import Walk, positions

KNOBS = st.builds(
    DllmCache,
    prompt_interval=st.integers(1, 6),
    response_interval=st.integers(1, 6),
    ratio=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.999, 1.0]),
    cfg_interval=st.integers(1, 3),
    select=st.sampled_from(["value", "key"]),
    select_layers=st.integers(1, 3),
)
WALKS = st.builds(
    Walk,
    layers=st.integers(1, 4),
    prompt=st.integers(1, 5),
    block_length=st.integers(1, 6),
    blocks=st.integers(1, 2),
    shift=st.sampled_from([0, 1]),
    seed=st.integers(0, 9),
)


def parts(plan: Plan, layer: int) -> tuple[set[int], set[int], set[int], int]:
    """Of one layer: rows computed in any case, rows held, rows among which is picked, and how many."""
    span = next(span for span in plan.spans if layer in span.layers)
    held = set() if span.held is None else positions(span.held)
    among = set() if span.pick is None else positions(span.pick.candidates)
    assert span.frozen is None
    assert held | among <= positions(span.rows)
    assert not held & among
    return positions(span.computed), held, among, 0 if span.pick is None else span.pick.count


@given(WALKS, KNOBS)
def test_rows_are_the_authors_but_for_idle_prompt_rows(walk: Walk, policy: DllmCache) -> None:
    """Section 4. Between prompt refreshes only the prompt row that predicts the first response position is live."""
    prompt, response = set(range(walk.prompt)), set(range(walk.prompt, walk.length))
    live_prompt = {walk.prompt - 1} if walk.shift else set()
    count = int(len(response) * policy.ratio)
    for view in walk.views():
        plan = policy.plan(view)
        assert all(span.pick is None or span.pick.by == policy.select for span in plan.spans)
        assert plan.layers == walk.layers
        prompt_due = view.step % policy.prompt_interval == 0
        response_due = view.step % policy.response_interval == 0
        assert parts(plan, 0) == ((prompt if prompt_due else live_prompt) | response, set(), set(), 0)
        for layer in range(1, walk.layers):
            computed, held, among, picked = parts(plan, layer)
            assert computed == (prompt if prompt_due else set()) | (response if response_due else set())
            still = set() if prompt_due else live_prompt
            picks = not response_due and count > 0
            assert held == still | (set() if response_due or picks else response)
            assert among == (response if picks else set())
            assert picked == (count if picks else 0)


@given(WALKS, KNOBS, st.integers(0, 2**63 - 1))
def test_random_rows_are_drawn_for_each_layer_from_seed_and_step(walk: Walk, policy: DllmCache, seed: int) -> None:
    """They are computed and the rest of the response is held; nothing else differs from the other selections."""
    random = replace(policy, select="random")
    for view in walk.views():
        view = replace(view, seed=seed)
        plan, other = random.plan(view), policy.plan(view)
        assert plan.cost == other.cost
        assert plan.predict.tolist() == other.predict.tolist()
        assert parts(plan, 0) == parts(other, 0)
        for layer in range(1, walk.layers):
            computed, held, among, picked = parts(other, layer)
            first = layer - (layer - 1) % policy.select_layers
            drawn = np.random.default_rng([seed, view.step, first]).permutation(sorted(among))[:picked]
            chosen = set(drawn.tolist())
            assert parts(plan, layer) == (computed | chosen, held | among - chosen, set(), 0)


@given(WALKS, KNOBS)
def test_a_residual_that_is_kept_serves_later_blocks_too(walk: Walk, policy: DllmCache) -> None:
    for view in walk.views():
        plan = policy.plan(view)
        wanted = view.candidates if policy.cfg_interval == 1 else view.noisy
        assert plan.predict.tolist() == wanted.tolist()
        assert plan.predict is not view.noisy
        assert plan.transfer is None


def test_counting_down_by_hand() -> None:
    """Ten steps, Kp = 4 and Kr = 3: k runs from 10 to 1, and the first step fills the caches whatever k is."""
    policy = DllmCache(4, 3, 0.0, phase="down")
    walk = Walk(layers=2, block_length=10, blocks=1)
    plans = [policy.plan(replace(view, steps=10)) for view in walk.views()]
    held = [plan.spans[1].held for plan in plans]
    computed = [
        plan.spans[1].rows & ~(np.zeros(walk.length, dtype=np.bool_) if h is None else h)
        for plan, h in zip(plans, held, strict=True)
    ]
    prompt = [bool(rows[: walk.prompt].any()) for rows in computed]
    response = [bool(rows[walk.prompt :].any()) for rows in computed]
    assert [10 - step for step in range(10) if prompt[step]] == [10, 8, 4]
    assert [10 - step for step in range(10) if response[step]] == [10, 9, 6, 3]


def test_counting_down_needs_a_number_of_steps() -> None:
    policy = DllmCache(phase="down")
    policy.check(RequestFacts(3, 0, ordered=False, canvas=12, response=8, steps=8))
    with pytest.raises(ConfigError, match=r"phase='down' counts steps .*use phase='up', or sampling with 'steps'"):
        policy.check(RequestFacts(3, 0, ordered=False, canvas=12, response=8))


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, list(range(13))), (3, [0, 1, 2, 3, 4, 6, 9, 12]), (100, [0, 1, 2, 3, 4])]
)
def test_guidance_runs_in_the_first_five_steps_and_every_interval(interval: int, expected: list[int]) -> None:
    for policy in (DllmCache(cfg_interval=interval), BiCache(DllmCache(cfg_interval=interval), 1)):
        assert [step for step in range(13) if policy.guides(step)] == expected
        assert policy.traits.schedule.own_clocks
        assert "outputs" in policy.traits.keeps

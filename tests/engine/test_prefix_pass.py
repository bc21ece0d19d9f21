"""Prefix-only passes in pieces, and refreshes that take turns: work is moved in time and stays what it is."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import BiCache, BlockDual, Reuse
from remask.policies.registry import POLICIES
from tests.engine.kinds import checkpoint
from tests.engine.support import (
    LAYERS,
    VOCAB,
    CheckedTransformer,
    Work,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    policy_of,
    prompt_of,
    request,
    run,
    small_config,
)
from tests.sampling_fields import flat_params

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
PREFIX = 30


def published(engine: Engine) -> list[torch.Tensor]:
    """K, V of the only entry in every layer, and its boundary states."""
    (entry,) = engine.store.entries
    slots = torch.from_numpy(entry.extent.slots())
    return [*(t[slots] for pair in zip(engine.pool.k, engine.pool.v, strict=True) for t in pair), entry.states]


@pytest.mark.few(3)
@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_pieces_are_the_whole_pass_bit_for_bit(family: str, dtype: torch.dtype, layers: int) -> None:
    config = small_config(family)
    model = CheckedTransformer(config, lively_weights(config, dtype))
    work = Work(request("r", PREFIX + 4, PREFIX), BiCache(depth=2, refresh_interval=2))
    entries, results, steps = [], [], []
    for budget in (None, layers * PREFIX + 7):
        engine = poisoned_engine(model, max_row_layers=budget)
        results.append(outcome(run(engine, [work])["r"]))
        entries.append(published(engine))
        steps.append(engine.stats.steps)
        assert engine.stats.prefix_passes == 1
        assert engine.stats.prefix_row_layers == PREFIX * LAYERS
    assert steps[1] - steps[0] == -(-LAYERS // layers) - 1
    for whole, pieces in zip(*entries, strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, pieces)
    assert results[0] == results[1]


@FAMILIES
def test_pieces_of_many_passes_at_different_layers_share_a_step(family: str) -> None:
    """Prefixes of several lengths begin at different steps beside requests that run: every state has its place."""
    works = [
        Work(request(f"r{i}", [i, *prompt_of(length)], length), BiCache(depth=depth), joins=i)
        for i, (length, depth) in enumerate([(20, 1), (9, 2), (13, 3), (5, 4), (26, 2)])
    ]
    limits: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 48, "store_budget_tokens": 200}
    whole, pieces = make_engine(family, **limits), make_engine(family, max_row_layers=90, **limits)
    results = [{name: outcome(r) for name, r in run(engine, works).items()} for engine in (whole, pieces)]
    assert results[0] == results[1]
    entries = [{entry.tokens: entry for entry in engine.store.entries} for engine in (whole, pieces)]
    for tokens, entry in entries[0].items():
        other = entries[1][tokens]
        torch.testing.assert_close(other.states, entry.states, rtol=1e-9, atol=1e-9)
        for one, two in zip(whole.pool.k, pieces.pool.k, strict=True):
            torch.testing.assert_close(two[other.extent.slots()], one[entry.extent.slots()], rtol=1e-9, atol=1e-9)


def test_a_long_prefix_does_not_hold_up_what_runs() -> None:
    """With pieces the short request takes part in every step, and no step computes more than the budget."""
    budget = 200
    engine = make_engine(overlap=False, max_row_layers=budget, max_model_len=128, store_budget_tokens=128)
    engine.add(request("short", 8, max_tokens=16))
    engine.step()
    (short,) = engine._lifecycle.unfinished()
    engine.add(request("long", 104, 100).with_policy(Reuse()))
    done, work = [short.record.usage.forwards], [engine.stats.row_layers]
    while not engine.store.entries or not engine.store.entries[0].ready:
        engine.step()
        done.append(short.record.usage.forwards)
        work.append(engine.stats.row_layers)
    assert len(done) == 1 + LAYERS, "a layer fits beside the short request"
    assert np.diff(done).tolist() == [1] * LAYERS
    assert max(b - a for a, b in pairwise(work)) <= budget
    run(engine, [])


def test_a_piece_takes_what_others_leave() -> None:
    engine = make_engine(overlap=False, max_row_layers=300, max_model_len=64, store_budget_tokens=128)
    for i in range(2):
        engine.add(request(f"r{i}", 8, max_tokens=16))
    engine.step()
    engine.add(request("long", 54, 50).with_policy(Reuse()))
    before = engine.stats.row_layers
    engine.step()
    assert engine.stats.row_layers - before == 2 * 24 * LAYERS + 2 * 50, "two layers fit"
    run(engine, [])


def test_layers_outside_a_piece_are_not_run_at_all() -> None:
    engine = make_engine(max_row_layers=2 * PREFIX)
    model = engine.model
    assert isinstance(model, CheckedTransformer)
    engine.add(request("r", PREFIX + 4, PREFIX).with_policy(Reuse()))
    run_layers = []
    for _ in range(2):
        engine.step()
        assert model.last is not None
        run_layers.append([layer for stage in model.last.stages for layer in stage.layers])
    assert run_layers == [[0, 1], [2, 3]]
    run(engine, [])


def test_a_layer_larger_than_the_budget_runs_by_itself() -> None:
    engine = make_engine(max_row_layers=5)
    run(engine, [Work(request("r", 14, 10), Reuse())])
    assert engine.stats.prefix_row_layers == 10 * LAYERS
    assert engine.stats.prefix_passes == 1


def test_a_pass_whose_request_is_gone_runs_to_its_end() -> None:
    engine = make_engine(max_row_layers=12)
    engine.add(request("gone", 14, 10).with_policy(Reuse()))
    engine.step()
    engine.cancel("gone")
    assert not engine.store.entries[0].ready
    results = run(engine, [Work(request("next", 14, 10), Reuse())])
    assert results["next"].usage.cached_tokens == 10
    assert engine.stats.prefix_passes == 1


def staggered(count: int, interval: int = 4, **limits: Any) -> tuple[Engine, list[Work]]:
    engine = make_engine(max_num_seqs=count, **limits)
    shared = prompt_of(24)
    policy = BiCache(depth=2, refresh_interval=interval)
    return engine, [
        Work(request(f"r{i}", [*shared, i % VOCAB], 24, max_tokens=16, seed=i, temperature=0.7), policy)
        for i in range(count)
    ]


def spent(engine: Engine, work: list[Work]) -> tuple[list[int], dict[str, Any]]:
    """Row-layers of each step after the prefix-only pass, and all results."""
    seen: list[int] = []
    results = run(engine, work, each_step=lambda _: seen.append(engine.stats.row_layers))
    seen.append(engine.stats.row_layers)
    return [b - a for a, b in pairwise(seen)][1:], {name: outcome(result) for name, result in results.items()}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_refreshes_take_turns_and_no_answer_changes(limit: int) -> None:
    free, expected = spent(*staggered(4))
    steps, results = spent(*staggered(4, max_refreshes=limit))
    assert results == expected
    assert sum(steps) == sum(free)
    light, refresh = 4 * 17 * LAYERS, 24 * (LAYERS - 2)
    assert max(free) == light + 4 * refresh
    assert max(steps) == light + limit * refresh
    # Each request waits at most until the others have begun; from then on their clocks stay apart.
    assert len(steps) <= len(free) + 3


PROMPT, RESPONSE, LENT = 8, 8, 6
FOUR: dict[str, Any] = {"block_length": 4}  # two blocks of four steps, a token each
SHARED = {"depth": 2, "refresh_interval": 3}

# The cache, its settings, sampling, passes that refresh, passes in which rows of the shared prefix are computed.
MASKED: list[tuple[str, dict[str, Any], dict[str, Any], int, int]] = [
    ("none", {}, FOUR, 0, 0),
    ("reuse", {}, FOUR, 0, 0),
    ("bicache", SHARED, FOUR, 3, 3),  # steps 0, 3 and 6
    ("bicache", {"depth": 2, "refresh_interval": None}, FOUR, 1, 1),
    ("bicache", {**SHARED, "depth": LAYERS}, FOUR, 0, 0),
    ("bicache", {**SHARED, "depth": 0}, FOUR, 0, 0),
    ("bicache", {**SHARED, "depth": 0, "within_request": True}, FOUR, 3, 0),  # nothing of it is the store's
    ("block-prefix", {}, FOUR, 2, 0),  # the first pass of each block
    ("block-prefix", {}, {"block_length": 1}, 8, 0),
    ("block-dual", {}, FOUR, 2, 0),
    ("block-dual", {"fill_pass": "separate"}, FOUR, 2, 0),
    ("dkv-decode", {"refresh_interval": 3}, FOUR, 6, 0),  # steps 0, 1 and 3 of each block
    ("dkv-decode", {"refresh_interval": None}, FOUR, 4, 0),
    ("dkv-prefill", {}, FOUR, 1, 0),
    ("dkv-pd", {"refresh_interval": 3}, FOUR, 6, 0),
    ("dkv-greedy", {"refresh_interval": 3}, {**FOUR, "remasking": "random"}, 4, 0),
    ("dllm-cache", {"prompt_interval": 5, "response_interval": 3}, FOUR, 4, 0),  # steps 0, 3, 5 and 6
    ("dllm-cache", {"prompt_interval": 5, "response_interval": 3}, {**FOUR, "cfg_scale": 1.0}, 4, 0),
    ("bicache+block-dual", SHARED, FOUR, 4, 3),  # steps 0, 3 and 6, and 4, where the second block begins
    ("bicache+block-dual", {**SHARED, "fill_pass": "separate"}, FOUR, 4, 3),
]
UNIFORM: list[tuple[str, dict[str, Any], int]] = [
    ("none", {}, 0),
    ("block-prefix", {}, 2),
    ("uniform-cache", {"refresh_next": 0}, 2),
    ("uniform-cache", {"refresh_next": 2}, 4),  # two more in the first block; after the second there is none
]


def served(engine: Engine, cache: str, settings: dict[str, Any], prompt: list[int], prefix: int, **how: Any) -> None:
    """Run one request, and hold its row-layers against the engine's counters."""
    params = flat_params(**{"max_tokens": RESPONSE, "ignore_eos": True, "seed": 0, **how})
    engine.add(Request("r", prompt, params, prefix, policy=policy_of(cache, **settings)))
    engine.step()
    (running,) = engine._lifecycle.unfinished()
    usage, length, canvases = running.record.usage, running.pending.decoding.length, running.pending.canvas_count
    while engine.busy:
        engine.step()  # a pass for others may follow the result, so the usage is read at the end
    stats = engine.stats
    assert stats.row_layers == usage.row_layers + stats.prefix_row_layers
    canvases = usage.forwards * (1 if running.policy.traits.schedule.own_clocks else canvases)
    whole = canvases * length * engine.model.config.layers
    assert stats.row_layers_saved == whole - usage.row_layers


@pytest.mark.parametrize(("cache", "settings", "sampling", "refreshes", "of_the_prefix"), MASKED)
def test_masked(
    cache: str, settings: dict[str, Any], sampling: dict[str, Any], refreshes: int, of_the_prefix: int
) -> None:
    engine = make_engine()
    served(engine, cache, settings, prompt_of(PROMPT), LENT, **sampling)
    assert (engine.stats.refreshes, engine.stats.prefix_refreshes) == (refreshes, of_the_prefix)


@pytest.mark.parametrize(("cache", "settings", "refreshes"), UNIFORM)
def test_uniform(cache: str, settings: dict[str, Any], refreshes: int) -> None:
    engine = poisoned_engine(checkpoint("gidd").model)
    how = {"block_length": 4, "steps_per_block": 4, "min_tokens": RESPONSE}
    served(engine, cache, settings, list(range(PROMPT)), 0, **how)
    assert engine.stats.refreshes == refreshes


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_block_causal(cache: str) -> None:
    engine = poisoned_engine(checkpoint("sdar").model)
    served(engine, cache, {}, list(range(PROMPT)), 0)
    assert engine.stats.refreshes == 0, "what is committed is final"


def test_no_refresh_is_put_off_where_every_pass_is_one() -> None:
    """With one step a block, all passes of `block-dual` cost the same: only the first one waits for another's."""
    steps = {}
    for limit in (None, 1):
        engine = make_engine(max_refreshes=limit)
        for name in "ab":
            engine.add(request(name, block_length=1).with_policy(BlockDual()))
        while engine.busy:
            engine.step()
        steps[limit] = engine.stats.steps
    assert steps == {None: 8, 1: 9}


def test_every_policy_is_counted_here() -> None:
    specs = ["exact", *(case[0] for case in MASKED), *(case[0] for case in UNIFORM)]
    names = {name for spec in specs for name in spec.split("+")}
    assert names == POLICIES.built_in.keys(), "add a case to MASKED or UNIFORM, with the passes it should take"

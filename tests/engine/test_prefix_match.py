"""Shared prefixes of different lengths: what a request reads when its own is not stored."""

import random
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.request import Request
from remask.errors import UnknownNameError
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.bicache import DepthLookup
from remask.policies.block import BlockDual
from tests.engine.support import (
    LAYERS,
    Work,
    alone,
    as_if_asked_for,
    make_engine,
    outcome,
    prompt_of,
    request,
    run,
    running_canvases,
    served,
)

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
TALK = prompt_of(30)


def turn(name: str, prefix: int, more: int = 3, policy: CachePolicy | None = None, **sampling: Any) -> Work:
    """A request whose shared prefix is the first `prefix` tokens of one conversation."""
    asked = [*TALK[:prefix], *prompt_of(more, seed=prefix)]
    return Work(request(name, asked, prefix, **sampling), policy or Reuse())


@pytest.mark.few(3)
@FAMILIES
@pytest.mark.parametrize("policy", [Reuse(), BiCache(depth=2), BiCache(BlockDual(), depth=3, refresh_interval=2)])
def test_the_next_turn_reads_the_last_ones_prefix(family: str, policy: CachePolicy) -> None:
    engine = make_engine(family, prefix_match="longest")
    turns = [turn("a", 10, policy=policy), turn("b", 15, policy=policy), turn("c", 19, policy=policy)]
    results = served(engine, *turns)
    assert [result.usage.cached_tokens for result in results] == [0, 10, 10]
    assert engine.stats.prefix_passes == 1
    assert (engine.store.stats.hits, engine.store.stats.partial_hits) == (2, 2)
    for item, result in zip(turns, results, strict=True):
        assert outcome(result) == outcome(alone(as_if_asked_for(item, result), family)), item


def test_exact_entries_are_asked_for_unless_told_otherwise() -> None:
    engine = make_engine()
    results = served(engine, turn("a", 10), turn("b", 15))
    assert [result.usage.cached_tokens for result in results] == [0, 0]
    assert [len(entry) for entry in engine.store.entries] == [10, 15]


def test_the_depth_is_that_of_the_matched_length() -> None:
    table = BiCache(depth=DepthLookup({30: 1, 55: 2, 60: 3}))
    engine = make_engine(prefix_match="longest")
    results = served(engine, turn("a", 14, policy=table), turn("b", 20, policy=table), turn("again", 20, policy=table))
    assert [result.usage.prefix_depth for result in results] == [2, 1, 3]  # 14 / 25, 14 / 31, 20 / 31
    assert [result.usage.cached_tokens for result in results] == [0, 14, 0]


def test_a_level_too_short_to_be_read_at_all_is_no_match() -> None:
    table = BiCache(depth=DepthLookup({50: 2}))
    engine = make_engine(prefix_match="longest")
    results = served(engine, turn("a", 14, policy=table), turn("b", 20, policy=table))
    assert [result.usage.cached_tokens for result in results] == [0, 0]
    assert [len(entry) for entry in engine.store.entries] == [14, 20]


def test_what_is_asked_for_twice_is_published_once() -> None:
    engine = make_engine(prefix_match="longest", max_num_seqs=2)
    served(engine, turn("first", 10))
    results = run(engine, [turn(f"r{i}", 15, more=i) for i in range(5)])
    assert [results[f"r{i}"].usage.cached_tokens for i in range(5)] == [10, 0, 15, 15, 15]
    assert [len(entry) for entry in engine.store.entries] == [10, 15]


def test_a_request_that_waits_for_pages_has_asked_once() -> None:
    engine = make_engine(prefix_match="longest", max_num_seqs=2)
    served(engine, turn("first", 10))
    extent = engine.allocator.allocate(engine.pool.page_size * (engine.pool.page_count - 3), range(LAYERS))
    assert extent is not None
    engine.add(turn("r", 15).request.with_policy(Reuse()))
    for _ in range(5):
        engine.step()
    assert (running_canvases(engine), engine.waiting) == (0, 1)
    engine.allocator.release(extent)
    assert run(engine, [])["r"].usage.cached_tokens == 10


def test_a_prefix_larger_than_the_budget_reads_a_level() -> None:
    engine = make_engine(prefix_match="longest", store_budget_tokens=12)
    results = served(engine, turn("a", 10), turn("b", 25), turn("c", 25))
    assert [result.usage.cached_tokens for result in results] == [0, 10, 10]
    assert [result.usage.prefix_note for result in results] == [None] * 3
    assert engine.store.stats.unread_reasons["budget"] == 0


def test_a_level_that_still_waits_for_its_pass_is_waited_for() -> None:
    engine = make_engine(prefix_match="longest", max_row_layers=1)
    turns = [turn("a", 10), turn("b", 15)]
    results = run(engine, turns)
    assert results["b"].usage.cached_tokens == 10
    assert outcome(results["b"]) == outcome(alone(as_if_asked_for(turns[1], results["b"])))


@pytest.mark.few(5)
@FAMILIES
@pytest.mark.parametrize("seed", range(6))
def test_what_is_read_says_all(family: str, seed: int) -> None:
    """Whatever came before: an answer is that of the request alone, asking for exactly the prefix that it read."""
    rng = random.Random(f"levels {family} {seed}")
    engine = make_engine(
        family,
        prefix_match="longest",
        max_num_seqs=rng.randint(1, 4),
        store_budget_tokens=rng.choice([12, 30, 64]),
        page_size=rng.choice([1, 4, 7]),
        eviction=rng.choice(["fifo", "lru"]),
        max_row_layers=rng.choice([None, 60, 300]),
    )
    policies: list[CachePolicy] = [Dense(), Reuse(), BiCache(depth=2, refresh_interval=2), BiCache(BlockDual(), 3)]
    work = []
    for i in range(14):
        item = turn(f"r{i}", rng.randint(1, 30), rng.randint(1, 4), rng.choice(policies), max_tokens=4)
        salted = replace(item.request, cache_salt=rng.choice(["", "", "tenant"]), priority=rng.randint(-1, 1))
        work.append(Work(salted, item.policy, joins=rng.randrange(20)))
    results = run(engine, work)
    assert engine.store.stats.hits == sum(bool(result.usage.cached_tokens) for result in results.values())
    for item in work:
        result = results[item.request.id]
        budget = engine.config.store_budget_tokens
        expected = alone(as_if_asked_for(item, result), family, store_budget_tokens=budget)
        assert outcome(result) == outcome(expected), item


def test_the_entry_that_a_waiting_request_would_read_stays() -> None:
    """Small entries hold all pages; another one gives way although it comes later in line."""
    engine = make_engine(max_num_seqs=1, max_model_len=32, page_size=16, store_budget_tokens=100)
    for i in range(engine.pool.page_count - 1):
        run(engine, [Work(Request(f"r{i}", [i, 1], request(max_tokens=1).params, 1), Reuse())])
    assert engine.store.entries[0].tokens == (0,)
    evictions = engine.store.stats.evictions
    result = run(engine, [Work(request("long", [0] * 20, 1, max_tokens=12), Reuse())])["long"]
    assert engine.store.stats.evictions > evictions
    assert result.usage.cached_tokens == 1
    assert engine.store.entries[0].tokens == (0,)


def test_unknown_ways_of_matching_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'longest'"):
        make_engine(prefix_match="longst")

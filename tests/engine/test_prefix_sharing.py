"""Shared prefixes that nobody names: `prefix_sharing="auto"`."""

import random
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual
from remask.request.result import Result
from tests.engine.support import Work, alone, make_engine, outcome, prompt_of, request, run, served

SYSTEM = prompt_of(20)
FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])


def asks(
    name: str, head: list[int], tail: int = 4, policy: CachePolicy | None = None, salt: str = "", **more: Any
) -> Work:
    """A request that does not say what is shared. Tails begin with different tokens as long as there are few."""
    tokens = [*head, sum(map(ord, name)) % 60, *prompt_of(tail - 1, sum(map(ord, name)))]
    asked = replace(request(name, tokens, 0, **more), find_prefix=True, cache_salt=salt)
    return Work(asked, policy or BiCache(depth=2))


def auto(family: str = "llada", **limits: Any) -> Engine:
    return make_engine(family, **{"prefix_sharing": "auto", "prefix_min": 6, **limits})


def read(results: list[Result]) -> list[tuple[int, int]]:
    """Of each request the length of the prefix that it read, and of what was stored before."""
    return [(result.usage.prefix_tokens, result.usage.cached_tokens) for result in results]


def declared(item: Work, length: int) -> Work:
    """The same request that says itself what is shared."""
    return replace(item, request=replace(item.request, prefix_length=length, find_prefix=False))


def same_answer(item: Work, result: Result, family: str = "llada") -> None:
    assert outcome(result) == outcome(alone(declared(item, result.usage.prefix_tokens), family)), item


@pytest.mark.few(3)
@FAMILIES
@pytest.mark.parametrize("policy", [Reuse(), BiCache(depth=2), BiCache(BlockDual(), depth=3, refresh_interval=2)])
def test_what_is_seen_twice_is_shared(family: str, policy: CachePolicy) -> None:
    engine = auto(family)
    items = [asks(name, SYSTEM, policy=policy) for name in "abcd"]
    results = served(engine, *items)
    assert read(results) == [(0, 0), (20, 0), (20, 20), (20, 20)]
    assert engine.stats.prefix_passes == 1
    for item, result in zip(items, results, strict=True):
        same_answer(item, result, family)


def test_requests_that_come_together_share() -> None:
    engine = auto()
    items = [asks(name, SYSTEM) for name in "abcd"]
    results = run(engine, items)
    assert read([results[name] for name in "abcd"]) == [(0, 0), (20, 0), (20, 20), (20, 20)]


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_nothing_is_found_unless_asked_for(mode: str) -> None:
    engine = make_engine(prefix_sharing=mode, prefix_min=6)
    assert read(served(engine, *(asks(name, SYSTEM) for name in "abc"))) == [(0, 0)] * 3
    assert engine.memory.recent.prompt_count == 0


def test_off_shares_nothing_that_is_named_either() -> None:
    engine = make_engine(prefix_sharing="off")
    item = Work(request("a", SYSTEM, 10), Reuse())
    (result,) = served(engine, item)
    assert result.usage.prefix_note == "prefix_sharing is off"
    expected = alone(replace(item, policy=Dense()))
    assert result.trace == expected.trace
    assert engine.store.stats.unread_reasons["budget"] == 0
    assert served(engine, Work(request("b", SYSTEM, 0), Reuse()))[0].usage.prefix_note is None


def test_what_a_request_names_is_what_it_shares() -> None:
    engine = auto()
    first, second = asks("a", SYSTEM), asks("b", SYSTEM)
    named = declared(asks("c", SYSTEM), 8)
    none = declared(asks("d", SYSTEM), 0)
    assert read(served(engine, first, second, named, none)) == [(0, 0), (20, 0), (8, 0), (0, 0)]


def test_a_guess_that_is_long_enough_stands() -> None:
    engine = auto()
    served(engine, asks("a", SYSTEM), asks("b", SYSTEM))
    long, short = (replace(asks(name, SYSTEM).request, prefix_length=length) for name, length in (("c", 9), ("d", 3)))
    results = served(engine, Work(long, Reuse()), Work(short, Reuse()))
    assert read(results) == [(9, 0), (20, 20)]


def test_short_parts_are_not_worth_it() -> None:
    engine = auto(prefix_min=21)
    assert read(served(engine, *(asks(name, SYSTEM) for name in "abc"))) == [(0, 0)] * 3


def test_a_level_is_read_by_those_that_have_more_in_common() -> None:
    """No pass for each of many questions that begin alike by chance."""
    engine = auto()
    tails = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 1], [1, 2, 3, 5], [7, 8, 9, 2]]
    items = [
        Work(replace(request(f"r{i}", [*SYSTEM, *tail]), find_prefix=True), BiCache(depth=2))
        for i, tail in enumerate(tails)
    ]
    results = served(engine, *items)
    assert read(results) == [(0, 0), (22, 0), (20, 0), (22, 22), (20, 20)]
    for item, result in zip(items, results, strict=True):
        same_answer(item, result)


def test_a_much_longer_part_becomes_a_level_of_its_own() -> None:
    engine = auto(max_model_len=128, store_budget_tokens=200)
    long = [*SYSTEM, *prompt_of(30, 5)]
    results = served(engine, *(asks(name, SYSTEM) for name in "ab"), *(asks(name, long) for name in "cde"))
    assert read(results) == [(0, 0), (20, 0), (20, 20), (50, 0), (50, 50)]


def test_tenants_are_apart() -> None:
    engine = auto()
    items = [asks("a", SYSTEM, salt="x"), asks("b", SYSTEM, salt="y"), asks("c", SYSTEM, salt="x")]
    assert read(served(engine, *items)) == [(0, 0), (0, 0), (20, 0)]


def test_an_evicted_level_comes_again() -> None:
    engine = auto()
    served(engine, asks("a", SYSTEM), asks("b", SYSTEM))
    engine.store.drop()
    assert read(served(engine, asks("c", SYSTEM))) == [(20, 0)]


def test_a_part_that_exceeds_the_store_is_not_shared() -> None:
    engine = auto(store_budget_tokens=15)
    results = served(engine, asks("a", SYSTEM), asks("b", SYSTEM))
    assert read(results) == [(0, 0), (0, 0)]
    assert results[1].usage.prefix_note == "prefix of 20 tokens exceeds the store's budget of 15"


def test_the_whole_prompt_again() -> None:
    for family, length in (("llada", 24), ("dream", 23)):
        engine = auto(family)
        again = asks("a", SYSTEM, policy=Reuse())
        results = served(engine, again, again, again)
        assert read(results) == [(0, 0), (length, 0), (length, length)]
        same_answer(again, results[2], family)


def test_policies_that_share_nothing_are_not_remembered() -> None:
    engine = auto()
    served(engine, asks("a", SYSTEM, policy=Dense()), asks("b", SYSTEM, policy=BiCache(depth=0)))
    assert engine.memory.recent.prompt_count == 0


@FAMILIES
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))])
def test_what_was_read_says_all(family: str, seed: int) -> None:
    rng = random.Random(f"auto {family} {seed}")
    engine = auto(
        family,
        max_num_seqs=rng.randint(1, 4),
        store_budget_tokens=rng.choice([26, 64]),
        page_size=rng.choice([1, 4, 7]),
        max_row_layers=rng.choice([None, 60, 300]),
        prefix_match=rng.choice(["exact", "longest"]),
    )
    policies: list[CachePolicy] = [Dense(), Reuse(), BiCache(depth=2, refresh_interval=2), BiCache(BlockDual(), 3)]
    work: list[Work] = []
    for number in range(14):
        stem = prompt_of(24, rng.randrange(2))[: rng.choice([3, 8, 13, 24])]
        item = asks(
            f"r{number}", stem, rng.randint(1, 4), rng.choice(policies), rng.choice(["", "", "t"]), max_tokens=4
        )
        work.append(replace(item, joins=rng.randrange(25)))
    results = run(engine, work)
    assert any(result.usage.prefix_tokens for result in results.values())
    for item in work:
        result = results[item.request.id]
        expected = declared(item, result.usage.prefix_tokens)
        assert result.trace == alone(expected, family).trace, item

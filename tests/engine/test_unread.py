"""Why a request reads no shared prefix, how many did not, what the passes over new ones took, and what approximates."""

from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, Reuse
from remask.policies.bicache import DepthLookup
from remask.request.result import Result, Usage
from tests.engine.support import LAYERS, Work, alone, make_engine, request, run

TABLE = DepthLookup({20: 0, 50: 2})  # percent -> layers
DEEP = BiCache(depth=2)
AUTO = {"prefix_sharing": "auto", "prefix_min": 6}


def guessed(name: str, prompt: int, prefix: int = 0) -> Request:
    """As of a conversation or a text in which nobody says what is shared."""
    return replace(request(name, prompt, prefix), find_prefix=True)


def served(engine: Engine, *items: Request) -> list[Result]:
    return [run(engine, [Work(each, each.policy)])[each.id] for each in items]


UNREAD: list[tuple[str, str, Request, CachePolicy, dict[str, Any]]] = [
    ("depth", "8 tokens, 40 % of the canvas: the depth table gives 0", request("r", 12, 8), BiCache(depth=TABLE), {}),
    ("short", "10 % of the canvas: the depth table begins at 20 %", request("r", 12, 2), BiCache(depth=TABLE), {}),
    ("short", "the depth table is empty", request("r", 12, 8), BiCache(depth=DepthLookup({})), {}),
    ("depth", "depth=0 reads no shared prefix", request("r", 12, 8), BiCache(depth=0), {}),
    ("policy", "the cache policy reads no shared prefix", request("r", 12, 8), Dense(), {}),
    ("policy", "the cache policy reads no shared prefix", request("r", 12, 8), BlockDual(), {}),
    ("nothing", "no turn stands before the last user turn", guessed("r", 12), DEEP, {}),
    ("nothing", "no recent prompt begins with 6 tokens", guessed("r", 12), Reuse(), AUTO),
    ("off", "prefix_sharing is off", request("r", 12, 8), DEEP, {"prefix_sharing": "off"}),
    ("budget", "exceeds the store's budget of 8", request("r", 12, 8), DEEP, {"store_budget_tokens": 8}),
    ("salt", "of this cache_salt is stored yet", replace(request("r", 12, 8), cache_salt="mine"), DEEP, {}),
]


@pytest.mark.parametrize(("reason", "note", "asked", "policy", "limits"), UNREAD)
def test_a_request_that_reads_nothing_says_why(
    reason: str, note: str, asked: Request, policy: CachePolicy, limits: dict[str, Any]
) -> None:
    engine = make_engine(**limits)
    (result,) = served(engine, asked.with_policy(policy))
    assert result.usage.prefix_note is not None
    assert note in result.usage.prefix_note
    assert engine.store.stats.unread_reasons == {reason: 1}
    assert result.usage.cached_tokens == 0


def test_nothing_is_noted_of_who_reads_or_brings_a_prefix_or_asks_for_none() -> None:
    engine = make_engine()
    asked = [request("brings", 12, 8), request("reads", 12, 8), request("none", 12)]
    results = served(engine, *(each.with_policy(DEEP) for each in asked), guessed("plain", 12))
    assert [result.usage.prefix_note for result in results] == [None] * 4
    assert not engine.store.stats.unread_reasons


def test_a_salt_tells_nothing_of_what_others_have_stored() -> None:
    """The note is the same whether or not another tenant has stored the prefix; and the second time it is read."""
    first, other = make_engine(), make_engine()
    mine = replace(request("mine", 12, 8), cache_salt="mine").with_policy(DEEP)
    served(other, replace(mine, id="theirs", cache_salt="theirs"))
    notes = {served(engine, mine)[0].usage.prefix_note for engine in (first, other)}
    assert len(notes) == 1
    (again,) = served(first, replace(mine, id="again"))
    assert (again.usage.prefix_note, again.usage.cached_tokens) == (None, 8)


@pytest.mark.parametrize("budget", [None, 8])
def test_a_request_reports_the_pass_over_the_prefix_that_it_brought(budget: int | None) -> None:
    """Cut into pieces or not; those that wait for it report none."""
    engine = make_engine(max_row_layers=budget)
    names, asked = ["brings", "waits"], replace(request("brings", 12, 8), prefix_length=8)
    results = run(engine, [Work(replace(asked, id=name), DEEP) for name in names])
    (reads,) = served(engine, replace(asked, id="reads").with_policy(DEEP))
    assert [results[name].usage.prefix_row_layers for name in names] == [8 * LAYERS, 0]
    assert reads.usage.prefix_row_layers == 0
    assert engine.stats.prefix_row_layers == 8 * LAYERS


@pytest.mark.parametrize(
    ("policy", "prefix", "name"),
    [
        (Dense(), 8, None),
        (BiCache(depth=TABLE), 8, None),
        (BiCache(depth=TABLE), 12, "bicache"),
        (BiCache(depth=2), 0, None),
        (BiCache(BlockDual(), depth=2), 8, "bicache+block-dual"),
        (BiCache(BlockDual(), depth=TABLE), 8, "block-dual"),
        (BiCache(depth=TABLE, within_request=True), 8, "bicache (within_request)"),
        (Reuse(), 8, "reuse"),
        (Reuse(), 0, None),
    ],
    ids=repr,
)
def test_what_approximates_is_told(policy: CachePolicy, prefix: int, name: str | None) -> None:
    found = alone(Work(request("r", 13, prefix, seed=1), policy))
    assert found.usage.approximation == name
    if name is None:
        assert found.token_ids == alone(Work(request("r", 13, seed=1), Dense())).token_ids


def test_usage_of_several_requests() -> None:
    usages = [
        Usage(3, 1, 2, 4, 5, 6, 7, 8, 9, "a", "bicache"),
        Usage(5, 1, prefix_note="b", approximation="bicache"),
        Usage(7, prefix_note="a", correction_steps=2),
    ]
    total = Usage.total(usages)
    assert total == Usage(15, 2, 2, 4, 5, 6, 7, 8, 9, "a; b", "bicache", 2)
    assert Usage.total([]) == Usage(0)

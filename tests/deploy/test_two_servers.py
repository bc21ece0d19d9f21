"""Two plain servers behind a small client that routes by prefix, against the same behind round-robin."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from remask.deploy.routing import Spill, prefix_identity
from tests.deploy.fleets import ROUTER, emptied, named, router
from tests.deploy.test_ray_serve import ASKS, BUDGET
from tests.http_load import Outcome, hit_ratio, send, send_all
from tests.server.serving import Running, make_llm, serving

Choose = Callable[[Mapping[str, Any], Mapping[str, int]], str]


@contextmanager
def fleet() -> Iterator[dict[str, Running]]:
    """Two servers with empty stores."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(make_llm(store_budget_tokens=BUDGET), max_queue=64)) for name in "ab"}


async def ask_all(
    servers: Mapping[str, Running], choose: Choose, at_a_time: int
) -> tuple[list[Outcome], dict[str, int]]:
    """Outcomes of all requests, and the most that each server had open."""
    turns = asyncio.Semaphore(at_a_time)
    loads = dict.fromkeys(servers, 0)
    peaks = dict(loads)

    async def one(client: Mapping[str, httpx.AsyncClient], number: int) -> Outcome:
        async with turns:
            name = choose(ASKS[number].body, loads)
            loads[name] += 1
            peaks[name] = max(peaks[name], loads[name])
            try:
                return await send(client[name], ASKS[number])
            finally:
                loads[name] -= 1

    clients = {name: httpx.AsyncClient(base_url=server.base, timeout=60) for name, server in servers.items()}
    try:
        outcomes = await asyncio.gather(*(one(clients, number) for number in range(len(ASKS))))
    finally:
        for client in clients.values():
            await client.aclose()
    assert all(outcome.right for outcome in outcomes)
    return outcomes, peaks


@pytest.mark.thorough
def test_a_prefix_goes_where_it_is_held() -> None:
    spill = Spill(slots=8)

    def by_prefix(body: Mapping[str, Any], loads: Mapping[str, int]) -> str:
        return spill.order(prefix_identity(body), loads)[0]

    turn = itertools.cycle("ab")
    with fleet() as servers:
        routed, _ = asyncio.run(ask_all(servers, by_prefix, 1))
        held = [server.cache()["misses"] for server in servers.values()]
    with fleet() as servers:
        in_turn, _ = asyncio.run(ask_all(servers, lambda _body, _loads: next(turn), 1))
    print(f"hit ratio: by prefix {hit_ratio(routed):.3f}, round-robin {hit_ratio(in_turn):.3f}")
    assert sum(held) == 8, "every prefix was computed once, on one of the two"
    assert all(held)
    assert hit_ratio(routed) > hit_ratio(in_turn) + 0.2


@pytest.mark.thorough
def test_a_loaded_server_gets_no_more_than_its_bound() -> None:
    """One prefix and ten clients: half of them would do for a home of two slots."""
    spill = Spill(slots=2, balance=1.25)

    def by_prefix(_body: Mapping[str, Any], loads: Mapping[str, int]) -> str:
        return spill.order(b"the one prefix", loads)[0]

    with fleet() as servers:
        _, peaks = asyncio.run(ask_all(servers, by_prefix, 10))
    assert all(2 <= peak <= 7 for peak in peaks.values()), "at most 1.25 of the mean, rounded up"


@pytest.mark.soak
@pytest.mark.skipif(ROUTER is None, reason="needs the router: pip install vllm-router")
def test_vllms_router_finds_prefixes_as_often_as_ours() -> None:
    """The same requests, one after the other, over the same two servers with empty stores."""
    spill = Spill(slots=8)

    def by_prefix(body: Mapping[str, Any], loads: Mapping[str, int]) -> str:
        return spill.order(prefix_identity(body), loads)[0]

    with fleet() as servers:
        outcomes, _ = asyncio.run(ask_all(servers, by_prefix, 1))
        ours = hit_ratio(outcomes)
        shares = {}
        for policy, asked in (("consistent_hash", [named(ask) for ask in ASKS]), ("cache_aware", ASKS)):
            with router(policy, *emptied([server.base for server in servers.values()])) as base:
                shares[policy] = hit_ratio(asyncio.run(send_all(base, asked, at_a_time=1)))
    print(f"share of prompt tokens read: ours {ours:.3f}, {shares}")
    assert shares["consistent_hash"] >= ours - 1e-9

"""`vllm-router` before two plain servers, with prefixes named in a header and with round-robin."""

import pytest

from remask_lab.speed.routing import ROUTER, emptied, named, router, two_servers
from tests.deploy.fleets import ASKS, BUDGET, hit_ratio

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(ROUTER is None, reason="needs the router: pip install vllm-router"),
]


def test_a_named_prefix_goes_where_it_is_held() -> None:
    with two_servers(BUDGET) as servers:
        with router("consistent_hash", *emptied(servers)) as base:
            hashed = hit_ratio(base, [named(ask) for ask in ASKS])
        with router("round_robin", *emptied(servers)) as base:
            in_turn = hit_ratio(base)
    print(f"hit ratio of {len(ASKS)} requests: consistent_hash {hashed:.3f}, round_robin {in_turn:.3f}")
    assert hashed > in_turn + 0.1

"""Routing: stable as replicas come and go, balanced, and bounded where it spills over."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.deploy.routing import Spill, rank
from remask.errors import ConfigError

names = st.sets(st.text("abcdef0123", min_size=1, max_size=6), min_size=1, max_size=9)
identities = st.binary(max_size=20)
MANY = [f"prefix {number}".encode() for number in range(4000)]


@given(identities, names, st.randoms())
def test_the_order_is_that_of_the_set(identity: bytes, replicas: set[str], random: Any) -> None:
    listed = list(replicas)
    random.shuffle(listed)
    ordered = rank(identity, listed)
    assert sorted(ordered) == sorted(replicas)
    assert ordered == rank(identity, sorted(replicas))


@given(identities, names, st.text("xyz", min_size=1, max_size=3))
def test_a_replica_that_joins_or_leaves_reorders_no_others(identity: bytes, replicas: set[str], other: str) -> None:
    after = rank(identity, {*replicas, other})
    assert [replica for replica in after if replica != other] == rank(identity, replicas)


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_prefixes_are_spread_evenly_and_a_share_of_one_in_n_moves(count: int) -> None:
    replicas = [f"replica-{number}" for number in range(count)]
    homes = {identity: rank(identity, replicas)[0] for identity in MANY}
    mean = len(MANY) / count
    counts = Counter(homes.values())
    assert set(counts) == set(replicas)
    assert all(abs(found - mean) < 5 * mean**0.5 for found in counts.values())
    joined = {identity: rank(identity, [*replicas, "new"])[0] for identity in MANY}
    moved = [identity for identity in MANY if joined[identity] != homes[identity]]
    assert {joined[identity] for identity in moved} == {"new"}
    assert abs(len(moved) - len(MANY) / (count + 1)) < 5 * (len(MANY) / (count + 1)) ** 0.5
    left = {identity: rank(identity, replicas[1:])[0] for identity in MANY}
    assert all(left[identity] == home for identity, home in homes.items() if home != replicas[0])


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.integers(1, 6),
    st.integers(1, 8),
    st.floats(1.01, 3),
    st.data(),
)
def test_spill_over_is_bounded(prefixes: list[int], count: int, slots: int, balance: float, data: Any) -> None:
    """Whatever is asked, and however long requests take: no replica is ever given more than its limit."""
    spill = Spill(slots, balance)
    loads = {f"r{number}": 0 for number in range(count)}
    open_requests: list[str] = []
    for prefix in prefixes:
        if open_requests and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(open_requests))
            open_requests.remove(ended)
            loads[ended] -= 1
        identity = bytes([prefix])
        limit = spill.limit(loads)
        order = spill.order(identity, loads)
        assert sorted(order) == sorted(loads)
        chosen = order[0]
        assert loads[chosen] < limit, "some replica is below the limit, as it is above the mean"
        home = rank(identity, loads)[0]
        assert chosen == home or loads[home] >= limit, "it leaves its home only where that is loaded"
        assert limit <= max(slots, balance * (sum(loads.values()) + 1) / count + 1)
        loads[chosen] += 1
        open_requests.append(chosen)


def test_requests_without_a_prefix_go_where_least_is_open() -> None:
    assert Spill().order(None, {"c": 3, "b": 0, "a": 3}) == ["b", "c", "a"]
    assert Spill().order(b"x", {}) == Spill().order(None, {}) == []


@pytest.mark.parametrize(("slots", "balance", "name"), [(0, 2, "slots"), (1, 1.0, "balance"), (1, 0.5, "balance")])
def test_bad_settings(slots: int, balance: float, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Spill(slots, balance)

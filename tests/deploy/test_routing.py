"""Routing: by what a body shares, stable as replicas come and go, balanced, and bounded where it spills over."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.deploy.routing import Spill, prefix_identity, rank_replicas
from remask.errors import ConfigError

names = st.sets(st.text("abcdef0123", min_size=1, max_size=6), min_size=1, max_size=9)
identities = st.binary(max_size=20)
MANY = [f"prefix {number}".encode() for number in range(4000)]


@given(identities, names, st.randoms())
def test_the_order_is_that_of_the_set(identity: bytes, replicas: set[str], random: Any) -> None:
    listed = list(replicas)
    random.shuffle(listed)
    ordered = rank_replicas(identity, listed)
    assert sorted(ordered) == sorted(replicas)
    assert ordered == rank_replicas(identity, sorted(replicas))


@given(identities, names, st.text("xyz", min_size=1, max_size=3))
def test_a_replica_that_joins_or_leaves_reorders_no_others(identity: bytes, replicas: set[str], other: str) -> None:
    after = rank_replicas(identity, {*replicas, other})
    assert [replica for replica in after if replica != other] == rank_replicas(identity, replicas)


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_prefixes_are_spread_evenly_and_a_share_of_one_in_n_moves(count: int) -> None:
    replicas = [f"replica-{number}" for number in range(count)]
    homes = {identity: rank_replicas(identity, replicas)[0] for identity in MANY}
    mean = len(MANY) / count
    counts = Counter(homes.values())
    assert set(counts) == set(replicas)
    assert all(abs(found - mean) < 5 * mean**0.5 for found in counts.values())
    joined = {identity: rank_replicas(identity, [*replicas, "new"])[0] for identity in MANY}
    moved = [identity for identity in MANY if joined[identity] != homes[identity]]
    assert {joined[identity] for identity in moved} == {"new"}
    assert abs(len(moved) - len(MANY) / (count + 1)) < 5 * (len(MANY) / (count + 1)) ** 0.5
    left = {identity: rank_replicas(identity, replicas[1:])[0] for identity in MANY}
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
        home = rank_replicas(identity, loads)[0]
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


SYSTEM = {"role": "system", "content": "rules"}
FIRST = {"role": "user", "content": "one"}
REPLY = {"role": "assistant", "content": "yes"}
SECOND = {"role": "user", "content": "two"}
MARK = {"cache_control": {"type": "ephemeral"}}


def chat(*messages: dict[str, Any], **fields: Any) -> bytes | None:
    return prefix_identity({"messages": list(messages), **fields})


def test_conversations_are_known_by_their_opening() -> None:
    system = chat(SYSTEM, FIRST)
    assert system is not None
    assert system == chat(SYSTEM, SECOND) == chat(SYSTEM, FIRST, REPLY, SECOND)
    assert system == chat(
        {**SYSTEM, "content": [{"type": "text", "text": "ru"}, {"type": "text", "text": "les"}]}, FIRST
    )
    assert system == chat(SYSTEM, FIRST, temperature=1.0, stream=True, model="x")
    assert system != chat({**SYSTEM, "content": "other rules"}, FIRST)
    assert system != chat(SYSTEM, FIRST, cache_salt="tenant")
    assert chat(SYSTEM, FIRST, cache_salt="a") != chat(SYSTEM, FIRST, cache_salt="b")


def test_other_apis_have_the_systems_turn_apart() -> None:
    system = chat(SYSTEM, FIRST)
    assert system == prefix_identity({"system": "rules", "messages": [FIRST]})
    assert system == prefix_identity({"system": [{"type": "text", "text": "rules"}], "messages": [SECOND]})
    assert system == prefix_identity({"instructions": "rules", "input": "one"})
    assert system == prefix_identity({"input": [SYSTEM, FIRST]})
    assert prefix_identity({"input": "one"}) is None


def test_without_a_system_prompt_the_first_turn_is_the_opening() -> None:
    assert chat(FIRST) is None, "nothing stands before the last user turn"
    turn = chat(FIRST, REPLY, SECOND)
    assert turn is not None
    assert turn == chat(FIRST, REPLY, SECOND, REPLY, SECOND)
    assert turn != chat(SECOND, REPLY, FIRST)


def test_markers_and_lengths() -> None:
    other = {"role": "system", "content": "date"}
    assert chat({**SYSTEM, **MARK}, other, FIRST) == chat(SYSTEM, FIRST)
    assert chat(SYSTEM, other, FIRST) != chat(SYSTEM, FIRST)
    assert chat({**SYSTEM, **MARK}, {**other, **MARK}, FIRST) == chat(SYSTEM, other, FIRST), "the last marker counts"
    assert chat({**FIRST, **MARK}) is not None, "a marker may hold the whole prompt"
    part = {"type": "text", "text": "rules", **MARK}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part]}
    assert chat({**SYSTEM, "content": [part]}, other, FIRST) == chat(SYSTEM, FIRST), "a part marks its message"
    assert chat({**FIRST, "content": [part]}) == chat({**FIRST, "content": "rules", **MARK}) is not None
    assert chat({**SYSTEM, **MARK}, other, {**FIRST, "content": [result]}) == chat(SYSTEM, other, FIRST)
    assert chat(SYSTEM, FIRST, prefix_length=0) is None
    assert chat(SYSTEM, FIRST, prefix_length=5) == chat(SYSTEM, SECOND, prefix_length=5)


def test_text_prompts_share_what_they_say() -> None:
    ids = [1, 2, 3, 4]
    assert prefix_identity({"prompt": ids}) is None
    assert prefix_identity({"prompt": ids, "prefix_length": 3}) == prefix_identity(
        {"prompt": [1, 2, 3, 9], "prefix_length": 3}
    )
    assert prefix_identity({"prompt": "abcd", "prefix_length": 2}) == prefix_identity(
        {"prompt": ["abxy"], "prefix_length": 2}
    )


def test_no_cache_no_identity() -> None:
    assert chat(SYSTEM, FIRST, cache="none") is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {"messages": []},
        {"messages": [5]},
        {"messages": [{}]},
        {"messages": "x"},
        {"prompt": 5, "prefix_length": 2},
        {"prompt": [], "prefix_length": 2},
        {"messages": [SYSTEM, FIRST], "prefix_length": "x"},
        {"messages": [SYSTEM, FIRST], "prefix_length": True},
    ],
)
def test_bodies_that_will_be_refused(body: Any) -> None:
    assert prefix_identity(body) is None


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "prefix_length", "cache", "cache_salt"]), JSON))
def test_no_body_breaks_it(body: dict[str, Any]) -> None:
    found = prefix_identity(body)
    assert found is None or isinstance(found, bytes)

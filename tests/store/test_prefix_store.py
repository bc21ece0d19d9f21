from collections.abc import Sequence
from typing import Any

import pytest
import torch

from remask.errors import IntegrityError, UnknownNameError
from remask.store import Eviction
from remask.store.entries import EntryInfo, prefix_hashes
from remask.store.pages import PageAllocator
from remask.store.prefix import Lease, PrefixStore
from tests.goldens import cache_policy

LAYERS = 3
BOUNDARY = 2
SLOT_BYTES = 32


def make(budget: int, eviction: Eviction = "fifo", pages: int = 64, page_size: int = 2, **more: Any) -> PrefixStore:
    allocator = PageAllocator(LAYERS, pages, page_size)
    states = lambda tokens: torch.zeros(LAYERS - 1, tokens, 4)  # noqa: E731
    return PrefixStore(allocator, budget, eviction, b"model", states, SLOT_BYTES, **more)


def put(store: PrefixStore, tokens: Sequence[int], salt: str = "") -> None:
    """A request that misses, publishes, and ends."""
    lease = store.reserve(tokens, BOUNDARY, salt)
    assert lease is not None
    store.publish(lease.entry)
    store.release(lease)


def match(store: PrefixStore, tokens: Sequence[int], layers: int, salt: str = "") -> Lease | None:
    """What a request does whose layers do not depend on the entry."""
    entry = store.find(tokens, salt)
    return None if entry is None else store.lend(entry, layers, tokens)


def hit(store: PrefixStore, tokens: Sequence[int]) -> Lease:
    lease = match(store, tokens, BOUNDARY)
    assert lease is not None
    return lease


def held(store: PrefixStore) -> list[tuple[int, ...]]:
    return [entry.tokens for entry in store.entries]


@pytest.mark.parametrize("budget", [20, 30, 60])
def test_the_authors_admission_log(budget: int) -> None:
    golden = cache_policy()
    case = next(case for case in golden["cases"] if case["budget"] == budget)
    names = {tuple(tokens): name for name, tokens in golden["prefixes"].items()}
    store = make(budget, "lru")
    hits = 0
    for line in case["log"]:
        assert line["error"] is None
        tokens = golden["prefixes"][line["request"]]
        assert store.fits(len(tokens))
        lease = match(store, tokens, BOUNDARY)
        assert (lease is not None) == line["hit"]
        hits += line["hit"]
        if lease is None:
            lease = store.reserve(tokens, BOUNDARY)
            assert lease is not None
            store.publish(lease.entry)
        store.release(lease)
        assert [names[tokens] for tokens in held(store)] == line["lru_order_oldest_first"]
        assert store.token_count == line["num_cache_tokens"]
    assert (store.stats.hits, store.stats.misses) == (hits, len(case["log"]) - hits)


def test_a_collision_may_need_more_room_than_its_own() -> None:
    keys = {(1,): 1, (2,): 9, (2, 2, 2): 2, (3,): 9, (3, 3, 3): 1}
    store = make(6, hashes=lambda tokens, lengths, _: [keys[tuple(tokens[:n])] for n in lengths])
    put(store, [1])
    put(store, [2, 2, 2])
    lease = hit(store, [2, 2, 2])
    assert store.reserve([3, 3, 3], BOUNDARY) is None
    assert held(store) == [(1,), (2, 2, 2)]
    store.release(lease)
    put(store, [3, 3, 3])
    assert held(store) == [(3, 3, 3)]


def test_tenants_whose_hashes_collide_do_not_meet() -> None:
    store = make(60, hashes=lambda tokens, lengths, _: [sum(tokens[:n]) for n in lengths])
    put(store, [1, 2], "a")
    put(store, [5, 5], "b")
    assert (store.find([1, 2], "a"), store.find([1, 2], "b")) == (store.entries[0], None)


def test_a_stored_prefix_cannot_be_reserved_again() -> None:
    store = make(30)
    put(store, [1, 2])
    with pytest.raises(IntegrityError, match="reserved again"):
        store.reserve([1, 2], BOUNDARY)


def test_pages_that_vanish_meanwhile_are_an_integrity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(30)
    monkeypatch.setattr(store.allocator, "allocate", lambda *_: None)
    with pytest.raises(IntegrityError, match="gone"):
        store.reserve([1], BOUNDARY)


def nested(**more: Any) -> PrefixStore:
    """A store that holds 4 and 8 tokens of a conversation."""
    store = make(60, **{"prefix_match": "longest", **more})
    for length in (4, 8):
        put(store, range(length))
    return store


@pytest.mark.parametrize(("cover", "found"), [(0, [1, 8, 8]), (0.81, [1]), (1, [1])])
def test_how_much_a_level_must_cover_is_a_setting(cover: float, found: list[int]) -> None:
    store = make(60, prefix_match="longest", prefix_cover=cover)
    put(store, [0])
    put(store, range(8))
    leases = [match(store, range(asked), BOUNDARY) for asked in (1, 10, 40)]
    assert [len(lease.entry) for lease in leases if lease is not None] == found


def test_an_entry_that_was_published_and_is_gone_is_asked_for_anew() -> None:
    store = nested()
    hit(store, range(10))
    put(store, range(10))
    assert store.drop(store.find(range(10)).key) == 1  # type: ignore[union-attr]
    assert len(hit(store, range(10)).entry) == 8


def test_only_so_many_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remask.store.entries.MAX_REQUESTED", 2)
    store = nested()
    for last in (20, 21, 22):
        hit(store, [*range(8), last])
    assert match(store, [*range(8), 22], BOUNDARY) is None
    assert hit(store, [*range(8), 20]).entry.tokens == tuple(range(8)), "forgotten, so as if never asked for"


def test_nothing_is_kept_of_salts_that_are_gone() -> None:
    store = make(60)
    for number in range(20):
        put(store, [1, 2, 3], f"tenant {number}")
        store.drop()
    assert not store._index._counts
    assert not store._index._lengths


def test_unknown_ways_of_matching_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'longest'"):
        make(60, prefix_match="longst")


def test_lookup_hashes_each_token_once_however_many_levels_there_are() -> None:
    seen: list[tuple[int, int]] = []

    def counted(tokens: Sequence[int], lengths: Sequence[int], salt: bytes) -> list[int]:
        seen.append((len(tokens), len(lengths)))
        return prefix_hashes(tokens, lengths, salt)

    store = make(5000, prefix_match="longest", pages=4000, hashes=counted)
    for number in range(60):
        put(store, [number, *range(number % 6 + 1)])
    seen.clear()
    assert store.find([7, *range(40)]) is None
    assert seen == [(41, 6)], "60 entries, of 6 lengths"


def test_an_operator_sees_what_is_held() -> None:
    store = make(30)
    put(store, [1, 2, 3])
    hit(store, [1, 2, 3])
    waiting = store.reserve([4], BOUNDARY, "secret")
    assert waiting is not None
    first, second = store.describe()
    kv, states = LAYERS * 4 * SLOT_BYTES, (LAYERS - 1) * 3 * 4 * 4
    assert first == EntryInfo(f"{store.entries[0].key:016x}", 3, LAYERS, kv + states, hits=1, leases=1, ready=True)
    assert (second.tokens, second.hits, second.leases, second.ready) == (1, 0, 1, False)
    assert "secret" not in str(second)
    assert store.state_bytes == states + (LAYERS - 1) * 4 * 4
    store.publish(waiting.entry)
    store.release(waiting)
    assert store.drop(int(second.prefix_id, 16)) == 1
    assert [info.prefix_id for info in store.describe()] == [first.prefix_id]


def test_a_tenant_with_the_same_prefix_evicts_nobody_while_there_is_room() -> None:
    store = make(20)
    put(store, [1, 2])
    assert store.has_room([1, 2], "theirs")
    lease = store.reserve([1, 2], BOUNDARY, "theirs")
    assert lease is not None
    assert [entry.cache_salt for entry in store.entries] == ["", "theirs"]


@pytest.mark.parametrize("rule", ["LRU", "lfu", "", None])
def test_unknown_eviction(rule: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown eviction .*Available: fifo, lru"):
        make(20, rule)

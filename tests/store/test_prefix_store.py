from collections.abc import Sequence
from typing import Any

import pytest
import torch

from remask.errors import IntegrityError
from remask.store.eviction import Eviction
from remask.store.pages import PageAllocator
from remask.store.prefix import Lease, PrefixStore
from tests.goldens import cache_policy

LAYERS = 3
BOUNDARY = 2


def make(budget: int, eviction: Eviction = "fifo", pages: int = 64, page_size: int = 2, **more: Any) -> PrefixStore:
    allocator = PageAllocator(LAYERS, pages, page_size)
    return PrefixStore(allocator, budget, eviction, b"model", lambda tokens: torch.zeros(LAYERS - 1, tokens, 4), **more)


def put(store: PrefixStore, tokens: Sequence[int]) -> None:
    """A request that misses, publishes, and ends."""
    lease = store.reserve(tokens, BOUNDARY)
    assert lease is not None
    store.publish(lease.entry)
    store.release(lease)


def hit(store: PrefixStore, tokens: Sequence[int]) -> Lease:
    lease = store.match(tokens, BOUNDARY)
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
        lease = store.match(tokens, BOUNDARY)
        assert (lease is not None) == line["hit"]
        hits += line["hit"]
        if lease is None:
            lease = store.reserve(tokens, BOUNDARY)
            assert lease is not None
            store.publish(lease.entry)
        store.release(lease)
        assert [names[tokens] for tokens in held(store)] == line["lru_order_oldest_first"]
        assert store.tokens == line["num_cache_tokens"]
    assert (store.stats.hits, store.stats.misses) == (hits, len(case["log"]) - hits)


def test_fifo_ignores_use() -> None:
    stores = {rule: make(7, rule) for rule in ("fifo", "lru")}
    for store in stores.values():
        for tokens in ([1, 1], [2, 2], [3, 3]):
            put(store, tokens)
        store.release(hit(store, [1, 1]))
        put(store, [4, 4])
    assert held(stores["fifo"]) == [(2, 2), (3, 3), (4, 4)]
    assert held(stores["lru"]) == [(3, 3), (1, 1), (4, 4)]


def test_admission_is_strict() -> None:
    store = make(4)
    assert store.fits(3)
    assert not store.fits(4)
    put(store, [1])
    put(store, [2])
    put(store, [3])
    put(store, [4])  # three of one token each leave 1, and 1 < 1 is false
    assert held(store) == [(2,), (3,), (4,)]


def test_a_budget_of_nothing_fits_nothing() -> None:
    assert not make(0).fits(1)


def test_more_pages_than_there_are_never_fit() -> None:
    store = make(100, pages=3, page_size=2)
    assert store.fits(6)
    assert not store.fits(7)


def test_an_entry_larger_than_the_budget_leaves_the_store_as_it_was() -> None:
    store = make(6)
    put(store, [1, 2])
    put(store, [3])
    before = (held(store), store.allocator.references.copy(), store.stats.evictions, store.stats.misses)
    assert store.reserve([7] * 6, BOUNDARY) is None
    assert held(store) == before[0]
    assert (store.allocator.references == before[1]).all()
    assert (store.stats.evictions, store.stats.misses) == before[2:]


def test_leased_entries_are_never_evicted() -> None:
    store = make(7)
    put(store, [1, 1])
    lease = hit(store, [1, 1])
    put(store, [2, 2])
    put(store, [3, 3])
    put(store, [4, 4])
    assert held(store) == [(1, 1), (3, 3), (4, 4)]
    others = [hit(store, [3, 3]), hit(store, [4, 4])]
    before = store.allocator.references.copy()
    assert store.reserve([5, 5], BOUNDARY) is None
    assert (store.allocator.references == before).all()
    assert store.drop() == 0
    store.release(lease)
    put(store, [5, 5])
    assert held(store) == [(3, 3), (4, 4), (5, 5)]
    for other in others:
        store.release(other)


def test_entries_whose_pass_is_still_to_run_stay() -> None:
    store = make(5)
    lease = store.reserve([1, 1], BOUNDARY)
    assert lease is not None
    store.release(lease)  # the request was cancelled; its pass is still scheduled
    assert store.drop() == 0
    assert store.reserve([2, 2, 2], BOUNDARY) is None
    waiting = hit(store, [1, 1])
    assert not waiting.entry.ready
    store.release(waiting)
    store.publish(lease.entry)
    put(store, [2, 2, 2])
    assert held(store) == [(2, 2, 2)]


def test_no_more_is_evicted_than_is_needed() -> None:
    store = make(10)
    for tokens in ([1] * 4, [2], [3] * 3):
        put(store, tokens)
    put(store, [4] * 2)  # 8 of 10 held: 2 < 2 is false; the oldest alone makes room
    assert held(store) == [(2,), (3, 3, 3), (4, 4)]
    assert store.stats.evictions == 1


def test_entries_are_evicted_for_pages_too() -> None:
    store = make(100, pages=4, page_size=4)
    for token in range(4):
        put(store, [token])
    put(store, [9] * 5)
    assert held(store) == [(2,), (3,), (9,) * 5]


def test_a_lease_reads_shallow_layers_in_place() -> None:
    store = make(20)
    put(store, [1, 2, 3])
    lease = hit(store, [1, 2, 3])
    assert lease.hit
    assert lease.extent.layers == range(BOUNDARY)
    assert lease.extent.slots().tolist() == lease.entry.extent.slots().tolist()
    pages = lease.entry.extent.pages
    assert store.allocator.references[:, pages].tolist() == [[2, 2], [2, 2], [1, 1]]
    store.release(lease)
    assert (store.allocator.references[:, pages] == 1).all()


def test_leases_of_any_depth_share_an_entry() -> None:
    store = make(20)
    put(store, [1, 2])
    leases = [store.match([1, 2], depth) for depth in (1, 2, 3)]
    assert len({id(lease.entry) for lease in leases if lease is not None}) == 1
    assert store.entries[0].leases == 3
    assert store.entries[0].hits == 3
    for lease in leases:
        assert lease is not None
        store.release(lease)
    assert store.drop() == 1
    assert store.allocator.used == 0


def test_the_whole_prefix_is_the_identity() -> None:
    store = make(30)
    put(store, [1, 2, 3])
    for other in ([1, 2], [1, 2, 3, 4], [3, 2, 1], [], [1, 2, 4]):
        assert store.match(other, BOUNDARY) is None
    assert store.stats.hits == 0


def test_entries_of_another_salt_are_never_served() -> None:
    store = make(30)
    ours = store.reserve([1, 2], BOUNDARY, "ours")
    assert ours is not None
    for salt in ("", "theirs"):
        assert store.match([1, 2], BOUNDARY, salt) is None
    theirs = store.reserve([1, 2], BOUNDARY, "theirs")
    assert theirs is not None
    assert not set(ours.extent.pages.tolist()) & set(theirs.extent.pages.tolist())
    again = store.match([1, 2], BOUNDARY, "ours")
    assert again is not None
    assert again.entry is ours.entry


def test_salts_whose_hashes_collide_are_told_apart() -> None:
    store = make(30, hash=collide)
    put(store, [1, 2])
    assert store.match([1, 2], BOUNDARY, "theirs") is None
    lease = store.reserve([1, 2], BOUNDARY, "theirs")
    assert lease is not None
    assert [entry.cache_salt for entry in store.entries] == ["theirs"]


def collide(tokens: Sequence[int], salt: bytes) -> int:
    return 7


def test_a_hash_collision_is_never_served() -> None:
    store = make(30, hash=collide)
    put(store, [1, 2])
    assert store.match([3, 4], BOUNDARY) is None
    put(store, [3, 4])
    assert held(store) == [(3, 4)]
    assert store.match([1, 2], BOUNDARY) is None
    assert store.allocator.used == LAYERS
    assert store.stats.evictions == 1


def test_a_leased_collision_has_to_be_waited_for() -> None:
    store = make(30, hash=collide)
    put(store, [1, 2])
    lease = hit(store, [1, 2])
    assert store.reserve([3, 4], BOUNDARY) is None
    assert held(store) == [(1, 2)]
    store.release(lease)
    put(store, [3, 4])


def test_a_collision_may_need_more_room_than_its_own() -> None:
    keys = {(1,): 1, (2, 2, 2): 2, (3, 3, 3): 1}
    store = make(6, hash=lambda tokens, _: keys[tuple(tokens)])
    put(store, [1])
    put(store, [2, 2, 2])
    lease = hit(store, [2, 2, 2])
    assert store.reserve([3, 3, 3], BOUNDARY) is None
    assert held(store) == [(1,), (2, 2, 2)]
    store.release(lease)
    put(store, [3, 3, 3])
    assert held(store) == [(3, 3, 3)]


def test_a_stored_prefix_cannot_be_reserved_again() -> None:
    store = make(30)
    put(store, [1, 2])
    with pytest.raises(IntegrityError, match="reserved again"):
        store.reserve([1, 2], BOUNDARY)


def test_a_lease_cannot_be_released_twice() -> None:
    store = make(30)
    put(store, [1, 2])
    lease = hit(store, [1, 2])
    store.release(lease)
    before = store.allocator.references.copy()
    with pytest.raises(IntegrityError, match="released twice"):
        store.release(lease)
    assert (store.allocator.references == before).all()
    assert store.entries[0].leases == 0


def test_a_second_release_does_not_take_another_requests_lease() -> None:
    store = make(30)
    put(store, [1, 2])
    first, second = hit(store, [1, 2]), hit(store, [1, 2])
    store.release(first)
    with pytest.raises(IntegrityError):
        store.release(first)
    assert store.entries[0].leases == 1
    assert store.drop() == 0  # `second` still reads it
    store.release(second)


def test_drop_by_hash() -> None:
    store = make(30)
    put(store, [1])
    put(store, [2])
    key = store.entries[0].key
    assert store.drop(key) == 1
    assert store.drop(key) == 0
    assert held(store) == [(2,)]
    assert store.drop() == 1
    assert (store.tokens, store.state_bytes, store.allocator.used) == (0, 0, 0)


def test_state_bytes_are_counted() -> None:
    store = make(30)
    put(store, [1, 2, 3])
    assert store.state_bytes == (LAYERS - 1) * 3 * 4 * 4


def test_pages_that_vanish_meanwhile_are_an_integrity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(30)
    monkeypatch.setattr(store.allocator, "allocate", lambda *_: None)
    with pytest.raises(IntegrityError, match="gone"):
        store.reserve([1], BOUNDARY)

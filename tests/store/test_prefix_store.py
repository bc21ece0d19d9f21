from collections.abc import Sequence
from typing import Any

import pytest
import torch

from remask.errors import IntegrityError, UnknownNameError
from remask.store import prefix_index
from remask.store.entry import EntryInfo
from remask.store.eviction import Eviction
from remask.store.hashing import prefix_hashes
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
    store = make(30, hashes=collide)
    put(store, [1, 2])
    assert store.match([1, 2], BOUNDARY, "theirs") is None
    lease = store.reserve([1, 2], BOUNDARY, "theirs")
    assert lease is not None
    assert [entry.cache_salt for entry in store.entries] == ["theirs"]


def collide(tokens: Sequence[int], lengths: Sequence[int], salt: bytes) -> list[int]:
    return [7] * len(lengths)


def test_a_hash_collision_is_never_served() -> None:
    store = make(30, hashes=collide)
    put(store, [1, 2])
    assert store.match([3, 4], BOUNDARY) is None
    put(store, [3, 4])
    assert held(store) == [(3, 4)]
    assert store.match([1, 2], BOUNDARY) is None
    assert store.allocator.used == LAYERS
    assert store.stats.evictions == 1


def test_a_leased_collision_has_to_be_waited_for() -> None:
    store = make(30, hashes=collide)
    put(store, [1, 2])
    lease = hit(store, [1, 2])
    assert store.reserve([3, 4], BOUNDARY) is None
    assert held(store) == [(1, 2)]
    store.release(lease)
    put(store, [3, 4])


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


def nested(**more: Any) -> PrefixStore:
    """A store that holds 4 and 8 tokens of a conversation."""
    store = make(60, **{"prefix_match": "longest", **more})
    for length in (4, 8):
        put(store, range(length))
    return store


def test_levels_of_one_conversation_stand_side_by_side() -> None:
    store = nested()
    assert [len(hit(store, range(length)).entry) for length in (4, 8)] == [4, 8]
    assert store.stats.partial_hits == 0


@pytest.mark.parametrize(("asked", "found"), [(5, 4), (7, 4), (9, 8), (15, 8), (16, 8)])
def test_the_longest_level_is_found(asked: int, found: int) -> None:
    store = nested()
    lease = hit(store, range(asked))
    assert len(lease.entry) == found
    assert lease.hit
    assert (store.stats.hits, store.stats.partial_hits) == (1, 1)


@pytest.mark.parametrize("asked", [1, 3, 17, 40])
def test_what_no_level_covers_half_of_needs_a_pass_of_its_own(asked: int) -> None:
    assert nested().match(range(asked), BOUNDARY) is None


@pytest.mark.parametrize(("cover", "found"), [(0, [1, 8, 8]), (0.81, [1]), (1, [1])])
def test_how_much_a_level_must_cover_is_a_setting(cover: float, found: list[int]) -> None:
    store = make(60, prefix_match="longest", prefix_cover=cover)
    put(store, [0])
    put(store, range(8))
    leases = [store.match(range(asked), BOUNDARY) for asked in (1, 10, 40)]
    assert [len(lease.entry) for lease in leases if lease is not None] == found


def test_a_level_must_be_the_beginning() -> None:
    assert nested().match([9, *range(1, 8)], BOUNDARY) is None
    assert len(hit(nested(), [0, 1, 2, 3, 9, 5, 6, 7]).entry) == 4


def test_only_exact_entries_are_found_unless_told_otherwise() -> None:
    store = make(60)
    put(store, range(8))
    assert store.match(range(9), BOUNDARY) is None


def test_what_is_asked_for_twice_is_published() -> None:
    store = nested()
    assert len(hit(store, range(10)).entry) == 8
    assert len(hit(store, range(12)).entry) == 8, "another prefix is asked for the first time"
    assert store.match(range(10), BOUNDARY) is None
    put(store, range(10))
    assert len(hit(store, range(10)).entry) == 10
    store = nested()
    for _ in range(3):
        assert store.find(range(10)) is not None, "only what is lent counts as asked for"


def test_an_entry_that_was_published_and_is_gone_is_asked_for_anew() -> None:
    store = nested()
    hit(store, range(10))
    put(store, range(10))
    assert store.drop(store.find(range(10)).key) == 1  # type: ignore[union-attr]
    assert len(hit(store, range(10)).entry) == 8


def test_what_can_never_be_stored_always_reads_a_level() -> None:
    store = nested()
    for _ in range(3):
        assert len(hit(store, range(70)).entry) == 8


def test_a_level_of_another_salt_is_never_found() -> None:
    store = nested()
    assert store.match(range(9), BOUNDARY, "theirs") is None
    lease = store.reserve(range(5), BOUNDARY, "theirs")
    assert lease is not None
    assert len(hit(store, range(9)).entry) == 8


def test_levels_whose_hashes_collide_are_told_apart() -> None:
    store = make(60, prefix_match="longest", hashes=collide)
    put(store, [1, 2])
    assert store.match([3, 4, 5], BOUNDARY) is None
    assert hit(store, [1, 2, 5]).entry.tokens == (1, 2)


def test_only_so_many_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ASKED", 2)
    store = nested()
    for last in (20, 21, 22):
        hit(store, [*range(8), last])
    assert store.match([*range(8), 22], BOUNDARY) is None
    assert hit(store, [*range(8), 20]).entry.tokens == tuple(range(8)), "forgotten, so as if never asked for"


def test_nothing_is_kept_of_salts_that_are_gone() -> None:
    store = make(60)
    for number in range(20):
        lease = store.reserve([1, 2, 3], BOUNDARY, f"tenant {number}")
        assert lease is not None
        store.publish(lease.entry)
        store.release(lease)
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


def test_the_entry_that_a_request_would_read_does_not_give_way() -> None:
    store = make(30)
    for token in range(3):
        put(store, [token])
    spare = store.find([0])
    assert spare is not None
    assert store.give_way((spare,))
    assert held(store) == [(0,), (2,)]
    assert store.give_way((spare,))
    assert not store.give_way((spare,))
    assert held(store) == [(0,)]
    assert store.give_way()


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
    store.publish(waiting.entry)
    store.release(waiting)
    assert store.drop(int(second.id, 16)) == 1
    assert [info.id for info in store.describe()] == [first.id]


def test_a_tenant_with_the_same_prefix_evicts_nobody_while_there_is_room() -> None:
    store = make(20)
    put(store, [1, 2])
    assert store.has_room([[1, 2]], "theirs")
    lease = store.reserve([1, 2], BOUNDARY, "theirs")
    assert lease is not None
    assert [entry.cache_salt for entry in store.entries] == ["", "theirs"]

"""The store of shared prefixes: K, V and boundary states of prefix-only passes, leased to running requests in place."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from remask.errors import IntegrityError
from remask.store.eviction import Eviction, EvictionOrder
from remask.store.hashing import prefix_hash, salted
from remask.store.pages import Extent, PageAllocator

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """One shared prefix, identified by all of its tokens and its salt. `ready` once its prefix-only pass has run."""

    key: int
    tokens: tuple[int, ...]
    extent: Extent
    states: Tensor  # [layers - 1, tokens, D]: states[l] leaves layer l; no layer restarts from the last one's
    ready: bool = False
    leases: int = 0
    hits: int = 0
    cache_salt: str = ""

    def holds(self, tokens: Sequence[int], cache_salt: str) -> bool:
        """Whether this is the entry of exactly these tokens, for requests of this salt."""
        return self.cache_salt == cache_salt and np.array_equal(self.tokens, np.asarray(tokens))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Lease:
    """A running request's right to read an entry in layers 0 .. boundary - 1; the entry cannot be evicted meanwhile."""

    entry: Entry
    boundary: int
    extent: Extent
    hit: bool  # another request's pass is reused
    released: bool = False


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was made."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    refused: int = 0  # prefixes larger than the whole budget


@dataclass(slots=True)
class PrefixStore:
    """Entries under a token budget, in pages of the pool that running requests use too.

    An entry is admitted iff it is strictly smaller than what is left of the budget, as in the authors' engine; others
    are evicted for it one at a time, never one that is leased or whose pass is still to run.
    """

    allocator: PageAllocator
    budget_tokens: int
    eviction: Eviction
    salt: bytes
    new_states: Callable[[int], Tensor]  # tokens -> [layers - 1, tokens, D]
    hash: Callable[[Sequence[int], bytes], int] = prefix_hash
    stats: StoreStats = field(default_factory=StoreStats)
    _entries: dict[int, Entry] = field(default_factory=dict)
    _order: EvictionOrder = field(init=False)

    def __post_init__(self) -> None:
        self._order = EvictionOrder(self.eviction)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, the next to be evicted first."""
        return tuple(self._entries[key] for key in self._order)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(entry) for entry in self._entries.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of boundary states held; K and V are the pool's."""
        return sum(entry.states.nbytes for entry in self._entries.values())

    def fits(self, tokens: int) -> bool:
        """Whether a prefix of this length can be admitted at all."""
        return tokens < self.budget_tokens and self.allocator.pages_for(tokens) <= self.allocator.references.shape[1]

    def match(self, tokens: Sequence[int], boundary: int, cache_salt: str = "") -> Lease | None:
        """Lease the entry of exactly these tokens; None where there is none. Token ids are compared, not hashes alone.

        Entries of another `cache_salt` are never found.

        The entry may still be waiting for its pass (`ready` is False): whoever holds the lease waits for it too.
        """
        key = self.hash(tokens, salted(self.salt, cache_salt))
        entry = self._entries.get(key)
        if entry is None or not entry.holds(tokens, cache_salt):
            return None
        self.stats.hits += 1
        entry.hits += 1
        self._order.used(key)
        return self._lease(entry, boundary, hit=True)

    def reserve(self, tokens: Sequence[int], boundary: int, cache_salt: str = "") -> Lease | None:
        """Make room for a new entry and lease it to whoever will run its prefix-only pass.

        None, with the store as it was, where leased entries stand in the way: ask again later. Call `fits` first; a
        prefix that cannot fit is refused for good. Raises `IntegrityError` for a prefix that is stored already.
        """
        key = self.hash(tokens, salted(self.salt, cache_salt))
        colliding = self._entries.get(key)
        if colliding is not None and colliding.holds(tokens, cache_salt):
            raise IntegrityError("a stored prefix was reserved again")
        victims = self._victims(len(tokens), colliding)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        extent = self.allocator.allocate(len(tokens), range(self.allocator.references.shape[0]))
        if extent is None:
            raise IntegrityError("pages that were free for a new entry are gone")
        self.stats.misses += 1
        entry = Entry(key, tuple(int(t) for t in tokens), extent, self.new_states(len(tokens)), cache_salt=cache_salt)
        self._entries[key] = entry
        self._order.add(key)
        return self._lease(entry, boundary, hit=False)

    def publish(self, entry: Entry) -> None:
        """The prefix-only pass of `entry` has run: its K/V and states may be read from now on."""
        entry.ready = True

    def release(self, lease: Lease) -> None:
        """Give a lease back. The entry stays until it is evicted. Raises `IntegrityError` on a second release."""
        if lease.released:
            raise IntegrityError("a lease was released twice")
        lease.released = True
        lease.entry.leases -= 1
        self.allocator.release(lease.extent)

    def give_way(self) -> bool:
        """Evict the next entry that nobody leases, for pages that a request needs; False where there is none."""
        for entry in self.entries:
            if entry.leases == 0 and entry.ready:
                self._evict(entry)
                return True
        return False

    def drop(self, key: int | None = None) -> int:
        """Evict the entry of this hash, or all of them, except leased ones; returns how many went."""
        free = [e for e in self.entries if e.leases == 0 and e.ready and key in (None, e.key)]
        for entry in free:
            self._evict(entry)
        return len(free)

    def _lease(self, entry: Entry, boundary: int, hit: bool) -> Lease:
        extent = entry.extent.below(boundary)
        self.allocator.retain(extent)
        entry.leases += 1
        return Lease(entry, boundary, extent, hit)

    def _victims(self, tokens: int, colliding: Entry | None) -> list[Entry] | None:
        """The fewest entries, in eviction order, whose going makes room; None where leases prevent it."""
        victims: list[Entry] = []
        held = self.tokens
        free = (self.allocator.references == 0).all(axis=0)
        need = self.allocator.pages_for(tokens)
        # Two prefixes of one hash cannot both be found, so the older one goes first.
        line = [colliding] if colliding is not None else []
        line += [entry for entry in self.entries if entry is not colliding]
        for entry in line:
            if tokens < self.budget_tokens - held and free.sum() >= need and (colliding is None or victims):
                return victims
            if entry.leases or not entry.ready:
                if entry is colliding:
                    return None
                continue
            victims.append(entry)
            held -= len(entry)
            free[entry.extent.pages] = True
        return victims if tokens < self.budget_tokens - held and free.sum() >= need else None

    def _evict(self, entry: Entry) -> None:
        log.debug("evicting a prefix of %d tokens", len(entry))
        del self._entries[entry.key]
        self._order.remove(entry.key)
        self.allocator.release(entry.extent)
        self.stats.evictions += 1

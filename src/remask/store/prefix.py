"""The store of shared prefixes: K, V and boundary states of prefix-only passes, leased to running requests in place."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from remask.errors import IntegrityError, UnknownNameError
from remask.store.entry import Entry, EntryInfo
from remask.store.eviction import Eviction, EvictionOrder
from remask.store.hashing import prefix_hashes
from remask.store.pages import PageAllocator, PageRange
from remask.store.prefix_index import PREFIX_MATCHES, Hashes, PrefixIndex, PrefixMatch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """A running request's right to read an entry in layers 0 .. boundary - 1; the entry cannot be evicted meanwhile."""

    entry: Entry
    boundary: int
    extent: PageRange
    hit: bool  # another request's pass is reused
    released: bool = False


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was made."""

    hits: int = 0
    partial_hits: int = 0  # those of `hits` that read an entry shorter than the prefix asked for
    misses: int = 0
    evictions: int = 0
    refused: int = 0  # prefixes larger than the whole budget


@dataclass(slots=True)
class PrefixStore:
    """Entries under a token budget, in pages of the pool that running requests use too.

    An entry is admitted iff it is strictly smaller than what is left of the budget, as in the authors' engine; others
    are evicted for it one at a time, never one that is leased or whose pass is still to run.

    With `prefix_match` "longest" a prefix that is not stored may be answered by a shorter entry that it begins with,
    a level. It is where the level covers the share `prefix_cover` of it and it is asked for the first time, or where it
    can never be stored. Else it is published by a pass of its own, as what is asked for twice is shared.
    """

    allocator: PageAllocator
    budget_tokens: int
    eviction: Eviction
    salt: bytes
    new_states: Callable[[int], Tensor]  # tokens -> [layers - 1, tokens, D]
    slot_bytes: int  # of K and V of one token in one layer
    prefix_match: PrefixMatch = "exact"
    prefix_cover: float = 0.5
    hashes: Hashes = prefix_hashes
    stats: StoreStats = field(default_factory=StoreStats)
    _index: PrefixIndex = field(init=False)
    _order: EvictionOrder = field(init=False)

    def __post_init__(self) -> None:
        if self.prefix_match not in PREFIX_MATCHES:
            raise UnknownNameError("prefix_match", str(self.prefix_match), PREFIX_MATCHES)
        self._index = PrefixIndex(self.salt, self.hashes)
        self._order = EvictionOrder(self.eviction)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, the next to be evicted first."""
        return tuple(self._index.entries[key] for key in self._order)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(entry) for entry in self._index.entries.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of boundary states held; K and V are the pool's."""
        return sum(entry.states.nbytes for entry in self._index.entries.values())

    def fits(self, tokens: int) -> bool:
        """Whether a prefix of this length can be admitted at all."""
        return tokens < self.budget_tokens and self.allocator.pages_for(tokens) <= self.allocator.references.shape[1]

    def describe(self) -> tuple[EntryInfo, ...]:
        """All entries as an operator sees them, the next to be evicted first."""
        return tuple(
            EntryInfo(
                id=f"{entry.key:016x}",
                tokens=len(entry),
                layers=len(entry.extent.layers),
                bytes=self._kv_bytes(entry.extent) + entry.states.nbytes,
                hits=entry.hits,
                leases=entry.leases,
                ready=entry.ready,
            )
            for entry in self.entries
        )

    def find(self, tokens: Sequence[int], cache_salt: str = "") -> Entry | None:
        """The entry that a request for these tokens reads; None where it needs a pass of its own. Changes nothing.

        The entry may still be waiting for its pass (`ready` is False): whoever leases it waits for it too. Token ids
        are compared, not hashes alone, and entries of another `cache_salt` are never found.
        """
        entry = next(self._index.levels(tokens, cache_salt), None)
        if entry is None or len(entry) == len(tokens):
            return entry
        if self.prefix_match == "exact":
            return None
        if not self.fits(len(tokens)):
            return entry
        covered = len(entry) >= self.prefix_cover * len(tokens)
        return entry if covered and not self._index.asked(tokens, cache_salt) else None

    def lend(self, entry: Entry, boundary: int, tokens: Sequence[int]) -> Lease:
        """Lease what `find` found for a request for `tokens`."""
        self.stats.hits += 1
        if len(entry) < len(tokens):
            self.stats.partial_hits += 1
            self._index.ask(tokens, entry.cache_salt)
        entry.hits += 1
        self._order.used(entry.key)
        return self._lease(entry, boundary, hit=True)

    def match(self, tokens: Sequence[int], boundary: int, cache_salt: str = "") -> Lease | None:
        """`find` and `lend` in one, where the boundary does not depend on what is found."""
        entry = self.find(tokens, cache_salt)
        return None if entry is None else self.lend(entry, boundary, tokens)

    def reserve(self, tokens: Sequence[int], boundary: int, cache_salt: str = "") -> Lease | None:
        """Make room for a new entry and lease it to whoever will run its prefix-only pass.

        None, with the store as it was, where leased entries stand in the way: ask again later. Call `fits` first; a
        prefix that cannot fit is refused for good. Raises `IntegrityError` for a prefix that is stored already.
        """
        key = self._index.key(tokens, cache_salt)
        colliding = self._index.entries.get(key)
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
        self._index.add(entry)
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

    def give_way(self, spare: Entry | None = None) -> bool:
        """Evict the next entry that nobody leases, for pages that a request needs; False where there is none.

        `spare` is what the request itself would read. It stays: without it the same pages would be needed again.
        """
        for entry in self.entries:
            if entry is not spare and entry.leases == 0 and entry.ready:
                self._evict(entry)
                return True
        return False

    def drop(self, key: int | None = None) -> int:
        """Evict the entry of this hash, or all of them, except leased ones; returns how many went."""
        free = [e for e in self.entries if e.leases == 0 and e.ready and key in (None, e.key)]
        for entry in free:
            self._evict(entry)
        return len(free)

    def _kv_bytes(self, extent: PageRange) -> int:
        return len(extent.layers) * len(extent.pages) * extent.page_size * self.slot_bytes

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
        self._index.remove(entry)
        self._order.remove(entry.key)
        self.allocator.release(entry.extent)
        self.stats.evictions += 1

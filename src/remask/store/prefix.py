"""The store of shared prefixes: K, V and boundary states of prefix-only passes, leased to running requests in place."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from remask.checks.values import check_choice
from remask.errors import IntegrityError
from remask.store import EVICTIONS, PREFIX_MATCHES, Eviction, PrefixMatch
from remask.store.entries import EntryInfo, Hashes, PrefixEntry, PrefixIndex, prefix_hashes
from remask.store.pages import PageAllocator, PageRange

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """The right of a running request to read an entry in layers 0 .. layers - 1. It keeps the entry from eviction."""

    entry: PrefixEntry
    layers: int
    extent: PageRange
    hit: bool  # the entry was there before this request
    released: bool = False


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was made."""

    hits: int = 0
    partial_hits: int = 0  # those of `hits` that read an entry shorter than the prefix asked for
    misses: int = 0
    found: int = 0  # lookups of prefixes that no request had named
    evictions: int = 0
    unread: Counter[str] = field(default_factory=Counter)  # requests that read no prefix, by reason


@dataclass(slots=True)
class PrefixStore:
    """Entries under a token budget, in pages of the pool that running requests use too.

    An entry is admitted if it is strictly smaller than the rest of the budget, as in the authors' engine. Other entries
    are evicted for it one at a time, but never an entry that is leased or whose pass has not run.

    With `prefix_match` "longest" a request may read a shorter entry than its prefix, which the prefix begins with. Such
    an entry is called a level. The request reads the level in two cases: if the level covers at least the share
    `prefix_cover` of the prefix and no earlier request had the same prefix, or if the prefix can never be stored.
    Otherwise the prefix gets a pass and an entry of its own, because a prefix that comes twice is likely to come again.
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

    def __post_init__(self) -> None:
        check_choice("prefix_match", self.prefix_match, PREFIX_MATCHES)
        check_choice("eviction", self.eviction, EVICTIONS)
        self._index = PrefixIndex(self.salt, self.hashes)

    @property
    def entries(self) -> tuple[PrefixEntry, ...]:
        """The next to be evicted first."""
        return tuple(self._index.entries.values())

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return sum(len(entry) for entry in self._index.entries.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of boundary states held; K and V are the pool's."""
        return sum(entry.states.nbytes for entry in self._index.entries.values())

    @property
    def idle_pages(self) -> int:
        """Pages of a layer that `give_way` can free."""
        return sum(len(entry.extent.pages) for entry in self._index.entries.values() if entry.idle)

    def fits(self, tokens: int) -> bool:
        """Whether a prefix of this length can be admitted at all."""
        return tokens < self.budget_tokens and self.allocator.pages_for(tokens) <= self.allocator.references.shape[1]

    def describe(self) -> tuple[EntryInfo, ...]:
        """All entries, for an operator."""
        return tuple(
            EntryInfo(
                prefix_id=f"{entry.key:016x}",
                tokens=len(entry),
                layers=len(extent.layers),
                bytes=len(extent.layers) * len(extent.pages) * extent.page_size * self.slot_bytes + entry.states.nbytes,
                hits=entry.hits,
                leases=entry.leases,
                ready=entry.ready,
            )
            for entry in self.entries
            for extent in [entry.extent]
        )

    def find(self, tokens: Sequence[int], cache_salt: str = "") -> PrefixEntry | None:
        """The entry that a request for these tokens reads; None where it needs a pass of its own. Changes nothing.

        The pass of the entry may not have run yet (`ready` is False); then every request that leases it waits for that
        pass. Token ids are compared too, because hashes may collide. Entries of another `cache_salt` are never found.
        """
        entry = self.level(tokens, cache_salt)
        if entry is None or len(entry) == len(tokens):
            return entry
        if self.prefix_match == "exact":
            return None
        if not self.fits(len(tokens)):
            return entry
        covered = len(entry) >= self.prefix_cover * len(tokens)
        return entry if covered and not self._index.asked(tokens, cache_salt) else None

    def key(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """What identifies a prefix of these tokens, stored or not."""
        return self._index.key(tokens, cache_salt)

    def level(self, tokens: Sequence[int], cache_salt: str = "") -> PrefixEntry | None:
        """The longest entry that `tokens` begin with, whatever `prefix_match` says. Changes nothing."""
        return next(self._index.levels(tokens, cache_salt), None)

    def lend(self, entry: PrefixEntry, layers: int, tokens: Sequence[int]) -> Lease:
        """Lease the entry that `find` returned for a request for `tokens`."""
        self.stats.hits += 1
        if len(entry) < len(tokens):
            self.stats.partial_hits += 1
            self._index.ask(tokens, entry.cache_salt)
        entry.hits += 1
        if self.eviction == "lru":
            self._index.entries.move_to_end(entry.key)
        return self._lease(entry, layers, hit=True)

    def reserve(self, tokens: Sequence[int], layers: int, cache_salt: str = "") -> Lease | None:
        """Make room for a new entry and lease it to the request whose prefix-only pass will fill it.

        Returns None, with the store unchanged, while leased entries leave no room. Call `fits` first: a prefix that is
        too large never gets room. Raises `IntegrityError` for a prefix that is stored already.
        """
        key = self._index.key(tokens, cache_salt)
        victims = self._room(tokens, cache_salt)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        states = self.new_states(len(tokens))  # before pages are claimed: there may be no memory left for it
        extent = self.allocator.allocate(len(tokens), range(self.allocator.references.shape[0]))
        if extent is None:
            raise IntegrityError("pages that were free for a new entry are gone")
        self.stats.misses += 1
        entry = PrefixEntry(key, tuple(int(t) for t in tokens), extent, states, cache_salt=cache_salt)
        self._index.add(entry)
        return self._lease(entry, layers, hit=False)

    def has_room(self, tokens: Sequence[int], cache_salt: str = "", claimed: Sequence[PageRange] = ()) -> bool:
        """Whether `reserve` would return a lease once the pages of `claimed` are taken. Changes nothing."""
        return self._room(tokens, cache_salt, claimed) is not None

    def withdraw(self, entry: PrefixEntry) -> None:
        """Remove an entry whose pass cannot run. Call `release` for its leases first."""
        self._index.remove(entry)
        self.allocator.release(entry.extent)

    def publish(self, entry: PrefixEntry) -> None:
        """Make an entry readable, once its prefix-only pass has run."""
        entry.ready = True

    def release(self, lease: Lease) -> None:
        """Release a lease. The entry stays until it is evicted. Raises `IntegrityError` on a second release."""
        if lease.released:
            raise IntegrityError("a lease was released twice")
        lease.released = True
        lease.entry.leases -= 1
        self.allocator.release(lease.extent)

    def give_way(self, spare: PrefixEntry | None = None) -> bool:
        """Evict the next entry without a lease, but `spare`, which the request itself would read; False: none."""
        for entry in self.entries:
            if entry is not spare and entry.idle:
                self._evict(entry)
                return True
        return False

    def drop(self, key: int | None = None) -> int:
        """Evict the entry of this hash, or all entries, except leased ones. Returns the number of evicted entries."""
        free = [e for e in self.entries if e.idle and key in (None, e.key)]
        for entry in free:
            self._evict(entry)
        return len(free)

    def _lease(self, entry: PrefixEntry, layers: int, hit: bool) -> Lease:
        extent = entry.extent.below(layers)
        self.allocator.retain(extent)
        entry.leases += 1
        return Lease(entry, layers, extent, hit)

    def _room(
        self, tokens: Sequence[int], cache_salt: str, claimed: Sequence[PageRange] = ()
    ) -> list[PrefixEntry] | None:
        """The fewest entries, in eviction order, whose eviction makes room for a new one; None where leases prevent it.

        Raises `IntegrityError` for a prefix that is stored already.
        """
        colliding = self._index.entries.get(self._index.key(tokens, cache_salt))
        if colliding is not None and colliding.holds(tokens, cache_salt):
            raise IntegrityError("a stored prefix was reserved again")
        victims: list[PrefixEntry] = []
        left = self.budget_tokens - self.tokens - len(tokens)
        free = (self.allocator.references == 0).all(axis=0)
        for extent in claimed:
            free[extent.pages] = False
        need = self.allocator.pages_for(len(tokens))
        if colliding is not None and not colliding.idle:
            return None
        # Only one of two prefixes with equal hashes can be found, so the older one goes first.
        first = [] if colliding is None else [colliding]
        for entry in [*first, *(entry for entry in self.entries if entry is not colliding)]:
            if left > 0 and free.sum() >= need and len(victims) >= len(first):
                return victims
            if not entry.idle:
                continue
            victims.append(entry)
            left += len(entry)
            free[entry.extent.pages] = True
        return victims if left > 0 and free.sum() >= need else None

    def _evict(self, entry: PrefixEntry) -> None:
        log.debug("evicting a prefix of %d tokens", len(entry))
        self._index.remove(entry)
        self.allocator.release(entry.extent)
        self.stats.evictions += 1

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
from remask.store.pages import Extent, PageAllocator

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lease:
    """The right of a running request to read an entry in layers 0 .. layers - 1. A leased entry is not evicted."""

    entry: PrefixEntry
    layers: int
    extent: Extent
    hit: bool  # the entry existed before this request
    released: bool = False


@dataclass(slots=True)
class StoreStats:
    """Counters since the store was made."""

    hits: int = 0
    partial_hits: int = 0  # those of `hits` that read a shorter entry than the prefix of the request
    misses: int = 0
    unnamed: int = 0  # leases of prefixes that the engine found in recent prompts, and no request named
    evictions: int = 0
    unread_reasons: Counter[str] = field(default_factory=Counter)  # requests that read no prefix, by reason


@dataclass(slots=True)
class PrefixStore:
    """Entries under a token budget, in pages of the pool that running requests use too.

    An entry is admitted if it is strictly smaller than the unused budget, as in the BiCache authors' engine. Other
    entries are evicted for it one at a time, but never an entry that is leased or whose pass has not run.

    With `prefix_match` "longest" a request may read a shorter entry: the longest one that its prefix begins with. It
    does so if that entry covers at least the share `prefix_cover` of the prefix and no earlier request had the same
    prefix, or if the prefix can never be stored. Otherwise the prefix gets a pass and an entry of its own, because a
    prefix that comes twice is likely to come again.
    """

    allocator: PageAllocator
    budget_tokens: int
    eviction: Eviction
    salt: bytes
    new_states: Callable[[int], Tensor]  # allocates boundary states: tokens -> [layers - 1, tokens, D]
    slot_bytes: int  # bytes of K and V of one token in one layer
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
        """The entries in the order of eviction."""
        return tuple(self._index.entries.values())

    @property
    def token_count(self) -> int:
        """Number of tokens that are stored."""
        return sum(len(entry) for entry in self._index.entries.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of all boundary states. K and V are not counted: they belong to the pool."""
        return sum(entry.states.nbytes for entry in self._index.entries.values())

    @property
    def idle_pages(self) -> int:
        """Number of pages of a layer that `evict_one` can free."""
        return sum(len(entry.extent.pages) for entry in self._index.entries.values() if entry.idle)

    def fits(self, length: int) -> bool:
        """Whether a prefix of this length can be admitted at all."""
        return length < self.budget_tokens and self.allocator.pages_for(length) <= self.allocator.references.shape[1]

    def describe(self) -> tuple[EntryInfo, ...]:
        """All entries in the order of eviction, for an operator."""
        return tuple(map(self._describe_entry, self.entries))

    def _describe_entry(self, entry: PrefixEntry) -> EntryInfo:
        layers = len(entry.extent.layers)
        slot_count = layers * len(entry.extent.pages) * entry.extent.page_size
        return EntryInfo(
            prefix_id=f"{entry.key:016x}",
            tokens=len(entry),
            layers=layers,
            bytes=slot_count * self.slot_bytes + entry.states.nbytes,
            hits=entry.hits,
            leases=entry.leases,
            ready=entry.ready,
        )

    def find(self, tokens: Sequence[int], cache_salt: str = "") -> PrefixEntry | None:
        """The entry that a request with this prefix reads. Changes nothing.

        Entries of another `cache_salt` are never returned. If the pass of the entry has not run yet (`ready` is False),
        every request that leases it waits for that pass. Returns None if the prefix needs a pass of its own.
        """
        entry = self.longest_entry(tokens, cache_salt)
        if entry is None or len(entry) == len(tokens):
            return entry
        if self.prefix_match == "exact":
            return None
        if not self.fits(len(tokens)):
            return entry
        is_covered = len(entry) >= self.prefix_cover * len(tokens)
        return entry if is_covered and not self._index.has_request(tokens, cache_salt) else None

    def key(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """The key of a prefix of these tokens, stored or not."""
        return self._index.key(tokens, cache_salt)

    def longest_entry(self, tokens: Sequence[int], cache_salt: str = "") -> PrefixEntry | None:
        """The longest entry that `tokens` begin with, under any `prefix_match`; None if there is none."""
        return next(self._index.beginnings(tokens, cache_salt), None)

    def lend(self, entry: PrefixEntry, layers: int, tokens: Sequence[int]) -> Lease:
        """Lease the entry that `find` returned for a request with the prefix `tokens`."""
        self.stats.hits += 1
        if len(entry) < len(tokens):
            self.stats.partial_hits += 1
            self._index.record_request(tokens, entry.cache_salt)
        entry.hits += 1
        if self.eviction == "lru":
            self._index.entries.move_to_end(entry.key)
        return self._lease(entry, layers, hit=True)

    def reserve(self, tokens: Sequence[int], layers: int, cache_salt: str = "") -> Lease | None:
        """Make room for a new entry and lease it to the request whose prefix-only pass will fill it.

        Returns None, and changes nothing, if leased entries leave no room. Call `fits` first: a prefix that is too
        large never gets room. Raises `IntegrityError` if the prefix is stored already.
        """
        key = self._index.key(tokens, cache_salt)
        victims = self._find_victims(tokens, cache_salt)
        if victims is None:
            return None
        for victim in victims:
            self._evict(victim)
        states = self.new_states(len(tokens))  # before pages are claimed, as it fails if memory is short
        extent = self.allocator.allocate(len(tokens), range(self.allocator.references.shape[0]))
        if extent is None:
            raise IntegrityError("pages that were free for a new entry are gone")
        self.stats.misses += 1
        entry = PrefixEntry(key, tuple(int(token) for token in tokens), extent, states, cache_salt=cache_salt)
        self._index.add(entry)
        return self._lease(entry, layers, hit=False)

    def has_room(self, tokens: Sequence[int], cache_salt: str = "", reserved: Sequence[Extent] = ()) -> bool:
        """Whether `reserve` would return a lease after the pages of `reserved` were claimed. Changes nothing."""
        return self._find_victims(tokens, cache_salt, reserved) is not None

    def withdraw(self, entry: PrefixEntry) -> None:
        """Remove an entry whose pass cannot run. Its leases must be released first."""
        self._index.remove(entry)
        self.allocator.release(entry.extent)

    def publish(self, entry: PrefixEntry) -> None:
        """Mark an entry as ready, once its prefix-only pass has run."""
        entry.ready = True

    def release(self, lease: Lease) -> None:
        """Release a lease. The entry stays until it is evicted. Raises `IntegrityError` if it was released before."""
        if lease.released:
            raise IntegrityError("a lease was released twice")
        lease.released = True
        lease.entry.leases -= 1
        self.allocator.release(lease.extent)

    def evict_one(self, protected: PrefixEntry | None = None) -> bool:
        """Evict the first idle entry that is not `protected`. Returns False if there is none."""
        for entry in self.entries:
            if entry is not protected and entry.idle:
                self._evict(entry)
                return True
        return False

    def drop(self, key: int | None = None) -> int:
        """Evict the entry with this key, or all entries, except leased ones. Returns the number of evicted entries."""
        victims = [entry for entry in self.entries if entry.idle and key in (None, entry.key)]
        for victim in victims:
            self._evict(victim)
        return len(victims)

    def _lease(self, entry: PrefixEntry, layers: int, hit: bool) -> Lease:
        extent = entry.extent.below(layers)
        self.allocator.retain(extent)
        entry.leases += 1
        return Lease(entry, layers, extent, hit)

    def _find_victims(
        self, tokens: Sequence[int], cache_salt: str, reserved: Sequence[Extent] = ()
    ) -> list[PrefixEntry] | None:
        """The idle entries, in eviction order, that must be evicted for a new entry while `reserved` pages are taken.

        Returns None if leased entries leave no room. Raises `IntegrityError` if the prefix is stored already.
        """
        collision = self._index.entries.get(self._index.key(tokens, cache_salt))
        if collision is not None and collision.matches(tokens, cache_salt):
            raise IntegrityError("a stored prefix was reserved again")
        if collision is not None and not collision.idle:
            return None
        free_tokens = self.budget_tokens - self.token_count - len(tokens)
        free_pages = (self.allocator.references == 0).all(axis=0)
        for extent in reserved:
            free_pages[extent.pages] = False
        page_count = self.allocator.pages_for(len(tokens))
        # Only one of two prefixes with equal hashes can be found, so the older one is always evicted.
        mandatory = [] if collision is None else [collision]
        victims: list[PrefixEntry] = []

        def is_enough() -> bool:
            return bool(free_tokens > 0 and free_pages.sum() >= page_count)

        for entry in [*mandatory, *(entry for entry in self.entries if entry is not collision)]:
            if is_enough() and len(victims) >= len(mandatory):
                return victims
            if not entry.idle:
                continue
            victims.append(entry)
            free_tokens += len(entry)
            free_pages[entry.extent.pages] = True
        return victims if is_enough() else None

    def _evict(self, entry: PrefixEntry) -> None:
        log.debug("evicting a prefix of %d tokens", len(entry))
        self._index.remove(entry)
        self.allocator.release(entry.extent)
        self.stats.evictions += 1

"""Stored prefixes: their identity, and the index that finds those of a token sequence."""

from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import xxhash
from torch import Tensor

from remask.store.pages import Extent


def prefix_hash(tokens: Sequence[int], salt: bytes = b"") -> int:
    """xxhash64 (seed 0) of `salt`, then of the token ids as little-endian uint32.

    The salt stands for what K/V depend on beside tokens. Without one this is the key of BiCache, appendix C.
    """
    return prefix_hashes(tokens, [len(tokens)], salt)[0]


def prefix_hashes(tokens: Sequence[int], lengths: Sequence[int], salt: bytes = b"") -> list[int]:
    """`prefix_hash` of the leading tokens at each of the ascending `lengths`, in one pass over the tokens."""
    ids = np.asarray(tokens, dtype="<u4")
    state = xxhash.xxh64(salt)
    hashes = []
    start = 0
    for length in lengths:
        state.update(ids[start:length].tobytes())
        hashes.append(int(state.intdigest()))
        start = length
    return hashes


def add_tenant(salt: bytes, cache_salt: str) -> bytes:
    """`salt` followed by a tenant's salt, if that is not empty. Different tenants' salts give different bytes."""
    tenant = cache_salt.encode()
    return salt + len(tenant).to_bytes(8, "little") + tenant if tenant else salt


@dataclass(slots=True)
class PrefixEntry:
    """One shared prefix, identified by all of its tokens and its salt. `ready` once its prefix-only pass has run."""

    key: int
    tokens: tuple[int, ...]
    extent: Extent
    states: Tensor  # [layers - 1, tokens, D]: states[l] leaves layer l. The last layer's is not needed
    ready: bool = False
    leases: int = 0
    hits: int = 0
    cache_salt: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def idle(self) -> bool:
        """Whether it can be evicted: no request reads it, or waits for its pass."""
        return self.ready and not self.leases

    def matches(self, tokens: Sequence[int], cache_salt: str) -> bool:
        """Whether this is the entry of exactly these tokens, for requests of this salt."""
        return self.cache_salt == cache_salt and np.array_equal(self.tokens, np.asarray(tokens))


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """An entry as an operator sees it, without its tokens and its salt."""

    prefix_id: str  # its key in hexadecimal; `PrefixStore.drop` takes `int(prefix_id, 16)`
    tokens: int  # length of the prefix
    layers: int  # layers whose K/V are kept
    bytes: int  # K/V pages in all layers, unused slots of the last page included, and boundary states
    hits: int  # requests that read it without having run its pass
    leases: int  # running requests that read it
    ready: bool  # whether its prefix-only pass has run


Hashes: TypeAlias = Callable[[Sequence[int], Sequence[int], bytes], list[int]]
"""From tokens, ascending lengths, and a salt to the keys of the prefixes of these lengths."""

MAX_REQUESTED = 4096  # prefixes that are remembered as requested although they are not stored


@dataclass(slots=True)
class PrefixIndex:
    """Entries by key, and the lengths that exist under each salt.

    One pass over the tokens of a prompt finds all entries that the prompt begins with, because it hashes the tokens up
    to every stored length. The cost is O(tokens + lengths), not O(entries x tokens).
    """

    salt: bytes
    hashes: Hashes = prefix_hashes
    entries: OrderedDict[int, PrefixEntry] = field(default_factory=OrderedDict)  # the next to be evicted first
    _counts: dict[str, Counter[int]] = field(default_factory=dict)  # by cache_salt: entries of each length
    _lengths: dict[str, list[int]] = field(default_factory=dict)  # by cache_salt, ascending
    # Keys of requested prefixes in place of which a shorter entry was read, oldest first
    _requested: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def key(self, tokens: Sequence[int], cache_salt: str) -> int:
        """The key of the entry of exactly these tokens."""
        return self.hashes(tokens, [len(tokens)], add_tenant(self.salt, cache_salt))[0]

    def beginnings(self, tokens: Sequence[int], cache_salt: str) -> Iterator[PrefixEntry]:
        """Yield the entries that `tokens` begins with, longest first. Token ids are compared, not hashes alone."""
        stored_lengths = self._lengths.get(cache_salt, [])
        lengths = stored_lengths[: bisect_right(stored_lengths, len(tokens))]
        keys = self.hashes(tokens, lengths, add_tenant(self.salt, cache_salt))
        for length, key in zip(reversed(lengths), reversed(keys), strict=True):
            entry = self.entries.get(key)
            if entry is not None and entry.matches(tokens[:length], cache_salt):
                yield entry

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry, whose key must be free."""
        self.entries[entry.key] = entry
        counts = self._counts.setdefault(entry.cache_salt, Counter())
        counts[len(entry)] += 1
        if counts[len(entry)] == 1:
            insort(self._lengths.setdefault(entry.cache_salt, []), len(entry))
        self._requested.pop(entry.key, None)

    def remove(self, entry: PrefixEntry) -> None:
        """Remove an entry."""
        del self.entries[entry.key]
        counts, lengths = self._counts[entry.cache_salt], self._lengths[entry.cache_salt]
        counts[len(entry)] -= 1
        if not counts[len(entry)]:
            del counts[len(entry)]
            lengths.remove(len(entry))
        if not lengths:
            # Requests choose salts, so a salt without entries must leave nothing behind.
            del self._counts[entry.cache_salt], self._lengths[entry.cache_salt]

    def has_request(self, tokens: Sequence[int], cache_salt: str) -> bool:
        """Whether an earlier request for exactly these tokens read a shorter entry."""
        return self.key(tokens, cache_salt) in self._requested

    def record_request(self, tokens: Sequence[int], cache_salt: str) -> None:
        """Remember that a request for these tokens reads a shorter entry. The last `MAX_REQUESTED` are remembered."""
        key = self.key(tokens, cache_salt)
        self._requested[key] = None
        self._requested.move_to_end(key)
        if len(self._requested) > MAX_REQUESTED:
            self._requested.popitem(last=False)

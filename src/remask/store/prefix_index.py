"""An index that finds the stored prefixes of a token sequence, of any length."""

from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from remask.store.entry import PrefixEntry
from remask.store.hashing import prefix_hashes, salted

Hashes: TypeAlias = Callable[[Sequence[int], Sequence[int], bytes], list[int]]
"""Keys of the prefixes of a sequence that have the given, ascending lengths; the bytes are a salt."""

MAX_ASKED = 4096


@dataclass(slots=True)
class PrefixIndex:
    """Entries by key, and the lengths that exist under each salt.

    One pass over the tokens of a prompt finds all of its levels: it hashes them at every stored length. The cost is
    tokens + lengths, not entries times tokens.
    """

    salt: bytes
    hashes: Hashes = prefix_hashes
    entries: dict[int, PrefixEntry] = field(default_factory=dict)
    _counts: dict[str, Counter[int]] = field(default_factory=dict)
    _lengths: dict[str, list[int]] = field(default_factory=dict)  # ascending
    _asked: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def key(self, tokens: Sequence[int], cache_salt: str) -> int:
        """The key of the entry of exactly these tokens."""
        return self.hashes(tokens, [len(tokens)], salted(self.salt, cache_salt))[0]

    def levels(self, tokens: Sequence[int], cache_salt: str) -> Iterator[PrefixEntry]:
        """Entries whose tokens `tokens` begins with, the longest first. Ids are compared, not hashes alone."""
        lengths = self._lengths.get(cache_salt, [])
        lengths = lengths[: bisect_right(lengths, len(tokens))]
        keys = self.hashes(tokens, lengths, salted(self.salt, cache_salt))
        for length, key in zip(reversed(lengths), reversed(keys), strict=True):
            entry = self.entries.get(key)
            if entry is not None and entry.holds(tokens[:length], cache_salt):
                yield entry

    def add(self, entry: PrefixEntry) -> None:
        """Add an entry, whose key must be free."""
        self.entries[entry.key] = entry
        counts = self._counts.setdefault(entry.cache_salt, Counter())
        counts[len(entry)] += 1
        if counts[len(entry)] == 1:
            insort(self._lengths.setdefault(entry.cache_salt, []), len(entry))
        self._asked.pop(entry.key, None)

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

    def asked(self, tokens: Sequence[int], cache_salt: str) -> bool:
        """Whether an earlier request for exactly these tokens read a shorter level."""
        return self.key(tokens, cache_salt) in self._asked

    def ask(self, tokens: Sequence[int], cache_salt: str) -> None:
        """Remember that a request for these tokens reads a shorter level. The last `MAX_ASKED` are remembered."""
        key = self.key(tokens, cache_salt)
        self._asked[key] = None
        self._asked.move_to_end(key)
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)

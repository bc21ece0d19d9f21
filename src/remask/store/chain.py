"""Exact sharing of pages. Where K/V do not depend on later tokens, equal leading tokens have equal pages."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from remask.errors import IntegrityError
from remask.store.entries import prefix_hash
from remask.store.pages import PageAllocator, PageRange


@dataclass(slots=True, eq=False)
class Page:
    """A published page. Its K/V depend on the tokens that it is known by and on its ancestors', and on nothing else."""

    key: int
    parent: int | None  # None: the first of a chain
    tokens: tuple[int, ...]
    salt: str  # of the tenant
    extent: PageRange
    children: int = 0
    hits: int = 0

    def holds(self, tokens: Sequence[int], parent: int | None, salt: str) -> bool:
        """Whether this is the page of exactly these tokens after `parent`, for requests of this salt."""
        return self.parent == parent and self.salt == salt and np.array_equal(self.tokens, np.asarray(tokens))


class PageListener(Protocol):
    """Is told, on the engine's thread, what the store holds. No method may raise, or wait."""

    def stored(self, page: Page) -> None:
        """A page was published."""

    def removed(self, page: Page) -> None:
        """A page was evicted."""

    def cleared(self) -> None:
        """All pages are gone."""


@dataclass(slots=True)
class ChainStats:
    """Counters since the store was made."""

    queries: int = 0  # tokens of whole pages that were looked up
    hits: int = 0  # tokens found
    published: int = 0  # pages
    evictions: int = 0  # pages
    refused: int = 0  # pages that found no room


@dataclass(slots=True)
class PageChain:
    """Published pages of all requests, each identified by the hash of its parent's identity and its tokens.

    A page is owned by the store and by every request that reads it, by reference counts. Pages that no request reads
    are evicted when room is needed, the longest unused leaf of a chain first; a page goes before its parent.
    """

    allocator: PageAllocator
    budget_tokens: int
    salt: bytes
    hash: Callable[[Sequence[int], bytes], int] = prefix_hash
    stats: ChainStats = field(default_factory=ChainStats)
    listener: PageListener | None = None
    _pages: OrderedDict[int, Page] = field(default_factory=OrderedDict)  # longest unused first
    _pending: dict[int, int] = field(default_factory=dict)  # identity -> requests that are computing that page

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.allocator.page_size

    @property
    def pages(self) -> tuple[Page, ...]:
        """The longest unused first."""
        return tuple(self._pages.values())

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return len(self._pages) * self.page_size

    @property
    def idle_pages(self) -> int:
        """Pages that no request reads."""
        return sum(map(self._unread, self._pages.values()))

    def identity(self, tokens: Sequence[int], parent: int | None, salt: str = "") -> int:
        """Identity of a page after the page `parent`, or of a first one; `salt` separates tenants."""
        # A chain starts from the salt of model and tenant, because K/V depend on more than tokens.
        root = self.salt + b"\0" + salt.encode() if parent is None else parent.to_bytes(8, "little")
        return self.hash(tokens, root)

    def known_by(self, number: int, ahead: int = 0) -> slice:
        """Places of the tokens that K/V of the page `number` depend on: its own, and the rest of its last block."""
        return slice(number * self.page_size, (number + 1) * self.page_size + ahead)

    def identities(self, tokens: Sequence[int], salt: str = "", ahead: int = 0) -> list[int]:
        """Identities of the whole pages that `tokens` fill with the `ahead` next ones, from the first on."""
        keys: list[int] = []
        for number in range(max(0, len(tokens) - ahead) // self.page_size):
            keys.append(self.identity(tokens[self.known_by(number, ahead)], keys[-1] if keys else None, salt))
        return keys

    def match(self, tokens: Sequence[int], keys: Sequence[int], salt: str = "") -> list[Page]:
        """The pages that `find` returns, each with one more reference, which the caller must release."""
        pages = self.find(tokens, keys, salt)
        for page in pages:
            self.allocator.retain(page.extent)
        return pages

    def find(self, tokens: Sequence[int], keys: Sequence[int], salt: str = "", ahead: int = 0) -> list[Page]:
        """The longest run of leading pages that are stored; `keys` are the `identities` of `tokens`, compared too."""
        pages: list[Page] = []
        for number, key in enumerate(keys):
            part, page = tokens[self.known_by(number, ahead)], self._pages.get(key)
            if page is None or not page.holds(part, pages[-1].key if pages else None, salt):
                break
            pages.append(page)
        return pages

    def found(self, pages: Sequence[Page], count: int) -> None:
        """Note that a request that looked up `count` pages reads `pages`. A page counts as used after its followers."""
        for page in reversed(pages):
            page.hits += 1
            self._pages.move_to_end(page.key)
        self.stats.queries += count * self.page_size
        self.stats.hits += len(pages) * self.page_size

    def awaited(self, keys: Sequence[int]) -> bool:
        """Whether a running request is computing the first of the pages `keys` that is not stored."""
        return next((key in self._pending for key in keys if key not in self._pages), False)

    def expect(self, keys: Sequence[int]) -> None:
        """Announce pages that a request will compute, so that other requests may wait for them."""
        for key in keys:
            self._pending[key] = self._pending.get(key, 0) + 1

    def give_up(self, keys: Sequence[int]) -> None:
        """Withdraw pages announced by `expect`. Raises `IntegrityError` for a page that was not announced."""
        for key in keys:
            left = self._pending.get(key, 0) - 1
            if left < 0:
                raise IntegrityError("a page was given up that nobody computes")
            if left:
                self._pending[key] = left
            else:
                del self._pending[key]

    def publish(
        self, tokens: Sequence[int], key: int, parent: Page | None, extent: PageRange, salt: str = ""
    ) -> Page | None:
        """Store one page whose K/V are final, unless the same page is stored already.

        Returns the stored page of these tokens after `parent`: the offered one, to which the store takes a reference,
        or an older one. None, with nothing stored, where `parent` has been evicted, other tokens have the same
        identity, or there is no room.
        """
        if parent is not None and self._pages.get(parent.key) is not parent:
            return None
        stored, above = self._pages.get(key), None if parent is None else parent.key
        if stored is not None:
            return stored if stored.holds(tokens, above, salt) else None
        while self.tokens + self.page_size > self.budget_tokens:
            if not self.give_way(() if above is None else (above,)):
                self.stats.refused += 1
                return None
        self.allocator.retain(extent)
        page = self._pages[key] = Page(key, above, tuple(int(t) for t in tokens), salt, extent)
        if parent is not None:
            parent.children += 1
        self.stats.published += 1
        if self.listener is not None:
            self.listener.stored(page)
        return page

    def give_way(self, keep: Collection[int] = ()) -> bool:
        """Evict the longest unused page without readers and followers that is not in `keep`; False: there is none."""
        for page in self._pages.values():
            if page.children == 0 and page.key not in keep and self._unread(page):
                self._evict(page)
                return True
        return False

    def drop(self) -> int:
        """Evict every page that can be evicted. Returns the number of evicted pages."""
        count = 0
        while self.give_way():
            count += 1
        return count

    def _unread(self, page: Page) -> bool:
        return int(self.allocator.references[0, page.extent.pages[0]]) == 1

    def _evict(self, page: Page) -> None:
        del self._pages[page.key]
        if page.parent is not None:
            self._pages[page.parent].children -= 1
        self.allocator.release(page.extent)
        self.stats.evictions += 1
        if self.listener is not None:
            self.listener.removed(page)

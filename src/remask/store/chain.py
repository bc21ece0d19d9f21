"""Exact sharing of pages. Where K/V do not depend on later tokens, equal leading tokens have equal pages."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from remask.errors import IntegrityError
from remask.store.entries import prefix_hash
from remask.store.pages import Extent, PageAllocator


@dataclass(slots=True, eq=False)
class Page:
    """A published page. Its K/V depend on `tokens` and on those of its ancestors, and on nothing else."""

    key: int
    parent: int | None  # key of the page before it; None for the first page of a chain
    tokens: tuple[int, ...]  # its own, and the rest of its last block; see `PageChain.token_slice`
    salt: str  # of the tenant
    extent: Extent
    children: int = 0
    hits: int = 0

    def matches(self, tokens: Sequence[int], parent: int | None, salt: str) -> bool:
        """Whether this is the page of exactly these tokens after `parent`, for requests of this salt."""
        return self.parent == parent and self.salt == salt and np.array_equal(self.tokens, np.asarray(tokens))


class PageListener(Protocol):
    """Called on the engine's thread when the contents of the store change. No method may raise, or wait."""

    def on_stored(self, page: Page) -> None:
        """A page was published."""

    def on_removed(self, page: Page) -> None:
        """A page was evicted."""

    def on_cleared(self) -> None:
        """The store was emptied."""


@dataclass(slots=True)
class ChainStats:
    """Counters since the store was made."""

    queries: int = 0  # tokens of whole pages that were looked up
    hits: int = 0  # those of `queries` whose pages were stored
    published: int = 0  # pages
    evictions: int = 0  # pages
    rejections: int = 0  # pages that were not stored for want of room


@dataclass(slots=True)
class PageChain:
    """Published pages of all requests, each identified by the hash of its parent's identity and its tokens.

    The store and every request that reads a page hold a reference to it. When room is needed, the least recently used
    page is evicted that no request reads and that has no children, so a page is evicted before its parent.
    """

    allocator: PageAllocator
    budget_tokens: int
    salt: bytes
    hash: Callable[[Sequence[int], bytes], int] = prefix_hash
    stats: ChainStats = field(default_factory=ChainStats)
    listener: PageListener | None = None
    _pages: OrderedDict[int, Page] = field(default_factory=OrderedDict)  # least recently used first
    _pending: dict[int, int] = field(default_factory=dict)  # key -> number of requests that are computing that page

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.allocator.page_size

    @property
    def pages(self) -> tuple[Page, ...]:
        """The stored pages, least recently used first."""
        return tuple(self._pages.values())

    @property
    def token_count(self) -> int:
        """Number of tokens that are stored."""
        return len(self._pages) * self.page_size

    @property
    def idle_pages(self) -> int:
        """Number of stored pages that no request reads."""
        return sum(map(self._is_idle, self._pages.values()))

    def identity(self, tokens: Sequence[int], parent: int | None, salt: str = "") -> int:
        """The key of a page after the page `parent`, or of a first page if it is None; `salt` separates tenants."""
        # A chain starts from the salt of model and tenant, because K/V depend on more than tokens.
        root = self.salt + b"\0" + salt.encode() if parent is None else parent.to_bytes(8, "little")
        return self.hash(tokens, root)

    def token_slice(self, page_index: int, block_offset: int = 0) -> slice:
        """The positions of the tokens that the page's K/V depend on: its own, and the rest of its last block.

        `block_offset` is the length of the first block of the canvas, if that is shorter than the others.
        """
        return slice(page_index * self.page_size, (page_index + 1) * self.page_size + block_offset)

    def identities(self, tokens: Sequence[int], salt: str = "", block_offset: int = 0) -> list[int]:
        """The keys, in order, of the whole pages in `tokens`. Each must be followed by `block_offset` more tokens."""
        keys: list[int] = []
        for page_index in range(max(0, len(tokens) - block_offset) // self.page_size):
            parent = keys[-1] if keys else None
            keys.append(self.identity(tokens[self.token_slice(page_index, block_offset)], parent, salt))
        return keys

    def match(self, tokens: Sequence[int], keys: Sequence[int], salt: str = "") -> list[Page]:
        """Find pages as `find` does, and add a reference to each of them, which the caller must release."""
        pages = self.find(tokens, keys, salt)
        for page in pages:
            self.allocator.retain(page.extent)
        return pages

    def find(self, tokens: Sequence[int], keys: Sequence[int], salt: str = "", block_offset: int = 0) -> list[Page]:
        """The longest run of leading pages that are stored. `keys` are the `identities` of `tokens`.

        Tokens are compared too, because hashes may collide.
        """
        pages: list[Page] = []
        for page_index, key in enumerate(keys):
            page = self._pages.get(key)
            parent = pages[-1].key if pages else None
            if page is None or not page.matches(tokens[self.token_slice(page_index, block_offset)], parent, salt):
                break
            pages.append(page)
        return pages

    def record_lookup(self, pages: Sequence[Page], page_count: int) -> None:
        """Count a lookup of `page_count` pages of which `pages` were stored, and mark the stored ones as just used."""
        for page in reversed(pages):  # a page counts as used after its children
            page.hits += 1
            self._pages.move_to_end(page.key)
        self.stats.queries += page_count * self.page_size
        self.stats.hits += len(pages) * self.page_size

    def is_next_pending(self, keys: Sequence[int]) -> bool:
        """Whether a running request is computing the first of the pages `keys` that is not stored."""
        missing = next((key for key in keys if key not in self._pages), None)
        return missing is not None and missing in self._pending

    def announce(self, keys: Sequence[int]) -> None:
        """Announce pages that a request will compute, so that other requests may wait for them."""
        for key in keys:
            self._pending[key] = self._pending.get(key, 0) + 1

    def withdraw(self, keys: Sequence[int]) -> None:
        """Withdraw announced pages. Raises `IntegrityError` if one was not announced."""
        for key in keys:
            remaining = self._pending.get(key, 0) - 1
            if remaining < 0:
                raise IntegrityError("a page was given up that nobody computes")
            if remaining:
                self._pending[key] = remaining
            else:
                del self._pending[key]

    def publish(
        self, tokens: Sequence[int], key: int, parent: Page | None, extent: Extent, salt: str = ""
    ) -> Page | None:
        """Store one page whose K/V are final, and add a reference to its `extent`, unless the page is stored already.

        Returns the stored page of these tokens after `parent`, which may be an older one. Returns None, and stores
        nothing, if `parent` has been evicted, other tokens have the same key, or there is no room.
        """
        if parent is not None and self._pages.get(parent.key) is not parent:
            return None
        parent_key = None if parent is None else parent.key
        stored = self._pages.get(key)
        if stored is not None:
            return stored if stored.matches(tokens, parent_key, salt) else None
        while self.token_count + self.page_size > self.budget_tokens:
            if not self.evict_one(() if parent_key is None else (parent_key,)):
                self.stats.rejections += 1
                return None
        self.allocator.retain(extent)
        page = Page(key, parent_key, tuple(int(token) for token in tokens), salt, extent)
        self._pages[key] = page
        if parent is not None:
            parent.children += 1
        self.stats.published += 1
        if self.listener is not None:
            self.listener.on_stored(page)
        return page

    def evict_one(self, protected: Collection[int] = ()) -> bool:
        """Evict the least recently used page that has no readers and no children and whose key is not `protected`.

        Returns False if there is none.
        """
        for page in self._pages.values():
            if page.children == 0 and page.key not in protected and self._is_idle(page):
                self._evict(page)
                return True
        return False

    def drop(self) -> int:
        """Evict every page that can be evicted. Returns the number of evicted pages."""
        count = 0
        while self.evict_one():
            count += 1
        return count

    def _is_idle(self, page: Page) -> bool:
        # The store's own reference is the only one. Exact pages have the same references in all layers.
        return int(self.allocator.references[0, page.extent.pages[0]]) == 1

    def _evict(self, page: Page) -> None:
        del self._pages[page.key]
        if page.parent is not None:
            self._pages[page.parent].children -= 1
        self.allocator.release(page.extent)
        self.stats.evictions += 1
        if self.listener is not None:
            self.listener.on_removed(page)

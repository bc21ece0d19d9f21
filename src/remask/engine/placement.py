"""The place of a request in memory, as planned before anything is changed, and what the request claims there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.engine.canvas_state import Move, SlotTable, leased_tables, plain_table, shared_table
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan, PrefixHit
from remask.policies.base import CachePolicy, UnreadReason
from remask.store.chain import Page, PageChain
from remask.store.entries import PrefixEntry
from remask.store.pages import Extent
from remask.store.prefix import Lease


@dataclass(slots=True)
class PageSharing:
    """Publishes the pages of one canvas as they become final.

    The K/V of a row are final once a pass computes the row after its whole block had settled.
    """

    chain: PageChain
    canvas: Canvas
    block_length: int
    block_offset: int  # length of the first block of the canvas, if that is shorter than `block_length`
    salt: str
    stored_pages: list[Page]  # with which the canvas begins
    extents: list[Extent]  # one for each page after the stored ones
    keys: list[int]  # of all pages that the prompt fills
    committed: int = field(init=False)  # leading positions whose K/V are final
    _page_count: int = field(init=False)  # leading pages that are complete
    _last_key: int | None = field(init=False)  # of the last of them
    _last_page: Page | None = field(init=False)  # the stored page with that key
    _is_unbroken: bool = True  # whether all complete pages are stored, so that the next one can be published
    _announced: list[int] = field(init=False)  # keys of pages for which other requests may wait

    def __post_init__(self) -> None:
        self.committed = len(self.stored_pages) * self.chain.page_size
        self._page_count = len(self.stored_pages)
        self._last_page = self.stored_pages[-1] if self.stored_pages else None
        self._last_key = None if self._last_page is None else self._last_page.key
        self._announced = self.keys[self._page_count :]
        self.chain.announce(self._announced)

    def settled_length(self) -> int:
        """Number of leading positions whose blocks have settled."""
        noisy = self.canvas.noisy
        settled = int(noisy.argmax()) if noisy.any() else len(noisy)
        return max(0, settled - (settled - self.block_offset) % self.block_length)

    def record_pass(self, plan: Plan, settled_length: int) -> None:
        """Publish the pages that the pass of `plan` completed. At its start `settled_length` positions had settled."""
        rows = np.flatnonzero(plan.spans[0].rows[:settled_length])
        if len(rows) and rows[0] <= self.committed:
            self.commit(int(rows[-1]) + 1)

    def commit(self, stop: int) -> None:
        """Publish the pages that are complete once the K/V of all positions before `stop` are final."""
        self.committed = max(self.committed, stop)
        for index in range(self._page_count, self.committed // self.chain.page_size):
            self._publish_page(index)

    def would_complete(self, stop: int) -> bool:
        """Whether committing the positions before `stop` would complete a page that can be published."""
        return self._is_unbroken and stop // self.chain.page_size > self.committed // self.chain.page_size

    def release(self) -> None:
        """Withdraw the announced pages. References to published pages are not changed."""
        self.chain.withdraw(self._announced)
        self._announced = []

    def _publish_page(self, index: int) -> None:
        """Publish a complete page and withdraw its announcement. Nothing is stored after a page that is not stored."""
        tokens = self.canvas.tokens[self.chain.token_slice(index, self.block_offset)].tolist()
        key = self.chain.identity(tokens, self._last_key, self.salt)
        if self._is_unbroken:
            extent = self.extents[index - len(self.stored_pages)]
            self._last_page = self.chain.publish(tokens, key, self._last_page, extent, self.salt)
            self._is_unbroken = self._last_page is not None
        self._last_key = key
        self._page_count = index + 1
        if key in self._announced:
            self._announced.remove(key)
            self.chain.withdraw([key])


@dataclass(slots=True)
class Claim:
    """The memory that a request holds until it ends."""

    extents: list[Extent]  # pages that it references, without those of its leases
    lease: Lease | None = None  # of the stored prefix that it reads
    publisher: PageSharing | None = None  # publishes its pages, if these are shared
    move: Move | None = None  # stored K/V to be copied before its first pass, as it computes some of them anew


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """The prefix that a request leases."""

    prefix: PrefixHit  # as the policy sees it
    requested_tokens: int  # leading tokens of the prompt that the request may share
    # The stored entry that begins these tokens. None if a new entry gets all of them, by a pass for this request
    entry: PrefixEntry | None


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Exact pages that a request reads, and whether it publishes those that it computes."""

    stored_pages: tuple[Page, ...]  # with which its prompt begins
    salt: str  # separates tenants and grids of blocks
    publishes: bool  # whether pages of this request may be stored


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one request. It is valid until the memory changes."""

    policy: CachePolicy  # the policy that it runs under: the variant without a prefix if it leases none
    extents: tuple[tuple[Extent, ...], ...]  # free pages to be claimed for each of its canvases
    lease: LeasePlan | None = None  # the shared prefix that it leases, if any
    pages: PagePlan | None = None  # the exact pages that it reads, if its policy shares pages
    unread_reason: UnreadReason | None = None  # why it reads no shared prefix; None if it reads or computes one
    unleased_prefix: int = 0  # leading tokens that it shares, if its policy reads none of them from the store


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A request waits for pages. The stored K/V that it would read must not be evicted for it."""

    entry: PrefixEntry | None = None  # the entry that it would lease
    pages: frozenset[int] = frozenset()  # keys of the exact pages that it would read
    evictable: bool = True  # whether evicting idle entries helps. It does not if leased entries fill the store


@dataclass(frozen=True, slots=True)
class AwaitsPage:
    """A request waits for a page that a running request is about to publish."""


Decision: TypeAlias = Placement | NoRoom | AwaitsPage


@dataclass(frozen=True, slots=True)
class SharedKV:
    """The stored K/V that a request has claimed."""

    prefix: PrefixHit | None = None  # as the policy sees it
    lease: Lease | None = None  # of the stored prefix that it reads
    pages: tuple[Page, ...] = ()  # the exact pages that its canvas begins with
    publisher: PageSharing | None = None  # publishes the pages that it computes

    @property
    def lease_in_place(self) -> Lease | None:
        """The lease, if its prefix is read in place."""
        return self.lease if self.prefix is not None and self.prefix.lead else None

    @property
    def cached_tokens(self) -> int:
        """Number of tokens that it reads and that were stored before it began."""
        if self.lease is not None:
            return len(self.lease.entry) if self.lease.hit else 0
        return 0 if self.prefix is None else self.prefix.length

    def tables(self, extents: Sequence[Extent]) -> tuple[SlotTable, ...]:
        """The slot tables of a canvas whose other positions are in `extents`; see `leased_tables`."""
        lease = self.lease_in_place
        if lease is not None:
            return leased_tables(lease, extents)
        pages = [page.extent for page in self.pages]
        return (shared_table(pages, extents[0]) if pages else plain_table(extents[0]),)

    def move(self, slots: NDArray[np.int64]) -> Move | None:
        """The copy of the stored K/V to `slots` [T] of the canvas; None if they are read in place."""
        hit = self.prefix
        if hit is None or self.lease is None or not hit.copied:
            return None
        return Move(self.lease.entry.extent.slots(), slots[: hit.length], hit.layers)

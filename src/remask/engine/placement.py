"""The place of a request in memory, which is decided before anything is changed, and what it claims there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.engine.canvas_state import Move, SlotTable, leased_tables, plain_table, shared_table
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan, PrefixHit
from remask.policies.base import CachePolicy, Unread
from remask.store.chain import Page, PageChain
from remask.store.entries import PrefixEntry
from remask.store.pages import PageRange
from remask.store.prefix import Lease


@dataclass(slots=True)
class PageSharing:
    """Publishes the pages of one canvas as they become final.

    The K/V of a row are final once a pass computes the row after its whole block had settled. The pages `found` were
    read from the store; the pages `own` follow them.
    """

    chain: PageChain
    canvas: Canvas
    block: int
    ahead: int  # length of the first block of the canvas, where it is a short one
    salt: str
    found: list[Page]
    own: list[PageRange]  # one a page
    keys: list[int]  # identities of the pages that the prompt fills
    committed: int = field(init=False)  # leading positions whose K/V are final
    _offered: int = field(init=False)  # pages
    _key: int | None = field(init=False)  # hash of the last of them
    _last: Page | None = field(init=False)  # the stored page with that hash
    _stored: bool = True  # whether the chain is unbroken up to the next page
    _expected: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.committed = len(self.found) * self.chain.page_size
        self._offered = len(self.found)
        self._last = self.found[-1] if self.found else None
        self._key = None if self._last is None else self._last.key
        self._expected = self.keys[self._offered :]
        self.chain.announce(self._expected)  # others may wait for them

    def ready(self) -> int:
        """Number of leading positions whose blocks have settled."""
        noisy = self.canvas.noisy
        settled = int(noisy.argmax()) if noisy.any() else len(noisy)
        return max(0, settled - (settled - self.ahead) % self.block)

    def computed(self, plan: Plan, ready: int) -> None:
        """Publish the pages that `plan` has completed. `ready` leading positions had settled when it began to run."""
        rows = np.flatnonzero(plan.spans[0].rows[:ready])
        if len(rows) and rows[0] <= self.committed:
            self.commit(int(rows[-1]) + 1)

    def commit(self, stop: int) -> None:
        """Publish the pages that are complete once the K/V of all positions before `stop` are final."""
        self.committed = max(self.committed, stop)
        for number in range(self._offered, self.committed // self.chain.page_size):
            self._offer(number)

    def would_complete(self, stop: int) -> bool:
        """Whether committing the positions before `stop`, and no others, would complete a page."""
        return self._stored and stop // self.chain.page_size > self.committed // self.chain.page_size

    def release(self) -> None:
        """Publish nothing more. The pages themselves stay with their owners."""
        self.chain.withdraw(self._expected)
        self._expected = []

    def _offer(self, number: int) -> None:
        tokens = self.canvas.tokens[self.chain.token_slice(number, self.ahead)].tolist()
        key = self.chain.identity(tokens, self._key, self.salt)
        if self._stored:
            self._last = self.chain.publish(tokens, key, self._last, self.own[number - len(self.found)], self.salt)
            self._stored = self._last is not None
        self._key, self._offered = key, number + 1
        if key in self._expected:
            self._expected.remove(key)
            self.chain.withdraw([key])


@dataclass(slots=True)
class Claim:
    """What a request holds in memory until it ends."""

    owned: list[PageRange]  # pages that it references, without those of its leases
    lease: Lease | None = None  # of the stored prefix that it reads
    shares: PageSharing | None = None  # publishes its pages, if these are shared
    # Stored K/V to be copied before its first pass, because it computes some of them anew; None: none
    move: Move | None = None


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """The prefix that a request leases."""

    prefix: PrefixHit  # what is read of it, as the policy sees it
    asked: int  # leading tokens of the prompt that the request may share
    # The entry that holds the first of them. None where a pass over all of them, on behalf of this request, publishes
    # one.
    entry: PrefixEntry | None


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Exact pages that a request reads, and whether it publishes those that it computes."""

    found: tuple[Page, ...]  # stored pages that hold the first tokens of its prompt
    salt: str  # separates tenants and grids of blocks
    publishes: bool  # whether pages of this request may be stored


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one request: valid until the memory next changes."""

    policy: CachePolicy  # the policy that it runs under: the variant without a prefix if it leases none
    own: tuple[tuple[PageRange, ...], ...]  # free pages that become its own, for each of its canvases
    lease: LeasePlan | None = None  # the shared prefix that it leases, if any
    pages: PagePlan | None = None  # the exact pages that it reads, if its policy shares pages
    unread: Unread | None = None  # why it reads no shared prefix; None where it reads one, or brings it
    kept: int = 0  # the leading tokens that it shares, if its policy reads none of them from the store


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A request waits for pages. What it would read must not be evicted for it."""

    entry: PrefixEntry | None = None  # the entry that it would lease
    pages: frozenset[int] = frozenset()  # identities of the exact pages that it would read
    evictable: bool = True  # whether evicting idle entries helps. It does not if leased entries fill the store


@dataclass(frozen=True, slots=True)
class AwaitsPage:
    """A request waits for a page that a running request is about to publish."""


Decision: TypeAlias = Placement | NoRoom | AwaitsPage


@dataclass(frozen=True, slots=True)
class Shared:
    """The stored K/V that a request has claimed."""

    prefix: PrefixHit | None = None  # what is read, as the policy sees it
    lease: Lease | None = None  # of the stored prefix that it reads
    pages: tuple[Page, ...] = ()  # the exact pages that its canvas begins with
    publishes: PageSharing | None = None  # publishes its own pages

    @property
    def front(self) -> Lease | None:
        """The lease of the prefix, where it is read in place."""
        return self.lease if self.prefix is not None and self.prefix.lead else None

    @property
    def found_tokens(self) -> int:
        """Tokens that it reads and that were stored before it began."""
        if self.lease is not None:
            return len(self.lease.entry) if self.lease.hit else 0
        return 0 if self.prefix is None else self.prefix.length

    def tables(self, extents: Sequence[PageRange]) -> tuple[SlotTable, ...]:
        """The slot tables of its canvas, whose own pages are `extents`."""
        front = self.front
        if front is not None:
            return leased_tables(front, extents)
        pages = [page.extent for page in self.pages]
        return (shared_table(pages, extents[0]) if pages else plain_table(extents[0]),)

    def move(self, slots: NDArray[np.int64]) -> Move | None:
        """The copy to `slots` [T] of its canvas before the first pass, where stored K/V are not read in place."""
        hit = self.prefix
        if hit is None or self.lease is None or not hit.copied:
            return None
        return Move(self.lease.entry.extent.slots(), slots[: hit.length], hit.layers)

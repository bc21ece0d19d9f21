"""The place of a request in memory. It is decided before anything is changed."""

from dataclasses import dataclass, field
from typing import TypeAlias

from remask.engine.canvas_state import Move
from remask.engine.drafting import Drafting
from remask.engine.sharing.publishing import PageSharing
from remask.plan.plan import PrefixHit
from remask.policies.base import CachePolicy
from remask.store.chain import Page
from remask.store.entry import PrefixEntry
from remask.store.pages import PageRange
from remask.store.prefix import Lease


@dataclass(slots=True)
class Claim:
    """What a request holds in memory until it ends.

    Attributes:
        owned: pages that it references, without those of its leases.
        leases: the stored parts that it reads, in the order of its canvas.
        shares: publishes its pages, if these are shared.
        moves: stored K/V to be copied before its first pass, because it reads them at other positions.
        drafting: computes drafts beside its canvas; None without any.
    """

    owned: list[PageRange]
    leases: tuple[Lease, ...] = ()
    shares: PageSharing | None = None
    moves: list[Move] = field(default_factory=list)
    drafting: Drafting | None = None


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One stored part that a request leases: a prefix, or tokens anywhere in its prompt.

    Attributes:
        asked: positions of the tokens that the request may share.
        entry: the entry that holds them, or of a prefix the first of them. None where a pass over them alone, on behalf
            of this request, publishes them.
    """

    asked: range
    entry: PrefixEntry | None


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """What a request leases.

    Attributes:
        prefix: all parts together, as the policy sees them.
        parts: the parts, in the order of `prefix.parts`.
    """

    prefix: PrefixHit
    parts: tuple[PartPlan, ...]

    @property
    def entries(self) -> tuple[PrefixEntry, ...]:
        """The entries that are stored."""
        return tuple(part.entry for part in self.parts if part.entry is not None)

    @property
    def asked(self) -> int:
        """Tokens that the request may share."""
        return sum(len(part.asked) for part in self.parts)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Exact pages that a request reads, and whether it publishes those that it computes.

    Attributes:
        found: stored pages that hold the first tokens of its prompt.
        salt: separates tenants and block lengths.
        publishes: whether pages of this request may be stored.
    """

    found: tuple[Page, ...]
    salt: str
    publishes: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one request: valid until the memory next changes.

    Attributes:
        policy: the policy that it runs under: the variant without a prefix if it leases none.
        own: free pages that become its own, for each of its canvases and then for each of its drafts.
        lease: the shared prefix or parts that it leases, if any.
        pages: the exact pages that it reads, if its policy shares pages.
        note: why it reads no shared prefix although it asked for one.
        refused: its prefix is larger than the whole store.
    """

    policy: CachePolicy
    own: tuple[tuple[PageRange, ...], ...]
    lease: LeasePlan | None = None
    pages: PagePlan | None = None
    note: str | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A request waits for pages. Entries that it would read must not be evicted for it.

    Attributes:
        entries: entries that it would lease.
        pages: identities of the exact pages that it would read.
        evictable: whether evicting idle entries helps. It does not if leased entries fill the store.
    """

    entries: tuple[PrefixEntry, ...] = ()
    pages: frozenset[int] = frozenset()
    evictable: bool = True


@dataclass(frozen=True, slots=True)
class AwaitsPage:
    """A request waits for a page that a running request is about to publish."""


Decision: TypeAlias = Placement | NoRoom | AwaitsPage

"""The protocol of all ways of sharing K/V: plan first, which changes nothing, then claim."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from remask.engine.canvas_state import Move, SlotTable, leased_tables, plain_table, shared_table
from remask.engine.pending import PendingRequest
from remask.engine.placement import Decision, Placement
from remask.engine.sharing.publishing import PageSharing
from remask.errors import IntegrityError
from remask.plan.canvas import Canvas
from remask.plan.plan import PrefixHit
from remask.store.chain import Page
from remask.store.pages import PageRange
from remask.store.prefix import Lease, PrefixStore


@dataclass(frozen=True, slots=True)
class Shared:
    """The stored K/V that a request has claimed.

    Attributes:
        prefix: all parts together, as the policy sees them.
        leases: the stored parts that it reads, in the order of its canvas.
        pages: the exact pages that its canvas begins with.
        publishes: publishes its own pages.
    """

    prefix: PrefixHit | None = None
    leases: tuple[Lease, ...] = ()
    pages: tuple[Page, ...] = ()
    publishes: PageSharing | None = None

    @property
    def front(self) -> Lease | None:
        """The lease of the part at the front of its canvas, which is read in place."""
        return self.leases[0] if self.leases and self.prefix is not None and self.prefix.lead else None

    @property
    def found_tokens(self) -> int:
        """Tokens that it reads and that were stored before it began."""
        if self.leases:
            return sum(len(lease.entry) for lease in self.leases if lease.hit)
        return 0 if self.prefix is None else self.prefix.length

    def tables(self, own: Sequence[PageRange]) -> tuple[SlotTable, ...]:
        """The slot tables of its canvas, whose own pages are `own`."""
        front = self.front
        if front is not None:
            return leased_tables(front, own)
        pages = [page.extent for page in self.pages]
        return (shared_table(pages, own[0]) if pages else plain_table(own[0]),)

    def moves(self, slots: NDArray[np.int64]) -> list[Move]:
        """Copies to `slots` [T] of its canvas before the first pass: parts at other positions than where computed."""
        hit = self.prefix
        if hit is None or not self.leases:
            return []
        return [
            Move(lease.entry.extent.slots(), slots[part.start : part.stop], hit.layers, part.start)
            for part, lease in zip(hit.parts, self.leases, strict=True)
            if part.start or hit.copied
        ]


class Sharing(Protocol):
    """One way of sharing K/V between requests."""

    def plan(self, pending: PendingRequest) -> Decision:
        """The place of a request, with the K/V that it would share, or why it has to wait. Changes nothing."""
        ...

    def claim(self, pending: PendingRequest, placement: Placement, canvas: Canvas, undo: ExitStack) -> Shared:
        """Claim what `plan` decided, which must be recent. `undo` gets a call that frees each thing claimed."""
        ...


def reserved(store: PrefixStore, tokens: Sequence[int], layers: int, cache_salt: str) -> Lease:
    """The lease of a new entry. Raises `IntegrityError` where the store has changed since it was planned."""
    lease = store.reserve(tokens, layers, cache_salt)
    if lease is None:
        raise IntegrityError("the room that was planned for a new entry is gone")
    return lease

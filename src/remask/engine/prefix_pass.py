"""The pass that computes a shared prefix for all requests that lease it."""

from dataclasses import dataclass

from remask.engine.canvas_state import prefix_canvas
from remask.engine.chunks import Loop, SidePass
from remask.engine.request import Owner
from remask.engine.running import Scores
from remask.store.prefix import Lease, PrefixStore


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixPass(SidePass):
    """The prefix-only pass of an entry of `store`, whose hidden states are kept in the entry."""

    store: PrefixStore

    @classmethod
    def of(cls, lease: Lease, store: PrefixStore, layers: int, owner: Owner) -> "PrefixPass | None":
        """The pass over the entry that was made for `lease`, on a model of `layers`; None where the entry was there."""
        if lease.hit or lease.entry.ready:
            return None
        branch, whole = prefix_canvas(lease.entry, layers)
        return cls(entry=lease.entry, branch=branch, whole=whole, owner=owner, store=store)

    @property
    def ready(self) -> bool:
        """Always."""
        return True

    @property
    def leases(self) -> tuple[Lease, ...]:
        """None: it writes the entry."""
        return ()

    def ran(self, loop: Loop, scores: Scores) -> None:  # noqa: ARG002
        """See `Member`: once all layers have run the prefix can be read."""
        loop.stats.prefix_row_layers += self.cost
        self.advance()
        if self.finished:
            self.store.publish(self.entry)
            loop.stats.prefix_passes += 1
            loop.leave(self)

    def failed(self, loop: Loop, error: Exception) -> None:
        """See `Member`: what leases the prefix ends too."""
        loop.leave(self)
        loop.fail_readers(self.entry, error)
        self.store.withdraw(self.entry)

"""Leases of stored entries, for prefixes and for parts elsewhere in a prompt."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass

from remask.engine.config import EngineConfig
from remask.engine.pending import PendingRequest
from remask.engine.placement import Decision, LeasePlan, NoRoom, PartPlan, Placement
from remask.engine.request import Request
from remask.engine.sharing.base import Shared, reserved
from remask.model.config import ModelConfig
from remask.plan.canvas import Canvas
from remask.store.prefix import Lease, PrefixStore


@dataclass(frozen=True, slots=True)
class Wish:
    """The lease that a request would get.

    Attributes:
        lease: the lease; None: none.
        note: why it leases nothing although it asked to.
        refused: its prefix is larger than the whole store.
        kept: the positions that it shares, if its policy reads none of them from the store.
    """

    lease: LeasePlan | None = None
    note: str | None = None
    refused: bool = False
    kept: tuple[range, ...] = ()


class Leases(ABC):
    """A `Sharing` of whole entries of the store, which are leased for as long as a request runs."""

    def __init__(self, config: EngineConfig, shape: ModelConfig, store: PrefixStore) -> None:
        """For requests under `config` to a model of `shape`."""
        self.config, self.shape, self.store = config, shape, store
        self.allocator = store.allocator

    @abstractmethod
    def wish(self, pending: PendingRequest) -> Wish:
        """The lease that a request would get now."""

    def plan(self, pending: PendingRequest) -> Decision:
        """See `Sharing`: a place with leases, if the request asks for them and the store can hold the entries."""
        policy, length, layers = pending.request.policy, pending.decoding.length, self.shape.layers
        wish = self.wish(pending)
        lease = wish.lease
        entries = () if lease is None else lease.entries
        # Parts that are not read in place are copied to pages of the canvas, so one extent serves all layers.
        shared = 0 if lease is None else lease.prefix.lead
        leased = lease.prefix.layers if lease is not None and shared else 0
        parts = [(length - shared, range(leased)), (length, range(leased, layers))]
        # A lease of all layers leaves nothing for the layers above, and none leaves nothing for those below.
        wanted = [(tokens, part) for tokens, part in parts if len(part)]
        others = [(length, range(layers))] * (pending.canvases - 1)
        missing = {} if lease is None else _missing(pending.request, lease)
        chosen, room = policy if lease else policy.within(wish.kept), pending.draft_room
        waiting = NoRoom(entries)
        draft = (min(room.rows, length), range(layers))
        for drafts in range(room.drafts, -1, -1):  # as many as have room, since no answer depends on their number
            found = self.allocator.find([*wanted, *others, *[draft] * drafts])
            if found is None:
                continue
            if missing and not self.store.has_room(list(missing), pending.request.cache_salt, found, entries):
                waiting = NoRoom(evictable=False)
                continue
            own = (found[: len(wanted)], *((extent,) for extent in found[len(wanted) :]))
            return Placement(chosen, own, lease, note=wish.note, refused=wish.refused)
        return waiting

    def claim(
        self,
        pending: PendingRequest,
        placement: Placement,
        canvas: Canvas,  # noqa: ARG002
        undo: ExitStack,
    ) -> Shared:
        """See `Sharing`."""
        plan = placement.lease
        if plan is None:
            return Shared()
        leases = self._leases(pending, plan, undo)
        self.store.stats.found += pending.common is not None and plan.asked > pending.request.prefix_length
        return Shared(plan.prefix, leases)

    def longest(self, pending: PendingRequest) -> int:
        """The rows that predict the response must be live, so what is shared may not reach into them."""
        return len(pending.request.prompt_token_ids) - self.shape.shift

    def _leases(self, pending: PendingRequest, plan: LeasePlan, undo: ExitStack) -> tuple[Lease, ...]:
        """Take the planned leases, in the order of the parts. `undo` gets a call that releases each of them."""
        made: dict[int, Lease] = {}
        # Stored entries are leased first, so that none is evicted for a new one.
        for number in sorted(range(len(plan.parts)), key=lambda number: plan.parts[number].entry is None):
            made[number] = self._lease(pending, plan.parts[number], plan.prefix.layers)
            undo.callback(self._unlease, made[number])
        return tuple(made[number] for number in range(len(plan.parts)))

    def _lease(self, pending: PendingRequest, plan: PartPlan, layers: int) -> Lease:
        """Take a planned lease. Raises `IntegrityError` where the store has changed since."""
        request, entry = pending.request, plan.entry
        tokens = request.prompt_token_ids[plan.asked.start : plan.asked.stop]
        if entry is None:
            entry = self.store.whole(tokens, request.cache_salt)  # of an equal part before it
        if entry is None:
            return reserved(self.store, tokens, layers, request.cache_salt)
        return self.store.lend(entry, layers, tokens)

    def _unlease(self, lease: Lease) -> None:
        """Release a new lease, and remove the entry that was made for it."""
        self.store.release(lease)
        if not lease.hit and not lease.entry.leases:
            self.store.withdraw(lease.entry)


def _missing(request: Request, plan: LeasePlan) -> dict[tuple[int, ...], None]:
    """The entries that must be computed for a lease, without duplicates."""
    missing = [part.asked for part in plan.parts if part.entry is None]
    return dict.fromkeys(tuple(request.prompt_token_ids[part.start : part.stop]) for part in missing)

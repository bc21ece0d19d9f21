"""Audits: passes without any cache that find how deep requests may read a shared prefix.

Where audits bound a policy's depth (`Traits.audits`), a request begins when one has told the depth of its prefix. Later
ones are audited again now and then, beside their own passes.
"""

import logging
from dataclasses import dataclass, replace

from remask.engine.canvas_state import whole_canvas
from remask.engine.chunks import Loop, SidePass
from remask.engine.faults import exhausts, poisons
from remask.engine.pending import PendingRequest
from remask.engine.placement import AuditPlan, Awaiting, Decision, NoRoom
from remask.engine.running import Scores
from remask.engine.sharing.way import reserved
from remask.store.pages import PageAllocator, PageRange
from remask.store.prefix import Lease, PrefixStore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class AuditPass(SidePass):
    """A pass over the whole canvas of a request at its first step, without any cache, to measure what its prefix bears.

    Attributes:
        audits: what placed it, and takes back what it owns.
        lease: keeps the entry that the prefix's K and V are compared with.
        extent: pages of the canvas, its own.
        ratio: the request's prefix ratio in percent.
        awaited_by: the request that begins when its depth is known; None where the request runs.
    """

    audits: "Audits"
    lease: Lease
    extent: PageRange
    ratio: int
    awaited_by: PendingRequest | None = None

    @property
    def ready(self) -> bool:
        """Whether the prefix-only pass is done: only then there is something to compare with."""
        return self.entry.ready

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The entry."""
        return (self.lease,)

    @property
    def owned(self) -> tuple[PageRange, ...]:
        """Pages that it holds references to, beside those of its lease."""
        return (self.extent,)

    def ran(self, loop: Loop, scores: Scores) -> None:  # noqa: ARG002
        """See `Member`: once all layers have run the prefix is compared with the store."""
        loop.stats.audit_row_layers += self.cost
        self.advance()
        if not self.finished:
            return
        try:
            similarity = loop.similarity(self)
        except Exception as error:
            if poisons(error) or exhausts(error):
                raise
            self.failed(loop, error)
            return
        self.audits.end(self)
        self.entry.depths.note(self.ratio, similarity)
        loop.stats.audits += 1
        loop.leave(self)

    def failed(self, loop: Loop, error: Exception) -> None:
        """See `Member`: the request that awaits it ends too."""
        loop.leave(self)
        self.audits.end(self)
        self.entry.depths.give_up(self.ratio)
        log.error("an audit of a prefix of %d tokens failed: %s", len(self.entry), error, exc_info=error)
        loop.fail_waiting(self.awaited_by, error, "the audit of its prefix failed")


class Audits:
    """Plans and places the audits of one memory.

    Attributes:
        passes: those that have begun and not ended.
    """

    def __init__(self, allocator: PageAllocator, store: PrefixStore, layers: int, *, pieces: bool) -> None:
        """On a model of `layers`. `pieces`: passes may run in pieces."""
        self._allocator, self._store, self._layers, self._pieces = allocator, store, layers, pieces
        self.passes: list[AuditPass] = []

    @property
    def extra_bytes(self) -> int:
        """Bytes that audits hold beside their pages."""
        return sum(audit.branch.extra_bytes for audit in self.passes)

    @property
    def awaited_by(self) -> list[PendingRequest]:
        """The requests that begin when an audit has ended."""
        return [audit.awaited_by for audit in self.passes if audit.awaited_by is not None]

    def plan(self, pending: PendingRequest, audit: AuditPlan) -> Decision:
        """A place for the audit that tells how deep a request may read its prefix. Changes nothing."""
        request, entry = pending.request, audit.entry
        if entry is not None and entry.depths.auditing(audit.ratio):
            return Awaiting.AUDIT
        found = self._allocator.find([(pending.decoding.length, range(self._layers))])
        if found is None:
            return NoRoom(() if entry is None else (entry,))
        tokens = request.prompt_token_ids[: audit.asked]
        if entry is None and not self._store.has_room([tokens], request.cache_salt, found):
            return NoRoom(evictable=False)
        return replace(audit, own=found[0])

    def beside(
        self, pending: PendingRequest, audit: AuditPlan | None, wanted: list[tuple[int, range]]
    ) -> AuditPlan | None:
        """`audit`, with a place where one is due and has room beside the pages `wanted` for its request.

        Where there is no room a later request is audited. Changes nothing.
        """
        if audit is None or audit.entry is None or not audit.entry.ready or not audit.entry.depths.due(audit.ratio):
            return audit
        room = self._allocator.find([*wanted, (pending.decoding.length, range(self._layers))])
        return audit if room is None else replace(audit, own=room[-1])

    def count(self, audit: AuditPlan | None) -> None:
        """Note that a request begins whose depth audits bound, if they do."""
        if audit is not None and audit.entry is not None:
            audit.entry.depths.count(audit.ratio, audit.audits.tau)

    def place(self, pending: PendingRequest, plan: AuditPlan, *, awaited: bool) -> AuditPass:
        """Give an audit its canvas, pages and lease, as `plan` decided since the memory last changed.

        Where `awaited`, the request begins when it has ended. Where anything raises, nothing is left claimed.
        """
        assert plan.own is not None
        canvas = pending.decoding.canvas()
        # Only a pass in pieces restarts rows; a whole one needs no room for their states.
        states = self._store.new_states(len(canvas)) if self._pieces else None
        self._allocator.claim(plan.own)
        try:
            lease = self._lease(pending, plan)
        except BaseException:
            self._allocator.release(plan.own)
            raise
        branch, whole = whole_canvas(canvas, plan.own, self._layers, states, keep=False)
        audit = AuditPass(
            entry=lease.entry,
            branch=branch,
            whole=whole,
            owner=pending.request.owner,
            audits=self,
            lease=lease,
            extent=plan.own,
            ratio=plan.ratio,
            awaited_by=pending if awaited else None,
        )
        lease.entry.depths.begin(plan.ratio, plan.audits.interval)
        self.passes.append(audit)
        return audit

    def end(self, audit: AuditPass) -> None:
        """Take back all that an audit owns."""
        self.passes.remove(audit)
        self._allocator.release(audit.extent)
        self._store.release(audit.lease)

    def _lease(self, pending: PendingRequest, plan: AuditPlan) -> Lease:
        """The lease of the whole prefix. Raises `IntegrityError` where the store has changed since it was planned."""
        if plan.entry is not None:
            return self._store.hold(plan.entry, self._layers)
        request = pending.request
        tokens = request.prompt_token_ids[: plan.asked]
        lease = reserved(self._store, tokens, self._layers, request.cache_salt)
        pending.brought = lease.entry.key
        return lease

"""Admission: waiting requests begin in the order of their turns, while there are slots and pages."""

from collections import Counter

from remask.engine.lifecycle import Lifecycle
from remask.engine.memory import Memory
from remask.engine.pending import PendingRequest
from remask.engine.placement import AwaitsPage, NoRoom, Placement
from remask.engine.prefix_pass import PrefixPass
from remask.engine.request import Owner
from remask.engine.running import POLICY


class Admission:
    """Starts waiting requests: gives each its place in memory."""

    def __init__(self, lifecycle: Lifecycle, memory: Memory, max_num_seqs: int) -> None:
        """At most `max_num_seqs` canvases run at a time; clients with less than their share may exceed that."""
        self._lifecycle, self._memory, self._most = lifecycle, memory, max_num_seqs

    def admit(self, now: float) -> None:
        """Begin waiting requests in the order of their turns at `now`, while there are slots and pages.

        Requests behind one that awaits a page of a running request may begin before it. Requests whose canvas has grown
        come first, in the order in which they outgrew their places, and nothing begins while one of them waits for
        pages. They hold no pages meanwhile, so all that runs comes to its end, or to its own next block.
        """
        if not all(self._goes_on(pending) for pending in list(self._lifecycle.growing)):
            return
        waiting, passed = self._lifecycle.waiting, Counter[Owner]()
        while len(waiting) and (pending := waiting.first(now, passed)) is not None:
            if not self._has_slot(pending) or not self._consider(pending, passed):
                return

    def _goes_on(self, pending: PendingRequest) -> bool:
        """Whether a request whose canvas has grown has its place, or has ended; False: it waits for pages."""
        # Where one runs alone after a failure of the engine, that has to end first.
        if any(each.pending.starts > 1 for each in self._lifecycle.requests()):
            return False
        return self._consider(pending, Counter())

    def _consider(self, pending: PendingRequest, passed: Counter[Owner]) -> bool:
        """Begin a request, end it with its error, or count it in `passed`. False where memory has no room for it."""
        while True:
            decision = self._lifecycle.attempt(pending, lambda: self._memory.plan(pending), POLICY)
            match decision:
                case NoRoom():
                    # Evict an entry that no request reads, and try again.
                    if self._memory.give_way(decision):
                        continue
                    return False
                case Placement():
                    self._begin(pending, decision)
                case AwaitsPage():
                    passed[pending.request.owner] += 1
            return True

    def _has_slot(self, pending: PendingRequest) -> bool:
        """Whether a request may begin now, memory aside."""
        running = self._lifecycle.requests()
        canvases = sum(each.canvases for each in running)
        if not canvases:
            return True
        # After a failure of the engine, requests that ran then run one at a time.
        if pending.starts > 0 or any(each.pending.starts > 1 for each in running):
            return False
        return canvases + pending.canvases <= self._most or self._lifecycle.waiting.beyond(
            pending, canvases, self._most
        )

    def _begin(self, pending: PendingRequest, placement: Placement) -> None:
        """Give a waiting request its place. It ends with the error where it cannot have that."""
        before = self._lifecycle.growing.get(pending)
        running = self._lifecycle.attempt(
            pending, lambda: self._memory.place(pending, placement, before), "it could not begin"
        )
        if running is None:
            return
        self._lifecycle.begin(running)
        for lease in running.claim.leases:
            work = PrefixPass.of(lease, self._memory.store, self._memory.shape.layers, running.owner)
            if work is not None:
                self._lifecycle.add(work)

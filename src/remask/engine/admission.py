"""Who gets a place: requests that have begun, then others in the order of their turns, as far as slots and pages go."""

from collections import Counter

from remask.engine.lifecycle import Lifecycle
from remask.engine.memory import Memory
from remask.engine.pending import PendingRequest
from remask.engine.placement import AwaitsPage, NoRoom, Placement
from remask.engine.prefix_pass import PrefixPass
from remask.engine.request import Owner
from remask.engine.running import POLICY


class Admission:
    """Gives waiting requests their places in memory."""

    def __init__(self, lifecycle: Lifecycle, memory: Memory, max_num_seqs: int) -> None:
        """At most `max_num_seqs` canvases run beside each other, but for those whose clients have less than a part."""
        self._lifecycle, self._memory, self._most = lifecycle, memory, max_num_seqs

    def admit(self, now: float) -> None:
        """Begin waiting requests in the order of their turns at `now`, as far as slots and pages go.

        A request that awaits a page of a running one lets others pass. Those whose canvas has grown go on first, in the
        order in which they outgrew their places, and nothing begins while one of them waits for pages: what frees these
        is theirs. They hold none meanwhile, so that all that runs comes to its end, or to its own next block.
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
        """Begin a request, end it with its error, or count it as `passed`, as memory decides; False: it has no room."""
        while True:
            decision = self._lifecycle.attempt(pending, lambda: self._memory.plan(pending), POLICY)
            match decision:
                case NoRoom():
                    # What nobody reads gives way to it.
                    if self._memory.give_way(decision):
                        continue
                    return False
                case Placement():
                    self._begin(pending, decision)
                case AwaitsPage():
                    passed[pending.request.owner] += 1
            return True

    def _has_slot(self, pending: PendingRequest) -> bool:
        """Whether a request may begin beside what runs, if there is memory."""
        running = self._lifecycle.requests()
        canvases = sum(each.canvases for each in running)
        if not canvases:
            return True
        # One of them was running when the engine failed.
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

"""The life of requests, from arrival to result: which wait, which begin, which run, and how each ends."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from remask.engine.member import EngineStats, Member
from remask.engine.memory import Memory
from remask.engine.observer import Observers
from remask.engine.placement import AwaitsPage, NoRoom, Placement
from remask.engine.planning import Scheduler, StepLimits
from remask.engine.prefix_pass import PrefixPass
from remask.engine.request import Owner, PendingRequest, Request
from remask.engine.running import RunningRequest
from remask.engine.waiting import WaitingQueue
from remask.machine.device import is_fatal
from remask.request.result import Event, FinishReason, Result

log = logging.getLogger(__name__)

T = TypeVar("T")

# What failed, in the message of a request's error.
POLICY_FAILED, MOVE_FAILED = "its cache policy failed", "its stored prefix could not be copied"
PASS_FAILED, WRITE_FAILED = "its pass failed", "its tokens could not be settled"
PREFIX_FAILED = "the pass of its shared prefix failed"
ENGINE_FAILED = "the engine failed while it ran"
MAX_STARTS = 2  # of one request, where the engine fails while it runs


class Lifecycle:
    """Holds the requests of an engine, and ends them.

    Attributes:
        outgrown: requests whose canvas has outgrown its place, in the order in which they did. They hold no memory.
        at_work: ids of the requests that are being worked on in this step; other threads may read it.
    """

    def __init__(self, memory: Memory, observers: Observers, limits: StepLimits, stats: EngineStats) -> None:
        """`limits` are those of a step."""
        self.memory, self.observers, self.stats = memory, observers, stats
        self.waiting = WaitingQueue()  # requests that have not begun
        self.outgrown: dict[PendingRequest, RunningRequest] = {}
        self.scheduler = Scheduler(limits)  # takes the turns of the running members
        self.ids: set[str] = set()  # ids of requests whose results are still to be reported
        self.timed: set[str] = set()  # those of them that have a deadline
        self.events: list[Event] = []  # events that are still to be reported
        self.at_work: Sequence[str] = ()
        self.peak_stale = False  # a member has begun since the peak of memory was last measured

    @property
    def idle(self) -> bool:
        """Whether no request waits and none runs."""
        return not (self.waiting.count or self.outgrown or self.scheduler.line)

    def requests(self) -> list[RunningRequest]:
        """The requests among the members."""
        return [member for member in self.scheduler.line if isinstance(member, RunningRequest)]

    def unfinished(self) -> list[RunningRequest]:
        """Running requests whose results are still to be reported."""
        return [running for running in self.requests() if not running.closing]

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request that has arrived."""
        self.waiting.add(pending)
        self.ids.add(pending.request.id)
        if pending.request.deadline_s is not None:
            self.timed.add(pending.request.id)

    def begin(self, running: RunningRequest) -> None:
        """Start a request that has waited, or let one go on whose canvas has grown."""
        pending = running.pending
        self.waiting.hold(pending)
        self.add(running)
        if self.outgrown.pop(pending, None) is not None:
            return
        self.waiting.remove(pending)
        pending.starts += 1
        if not pending.begun:
            pending.begun = True
            self.events.append(Event(pending.request.id, queued_s=pending.elapsed_s))

    def add(self, member: Member) -> None:
        """Add a member to the passes."""
        self.scheduler.add(member)
        self.peak_stale = True

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed."""

        def late(pending: PendingRequest) -> bool:
            limit = pending.request.deadline_s
            return limit is not None and now - pending.arrived >= limit

        self._end_all(late, "timeout")

    def cancel(self, request_id: str) -> bool:
        """End a request; False for an unknown id."""
        return self._end_all(lambda pending: pending.request.id == request_id, "cancelled")

    def _end_all(self, ends: Callable[[PendingRequest], bool], reason: FinishReason) -> bool:
        """End the requests that `ends` names, and return whether there are any."""
        waiting = [pending for pending in [*self.waiting, *self.outgrown] if ends(pending)]
        running = [member for member in self.unfinished() if ends(member.pending)]
        for pending in waiting:
            self.end_waiting(pending, reason)
        for member in running:
            self.end(member, reason)
        return bool(waiting or running)

    def start_over(self, error: Exception) -> None:
        """After memory was emptied, requests wait again, or end with `error` if they reported or began too often."""
        begun, self.at_work = self.unfinished(), ()
        self.stats.recoveries += 1
        self.scheduler = Scheduler(self.scheduler.limits)
        self.waiting.nobody_holds()
        for running in begun:
            if running.record.reported or running.pending.starts >= MAX_STARTS:
                self._report(running.result("error", failure(running.request, error, ENGINE_FAILED)))
            else:
                self.waiting.add(running.pending)

    def attempt(self, pending: PendingRequest, act: Callable[[], T], what: str) -> T | None:
        """What `act` returns; None where `pending` ended with an error: `what` failed. Raises errors of the engine."""
        self.at_work = (pending.request.id,)
        try:
            return act()
        # Policies and models may be foreign code: what they raise for one request must end no other.
        except Exception as error:
            pending.starts += is_fatal(error)
            if is_fatal(error) and pending.starts < MAX_STARTS:
                raise
            self.end_waiting(pending, "error", failure(pending.request, error, what))
            return None

    def finish(self, member: Member) -> None:
        """Take note of a member that is done: it ends, waits for the place of a longer canvas, or completes a page."""
        if isinstance(member, PrefixPass):
            self.scheduler.remove(member)
            for running in self.requests():
                lease = running.claim.lease
                running.ready = lease is None or lease.entry.ready
        elif isinstance(member, RunningRequest):
            if member.closing:
                self._release(member)
            elif member.end.reason is not None:
                self.end(member, member.end.reason)
            else:
                self.grow(member)

    def fail(self, member: Member, error: Exception, what: str) -> None:
        """End a member with `error`, and what depends on it; `what` failed. Raises what no member causes."""
        # Policies and models may be foreign code: what they raise for one request must end no other.
        if is_fatal(error):
            raise error
        if isinstance(member, PrefixPass):
            self.scheduler.remove(member)
            for running in self.requests():
                lease = running.claim.lease
                if lease is not None and lease.entry is member.entry:
                    self.fail(running, error, PREFIX_FAILED)
            member.store.withdraw(member.entry)
            member.ended = True
        elif isinstance(member, RunningRequest):
            self.end(member, "error", failure(member.request, error, what))

    def grow(self, running: RunningRequest) -> None:
        """Let a request wait for the place of a longer canvas. Its tokens are the host's, and all else is freed."""
        pending, canvases = running.pending, [state.canvas for state in running.canvases]
        pending.decoding = pending.decoding.grown(canvases, running.decoder.step)
        self._release(running)
        self.outgrown[pending] = running

    def end_waiting(self, pending: PendingRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a request that waits, to begin or to go on."""
        before = self.outgrown.pop(pending, None)
        if before is not None:
            self._report(before.result(reason, error))
            return
        self.waiting.remove(pending)
        self._report(pending.result(reason, error))

    def end(self, running: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a running request, and free its memory. A page that others may read is completed first."""
        if not running.closing:
            self._report(running.result(reason, error))
        if reason not in ("stop", "length") or not running.close():
            self._release(running)

    def _report(self, result: Result) -> None:
        self.events.append(Event(result.id, result=result))
        self.ids.discard(result.id)
        self.timed.discard(result.id)

    def _release(self, running: RunningRequest) -> None:
        self.scheduler.remove(running)
        self.waiting.let_go(running.pending)
        self.observers.runner.forget()  # layouts with this request are not used again
        self.memory.free(running)
        running.turn = None  # which refers to the request
        running.ended = True


def failure(request: Request, error: Exception, what: str) -> str:
    """Log that `what` failed with `error` for `request`. Returns the message of the request's result."""
    log.error("request %s: %s: %s", request.id, what, error, exc_info=error)
    return f"{what}: {error}"


class Admission:
    """Starts waiting requests: gives each its place in memory."""

    def __init__(self, lifecycle: Lifecycle, memory: Memory, max_num_seqs: int) -> None:
        """At most `max_num_seqs` canvases run at a time; clients with less than their share may exceed that."""
        self._lifecycle, self._memory, self._most = lifecycle, memory, max_num_seqs

    def admit(self, now: float) -> None:
        """Begin waiting requests in the order of their turns at `now`, while there are slots and pages.

        Requests behind one that awaits a page may begin before it. Those whose canvas has grown come first, and nothing
        begins while one of them waits for pages. They hold none meanwhile, so all that runs comes to its end, or to its
        own next block.
        """
        if not all(self._goes_on(pending) for pending in list(self._lifecycle.outgrown)):
            return
        waiting, passed = self._lifecycle.waiting, Counter[Owner]()
        while len(waiting) and (pending := waiting.first(now, passed)) is not None:
            if not self._has_slot(pending) or not self._consider(pending, passed):
                return

    def _goes_on(self, pending: PendingRequest) -> bool:
        """Whether a request whose canvas has grown has its place, or has ended; False: it waits for pages."""
        # Where one runs alone after a failure of the engine, that has to end first.
        if any(running.pending.starts > 1 for running in self._lifecycle.requests()):
            return False
        return self._consider(pending, Counter())

    def _consider(self, pending: PendingRequest, passed: Counter[Owner]) -> bool:
        """Begin a request, end it with its error, or count it in `passed`. False where memory has no room for it."""
        while True:
            decision = self._lifecycle.attempt(pending, lambda: self._memory.plan(pending), POLICY_FAILED)
            match decision:
                case NoRoom():
                    # Evict an entry that no request reads, and try again.
                    if self._memory.evict_one(decision):
                        continue
                    return False
                case Placement():
                    self._begin(pending, decision)
                case AwaitsPage():
                    passed[pending.request.owner] += 1
            return True

    def _has_slot(self, pending: PendingRequest) -> bool:
        running = self._lifecycle.requests()
        canvases = sum(len(member.canvases) for member in running)
        if not canvases:
            return True
        # After a failure of the engine, requests that ran then run one at a time.
        if pending.starts > 0 or any(member.pending.starts > 1 for member in running):
            return False
        if canvases + pending.canvases <= self._most:
            return True
        waiting = self._lifecycle.waiting
        return waiting.beyond(pending, canvases, self._most) and (waiting.several or self._memory.spares(pending))

    def _begin(self, pending: PendingRequest, placement: Placement) -> None:
        """Give a waiting request its place. It ends with the error where it cannot have that."""
        before = self._lifecycle.outgrown.get(pending)
        running = self._lifecycle.attempt(
            pending, lambda: self._memory.place(pending, placement, before), "it could not begin"
        )
        if running is None:
            return
        self._lifecycle.begin(running)
        lease = running.claim.lease
        work = None if lease is None else PrefixPass.of(lease, self._memory.store, self._memory.shape.layers, running)
        if work is not None:
            self._lifecycle.add(work)

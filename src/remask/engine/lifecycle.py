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

# The first words of a request's error
POLICY_FAILED, MOVE_FAILED = "its cache policy failed", "its stored prefix could not be copied"
PASS_FAILED, WRITE_FAILED = "its pass failed", "its tokens could not be settled"
PREFIX_FAILED = "the pass of its shared prefix failed"
ENGINE_FAILED = "the engine failed while it ran"
MAX_STARTS = 2  # of one request, where the engine fails while it runs


class Lifecycle:
    """Holds the requests of an engine, and ends them.

    Attributes:
        growing: requests that wait for the place of a longer canvas, by their pending requests, in the order in which
            they outgrew their places. They hold no memory.
        active_ids: ids of the requests that are being worked on in this step. Other threads may read it.
    """

    def __init__(self, memory: Memory, observers: Observers, limits: StepLimits, stats: EngineStats) -> None:
        self.memory = memory
        self.observers = observers
        self.stats = stats
        self.waiting = WaitingQueue()  # requests that have not begun
        self.growing: dict[PendingRequest, RunningRequest] = {}
        self.scheduler = Scheduler(limits)  # holds the running members
        self.ids: set[str] = set()  # ids of requests whose results are still to be reported
        self.deadline_ids: set[str] = set()  # those of them that have a deadline
        self.events: list[Event] = []  # events that are still to be reported
        self.active_ids: Sequence[str] = ()
        self.is_peak_stale = False  # a member has begun since the peak of memory was last measured

    @property
    def idle(self) -> bool:
        """Whether no request waits and none runs."""
        return not (self.waiting.count or self.growing or self.scheduler.line)

    def requests(self) -> list[RunningRequest]:
        """The members that are requests, those with a reported result included."""
        return [member for member in self.scheduler.line if isinstance(member, RunningRequest)]

    def unfinished(self) -> list[RunningRequest]:
        """Running requests whose results are still to be reported."""
        return [running for running in self.requests() if not running.closing]

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request that has arrived."""
        self.waiting.add(pending)
        self.ids.add(pending.request.id)
        if pending.request.deadline_s is not None:
            self.deadline_ids.add(pending.request.id)

    def begin(self, running: RunningRequest) -> None:
        """Start a request that has waited, or resume one whose canvas has grown."""
        pending = running.pending
        self.waiting.add_running(pending)
        self.add(running)
        if self.growing.pop(pending, None) is not None:
            return
        self.waiting.remove(pending)
        pending.starts += 1
        if not pending.start_reported:
            pending.start_reported = True
            self.events.append(Event(pending.request.id, queued_s=pending.elapsed_s))

    def add(self, member: Member) -> None:
        """Let a member take part in passes."""
        self.scheduler.add(member)
        self.is_peak_stale = True

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed at the time `now`."""

        def is_late(pending: PendingRequest) -> bool:
            limit = pending.request.deadline_s
            return limit is not None and now - pending.arrived >= limit

        self._end_all(is_late, "timeout")

    def cancel(self, request_id: str) -> bool:
        """End a request. Returns False if the id is unknown."""
        return self._end_all(lambda pending: pending.request.id == request_id, "cancelled")

    def _end_all(self, condition: Callable[[PendingRequest], bool], reason: FinishReason) -> bool:
        """End the requests that meet `condition`. Returns whether there are any."""
        waiting = [pending for pending in [*self.waiting, *self.growing] if condition(pending)]
        running = [member for member in self.unfinished() if condition(member.pending)]
        for pending in waiting:
            self.end_waiting(pending, reason)
        for member in running:
            self.end(member, reason)
        return bool(waiting or running)

    def start_over(self, error: Exception) -> None:
        """Queue running requests again, after `error` has emptied memory.

        Those that have reported something, or began too often, end with the error.
        """
        interrupted = self.unfinished()
        self.active_ids = ()
        self.stats.recoveries += 1
        self.scheduler = Scheduler(self.scheduler.limits)
        self.waiting.clear_running()
        for running in interrupted:
            if running.record.has_reported or running.pending.starts >= MAX_STARTS:
                self._report(running.result("error", error_message(running.request, error, ENGINE_FAILED)))
            else:
                self.waiting.add(running.pending)

    def attempt(self, pending: PendingRequest, function: Callable[[], T], failure: str) -> T | None:
        """The result of `function`, called on behalf of a waiting request.

        If it raises, the request ends with an error that begins with `failure`, and None is returned. Raises errors of
        the device while the request may begin again.
        """
        self.active_ids = (pending.request.id,)
        try:
            return function()
        # Policies and models may be foreign code: what they raise for one request must end no other.
        except Exception as error:
            pending.starts += is_fatal(error)
            if is_fatal(error) and pending.starts < MAX_STARTS:
                raise
            self.end_waiting(pending, "error", error_message(pending.request, error, failure))
            return None

    def finish_member(self, member: Member) -> None:
        """Handle a member that is done: end it, queue it for a longer canvas, or let it complete a page."""
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

    def fail(self, member: Member, error: Exception, failure: str) -> None:
        """End a member, and the requests that depend on it, with an error that begins with `failure`.

        Raises `error` if it is one of the device, which no member causes.
        """
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
            self.end(member, "error", error_message(member.request, error, failure))

    def grow(self, running: RunningRequest) -> None:
        """Let a request wait for the place of a longer canvas. All but its tokens on the host is freed."""
        pending, canvases = running.pending, [state.canvas for state in running.canvases]
        pending.decoding = pending.decoding.grow(canvases, running.decoder.step)
        self._release(running)
        self.growing[pending] = running

    def end_waiting(self, pending: PendingRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a request that waits to begin, or for a longer canvas."""
        predecessor = self.growing.pop(pending, None)
        if predecessor is not None:
            self._report(predecessor.result(reason, error))
            return
        self.waiting.remove(pending)
        self._report(pending.result(reason, error))

    def end(self, running: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a running request, and free its memory, unless a further pass completes a page first."""
        if not running.closing:
            self._report(running.result(reason, error))
        needs_pass = reason in ("stop", "length") and running.close()  # requests the pass, too
        if not needs_pass:
            self._release(running)

    def _report(self, result: Result) -> None:
        self.events.append(Event(result.id, result=result))
        self.ids.discard(result.id)
        self.deadline_ids.discard(result.id)

    def _release(self, running: RunningRequest) -> None:
        """Take a request out of the engine, and free its memory."""
        self.scheduler.remove(running)
        self.waiting.remove_running(running.pending)
        self.observers.runner.forget_layouts()  # layouts with this request are not used again
        self.memory.free(running)
        running.turn = None  # breaks a reference cycle
        running.ended = True


def error_message(request: Request, error: Exception, failure: str) -> str:
    """Log `error`, and return the message of the request's result, which begins with `failure`."""
    log.error("request %s: %s: %s", request.id, failure, error, exc_info=error)
    return f"{failure}: {error}"


class Admission:
    """Starts waiting requests: gives each its place in memory."""

    def __init__(self, lifecycle: Lifecycle, memory: Memory, max_num_seqs: int) -> None:
        """At most `max_num_seqs` canvases run at a time; clients with less than their share may exceed that."""
        self._lifecycle = lifecycle
        self._memory = memory
        self._max_canvases = max_num_seqs

    def admit(self, now: float) -> None:
        """Begin waiting requests in the order of their turns at the time `now`, while there are slots and pages.

        A request that waits for a page lets others begin before it. Requests whose canvas has grown come first, and
        nothing else begins while one of them waits for pages. They hold no pages meanwhile, so every running request
        can go on to its end, or to its own next block.
        """
        if not all(self._resume(pending) for pending in list(self._lifecycle.growing)):
            return
        waiting = self._lifecycle.waiting
        skipped = Counter[Owner]()
        while len(waiting) and (pending := waiting.first(now, skipped)) is not None:
            if not self._has_slot(pending) or not self._try_begin(pending, skipped):
                return

    def _resume(self, pending: PendingRequest) -> bool:
        """Resume a request whose canvas has grown, or end it with its error. Returns False if it waits for pages."""
        # A request that runs alone after a failure of the engine has to end first.
        if any(running.pending.starts > 1 for running in self._lifecycle.requests()):
            return False
        return self._try_begin(pending, Counter())

    def _try_begin(self, pending: PendingRequest, skipped: Counter[Owner]) -> bool:
        """Begin a request, end it with its error, or count it in `skipped`. Returns False if memory has no room."""
        while True:
            decision = self._lifecycle.attempt(pending, lambda: self._memory.plan(pending), POLICY_FAILED)
            match decision:
                case NoRoom():
                    if self._memory.evict_one(decision):
                        continue
                    return False
                case Placement():
                    self._begin(pending, decision)
                case AwaitsPage():
                    skipped[pending.request.owner] += 1
            return True

    def _has_slot(self, pending: PendingRequest) -> bool:
        """Whether the limit of canvases lets a request begin."""
        running = self._lifecycle.requests()
        canvas_count = sum(len(member.canvases) for member in running)
        if not canvas_count:
            return True
        # After a failure of the engine, requests that ran then run one at a time.
        if pending.starts > 0 or any(member.pending.starts > 1 for member in running):
            return False
        if canvas_count + pending.canvas_count <= self._max_canvases:
            return True
        waiting = self._lifecycle.waiting
        if not waiting.may_exceed(pending, canvas_count, self._max_canvases):
            return False
        return waiting.has_several_clients or self._memory.has_spare_canvas(pending)

    def _begin(self, pending: PendingRequest, placement: Placement) -> None:
        """Give a waiting request its place, and start the pass of its prefix if needed. On errors the request ends."""
        predecessor = self._lifecycle.growing.get(pending)
        running = self._lifecycle.attempt(
            pending, lambda: self._memory.place(pending, placement, predecessor), "it could not begin"
        )
        if running is None:
            return
        self._lifecycle.begin(running)
        lease = running.claim.lease
        if lease is not None and not lease.hit and not lease.entry.ready:
            self._lifecycle.add(PrefixPass(lease.entry, self._memory.store, self._memory.model_config.layers, running))

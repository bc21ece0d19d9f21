"""The life of requests, from arrival to result: which wait, which run, and how each ends."""

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from remask.engine.faults import failure, poisons
from remask.engine.member import Batch, Member
from remask.engine.memory import Memory
from remask.engine.observer import Observers
from remask.engine.pending import PendingRequest
from remask.engine.prefix_pass import PrefixPass
from remask.engine.refreshes import RefreshWatch
from remask.engine.runner import Runner
from remask.engine.running import RunningRequest, Scores
from remask.engine.scheduler import Scheduler, StepLimits
from remask.engine.stats import EngineStats
from remask.engine.turns import Turns
from remask.request.result import Event, FinishReason, Result
from remask.store.entry import PrefixEntry

T = TypeVar("T")
Args = TypeVarTuple("Args")

SETTLING = "its tokens could not be settled"
PREFIX = "the pass of its shared prefix failed"
LOST = "the engine failed while it ran"
MAX_STARTS = 2  # of one request, where the engine fails while it runs


class Lifecycle:
    """Holds the requests of an engine, and ends them. Members of passes know it as their `Loop`.

    Attributes:
        memory: their K/V pages.
        observers: observers of their passes, and the runner.
        stats: the engine's counters.
        waiting: requests that have not begun.
        growing: requests whose canvas has outgrown its place, in the order in which they did. They hold no memory.
        running: the scheduler of the running members.
        refreshes: knows which refreshes are heavy.
        ids: ids of requests whose results are still to be reported.
        events: events that are still to be reported.
        at_work: requests that are being worked on in this step; other threads may read it.
        grown: a member has begun since the peak of memory was last measured.
    """

    def __init__(self, memory: Memory, observers: Observers, limits: StepLimits, stats: EngineStats) -> None:
        """`limits` are those of a step."""
        self.memory, self.observers, self.stats = memory, observers, stats
        self.waiting = Turns()
        self.growing: dict[PendingRequest, RunningRequest] = {}
        self.running: Scheduler[Member] = Scheduler(limits)
        self.refreshes = RefreshWatch()
        self.ids: set[str] = set()
        self._timed: set[str] = set()  # of these, those with a deadline
        self.events: list[Event] = []
        self.at_work: Sequence[RunningRequest | PendingRequest] = ()
        self.grown = False

    @property
    def runner(self) -> Runner:
        """What runs passes on the device."""
        return self.observers.runner

    @property
    def idle(self) -> bool:
        """Whether no request waits and none runs."""
        return not (self.waits or self.running.items)

    @property
    def waits(self) -> bool:
        """Whether any request waits for a place."""
        return bool(self.waiting.count or self.growing)

    def requests(self) -> list[RunningRequest]:
        """The requests among the members."""
        return Batch.of(self.running).requests

    def unfinished(self) -> list[RunningRequest]:
        """Running requests whose results are still to be reported."""
        return [running for running in self.requests() if not running.closing]

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request that has arrived."""
        self.waiting.add(pending)
        self.ids.add(pending.request.id)
        if pending.request.deadline_s is not None:
            self._timed.add(pending.request.id)

    def begin(self, running: RunningRequest) -> None:
        """Start a request that has waited, or let one go on whose canvas has grown."""
        pending = running.pending
        self.waiting.hold(pending)
        self.add(running)
        if self.growing.pop(pending, None) is not None:
            return
        self.waiting.remove(pending)
        pending.starts += 1
        if not pending.begun:
            pending.begun = True
            self.events.append(Event(pending.request.id, queued_s=pending.elapsed_s))

    def add(self, member: Member) -> None:
        """Add a member to the passes."""
        self.running.add(member, member.owner, member.canvases)
        self.grown = True

    def leave(self, work: PrefixPass) -> None:
        """Remove a prefix-only pass."""
        self.running.remove(work)

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed."""
        if not self._timed:
            return
        for pending in [*self.waiting, *self.growing]:
            if _late(pending, now):
                self.end_waiting(pending, "timeout")
        for running in self.unfinished():
            if _late(running.pending, now):
                self.end(running, "timeout")

    def cancel(self, request_id: str) -> bool:
        """End a request; False for an unknown id."""
        for pending in [*self.waiting, *self.growing]:
            if pending.request.id == request_id:
                self.end_waiting(pending, "cancelled")
                return True
        for running in self.unfinished():
            if running.request.id == request_id:
                self.end(running, "cancelled")
                return True
        return False

    def start_over(self, error: Exception) -> None:
        """Queue running requests again, because memory was emptied after `error`.

        Requests that have reported something, or began too often, end with the error.
        """
        begun, self.at_work = self.unfinished(), ()
        self.stats.recoveries += 1
        self.running = Scheduler(self.running.limits)
        self.waiting.nobody_holds()
        self.refreshes = RefreshWatch()
        for running in begun:
            if running.record.reported or running.pending.starts >= MAX_STARTS:
                self._report(running.result("error", failure(running.request, error, LOST)))
            else:
                self.waiting.add(running.pending)

    def attempt(self, pending: PendingRequest, act: Callable[[], T], what: str) -> T | None:
        """Return what `act` returns. None where it raised: `pending` has ended with the error, which `what` describes.

        Raises errors of the device or of the engine's memory, at most `MAX_STARTS` times for one request.
        """
        self.at_work = (pending,)
        try:
            return act()
        # Policies and models may be foreign code: what they raise for one request must end no other.
        except Exception as error:
            pending.starts += poisons(error)
            if poisons(error) and pending.starts < MAX_STARTS:
                raise
            self.end_waiting(pending, "error", failure(pending.request, error, what))
            return None

    def guarded(self, running: RunningRequest, what: str, act: Callable[[*Args], object], *args: *Args) -> bool:
        """Run `act`, which concerns one request only. False where it raised: then the request has ended with the error.

        `what` describes the error.
        """
        self.at_work = (running,)
        try:
            act(*args)
        # Policies and models may be foreign code: what they raise for one request must end no other.
        except Exception as error:
            if poisons(error):
                raise
            self.fail(running, error, what)
            return False
        return True

    def move(self, running: RunningRequest) -> None:
        """Copy the stored parts that a request reads at other positions. Done before its first pass."""
        self.runner.move(running.claim.moves)
        running.claim.moves.clear()

    def settle(self, running: RunningRequest, scores: Scores) -> None:
        """Transfer the predictions of a request's pass, report them, and end the request if it is complete."""
        if self.guarded(running, SETTLING, self._apply, running, scores):
            if running.closing:
                self._release(running)
            elif running.end.reason is not None:
                self.end(running, running.end.reason)
            elif running.decoder.finished and running.pending.decoding.grows:
                self.grow(running)

    def grow(self, running: RunningRequest) -> None:
        """Let a request wait for the place of a longer canvas. Its tokens are the host's, and all else is freed."""
        pending, canvases = running.pending, [branch.canvas for branch in running.branches]
        pending.decoding = pending.decoding.grown(canvases, running.decoder.step)
        self._release(running)
        self.growing[pending] = running

    def end_waiting(self, pending: PendingRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a request that waits, to begin or to go on."""
        before = self.growing.pop(pending, None)
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

    def fail(self, running: RunningRequest, error: Exception, what: str) -> None:
        """End a running request with `error`, which `what` describes."""
        self.end(running, "error", failure(running.request, error, what))

    def fail_readers(self, entry: PrefixEntry, error: Exception) -> None:
        """End the requests that lease `entry`, whose pass failed."""
        for running in self.requests():
            if any(lease.entry is entry for lease in running.claim.leases):
                self.fail(running, error, PREFIX)

    def _apply(self, running: RunningRequest, scores: Scores) -> None:
        """Transfer the predictions of a request's pass, and report them."""
        stats, tally = self.stats, running.tally
        if tally.forwards:  # its pass was not counted before, as one with drafts
            for observer in self.observers.attached:
                observer.settling(running)
            if self.running.limits.max_refreshes is not None:
                self.refreshes.ran(running)
        stats.refreshes += tally.refreshes
        stats.prefix_refreshes += tally.refreshes_prefix
        stats.row_layers_saved += tally.saved
        hook = running.plan.hook
        if hook is not None and hook.releases_inputs:
            self.memory.forget_inputs(running)
        transfer = running.apply(scores)
        if running.closing:
            return
        name = running.request.id
        before = len(self.events)
        for reader in running.readers:
            self.events += reader.events(name)
        settled = running.end.newly_settled()
        running.end.check(running.pending.decoding, running.decoder)
        if transfer is not None or settled:
            self.events.append(Event(name, transfer=transfer, settled=settled))
        if len(self.events) > before:
            running.record.reported = True

    def _report(self, result: Result) -> None:
        self.events.append(Event(result.id, result=result))
        self.ids.discard(result.id)
        self._timed.discard(result.id)

    def _release(self, running: RunningRequest) -> None:
        self.refreshes.forget(running)
        self.running.remove(running)
        self.waiting.let_go(running.pending)
        self.runner.forget()  # layouts with this request are not used again
        self.memory.free(running)
        running.released = True


def _late(pending: PendingRequest, now: float) -> bool:
    limit = pending.request.deadline_s
    return limit is not None and now - pending.arrived >= limit

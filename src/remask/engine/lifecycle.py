"""Requests from their arrival to their result: who waits, who runs, and how each of them ends."""

from collections.abc import Callable
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
    """Holds the requests of an engine, and ends them. It is the `Loop` of the members of passes.

    Attributes:
        memory: where they have their pages.
        observers: who watches their passes, and what runs these.
        stats: the engine's counters.
        waiting: requests that have not begun.
        running: the members of passes, and whose turn it is.
        refreshes: which of their refreshes are heavy.
        ids: names of requests whose results are still to be reported.
        events: what is still to be reported.
        at_work: requests that are being worked on; other threads may read it.
        grown: something has begun since that was last looked at.
    """

    def __init__(self, memory: Memory, observers: Observers, limits: StepLimits) -> None:
        """`limits` are those of a step."""
        self.memory, self.observers = memory, observers
        self.stats = EngineStats()
        self.waiting = Turns()
        self.running: Scheduler[Member] = Scheduler(limits)
        self.refreshes = RefreshWatch()
        self.ids: set[str] = set()
        self._timed: set[str] = set()  # of these, those with a deadline
        self.events: list[Event] = []
        self.at_work: tuple[str, ...] = ()
        self.grown = False

    @property
    def runner(self) -> Runner:
        """What runs passes on the device."""
        return self.observers.runner

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not (self.waiting.count or len(self.running))

    def requests(self) -> list[RunningRequest]:
        """The requests among the members."""
        return Batch.of(self.running).requests

    def unfinished(self) -> list[RunningRequest]:
        """Running requests whose results are still to be reported."""
        return [running for running in self.requests() if not running.closing]

    def submit(self, pending: PendingRequest) -> None:
        """Let a request wait that has arrived."""
        self.waiting.add(pending)
        self.ids.add(pending.request.id)
        if pending.request.deadline_s is not None:
            self._timed.add(pending.request.id)

    def begin(self, running: RunningRequest) -> None:
        """Let a request run that has waited."""
        pending = running.pending
        self.waiting.remove(pending)
        self.waiting.hold(pending)
        pending.starts += 1
        self.add(running)
        if not pending.begun:
            pending.begun = True
            self.events.append(Event(pending.request.id, queued_s=pending.elapsed_s))

    def add(self, member: Member) -> None:
        """Let a member take part in passes."""
        self.running.add(member, member.owner, member.canvases)
        self.grown = True

    def leave(self, work: PrefixPass) -> None:
        """Let a prefix-only pass take part no more."""
        self.running.remove(work)

    def expire(self, now: float) -> None:
        """End what has run out of time."""
        if not self._timed:
            return
        for pending in list(self.waiting):
            if _late(pending, now):
                self.end_waiting(pending, "timeout")
        for running in self.unfinished():
            if _late(running.pending, now):
                self.end(running, "timeout")

    def cancel(self, request_id: str) -> bool:
        """End a request; False for an unknown id."""
        for pending in self.waiting:
            if pending.request.id == request_id:
                self.end_waiting(pending, "cancelled")
                return True
        for running in self.unfinished():
            if running.request.id == request_id:
                self.end(running, "cancelled")
                return True
        return False

    def start_over(self, error: Exception) -> None:
        """Let what ran wait again, as `error` has emptied the memory.

        What reported something or began too often ends.
        """
        begun = self.unfinished()
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
        """What `act` returns. None where it raised: then `pending` has ended with the error, which `what` describes.

        Raises an error of the device or of the engine's memory, which a request meets `MAX_STARTS` times at most.
        """
        self.at_work = (pending.request.id,)
        try:
            return act()
        # Policies and models may be anybody's code: what they raise for one request ends no other.
        except Exception as error:
            pending.starts += poisons(error)
            if poisons(error) and pending.starts < MAX_STARTS:
                raise
            self.end_waiting(pending, "error", failure(pending.request, error, what))
            return None

    def guarded(self, running: RunningRequest, what: str, act: Callable[[*Args], object], *args: *Args) -> bool:
        """Whether `act`, which is about one request, succeeded. Otherwise the request has ended with the error.

        `what` describes the error.
        """
        self.at_work = running.ids
        try:
            act(*args)
        # Policies and models may be anybody's code: what they raise for one request ends no other.
        except Exception as error:
            if poisons(error):
                raise
            self.fail(running, error, what)
            return False
        return True

    def move(self, running: RunningRequest) -> None:
        """Copy the stored parts that a request reads at other positions, before its first pass."""
        self.runner.move(running.claim.moves)
        running.claim.moves.clear()

    def settle(self, running: RunningRequest, scores: Scores) -> None:
        """Transfer what a request's pass predicted, report it, and end the request where its response is complete."""
        if self.guarded(running, SETTLING, self._apply, running, scores):
            if running.closing:
                self._release(running)
            elif running.end.reason is not None:
                self.end(running, running.end.reason)

    def end_waiting(self, pending: PendingRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a request that has not begun."""
        self.waiting.remove(pending)
        self._report(pending.result(reason, error))

    def end(self, running: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a running request. Free all that it owns once what others may read is complete."""
        if not running.closing:
            self._report(running.result(reason, error))
        if reason not in ("stop", "length") or not running.close():
            self._release(running)

    def fail(self, running: RunningRequest, error: Exception, what: str) -> None:
        """End a running request with `error`, which `what` describes."""
        self.end(running, "error", failure(running.request, error, what))

    def fail_readers(self, entry: PrefixEntry, error: Exception) -> None:
        """End the requests that lease `entry`, which cannot be computed."""
        for running in self.requests():
            if any(lease.entry is entry for lease in running.leases):
                self.fail(running, error, PREFIX)

    def take_events(self) -> list[Event]:
        """What was not reported yet."""
        events, self.events = self.events, []
        return events

    def _apply(self, running: RunningRequest, scores: Scores) -> None:
        """Transfer what a request's pass predicted, and report it."""
        if running.tally.forwards:
            self._count(running)
        transfer = running.apply(scores)
        if running.closing:
            return
        name = running.request.id
        for reader in running.readers:
            for event in reader.events(name):
                self._tell(running, event)
        settled = running.end.newly_settled()
        running.end.check(running.pending.decoding, running.decoder)
        if transfer is not None or settled:
            self._tell(running, Event(name, transfer=transfer, settled=settled))

    def _count(self, running: RunningRequest) -> None:
        """Note the pass of a request, which has run and has not been applied."""
        for observer in self.observers.attached:
            observer.settling(running)
        stats, tally = self.stats, running.tally
        stats.refreshes += tally.refreshes
        stats.prefix_refreshes += tally.refreshes_prefix
        stats.row_layers_saved += tally.saved
        if self.running.limits.max_refreshes is not None:
            self.refreshes.ran(running)
        hook = running.plan.hook
        if hook is not None and hook.releases_inputs:
            self.memory.forget_inputs(running)

    def _tell(self, running: RunningRequest, event: Event) -> None:
        running.record.reported = True
        self.events.append(event)

    def _report(self, result: Result) -> None:
        self.events.append(Event(result.id, result=result))
        self.ids.discard(result.id)
        self._timed.discard(result.id)

    def _release(self, running: RunningRequest) -> None:
        self.refreshes.forget(running)
        self.running.remove(running)
        self.waiting.let_go(running.pending)
        self.runner.forget()  # passes with this request do not come again
        self.memory.free(running)
        running.released = True


def _late(pending: PendingRequest, now: float) -> bool:
    limit = pending.request.deadline_s
    return limit is not None and now - pending.arrived >= limit

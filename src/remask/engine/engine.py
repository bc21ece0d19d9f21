"""The engine: requests join and leave at any step; a step is one forward pass over all that take part."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeVar, TypeVarTuple

from torch import Tensor

from remask.core.meter import CacheMeter
from remask.core.pass_cost import CostMeter
from remask.core.request import Draft, FinishReason, Result, Transfer
from remask.engine.canvas_state import prefix_canvas
from remask.engine.check import check_request
from remask.engine.chunks import AuditPass, PrefixPass, SidePass
from remask.engine.config import DeviceDefaults, EngineConfig
from remask.engine.isolation import Batch, Fail, Member, Ran, exhausts, poisons, run_isolated, score_isolated
from remask.engine.limits import RequestLimits
from remask.engine.memory import Memory
from remask.engine.overlap import InFlight, next_steps
from remask.engine.pending import PendingRequest
from remask.engine.placement import AuditPlan, Decision, NoRoom, Placement
from remask.engine.proof import choose
from remask.engine.refreshes import RefreshWatch
from remask.engine.report import MemoryReport, report
from remask.engine.request import Owner, Request
from remask.engine.runner import Runner
from remask.engine.running import RunningRequest, Scores
from remask.engine.scheduler import Scheduler, StepLimits
from remask.engine.stops import Decode
from remask.engine.turns import Turns
from remask.errors import ConfigError
from remask.models.executors import attend, make_graphs
from remask.models.invariant import batch_invariant
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.store.pages import PageAllocator
from remask.store.prefix import Lease, PrefixStore

log = logging.getLogger(__name__)

T = TypeVar("T")
Args = TypeVarTuple("Args")

# Called with the requests of a pass and the hidden states of their predicted rows, [M, D].
Probe = Callable[[Sequence[RunningRequest], Tensor], None]

MAX_DEFAULT_LENGTH = 4096
POLICY, SETTLING = "its cache policy failed", "its tokens could not be settled"
MOVING = "its stored parts could not be copied"
MAX_STARTS = 2  # of one request, where the engine fails while it runs


@dataclass(slots=True)  # not frozen, as one is made for each step of each request
class Event:
    """What a step did to one request.

    `queued_s` is given when the request first begins: the seconds that it waited. `settled` holds the response tokens
    that have become final with no gap before them, so that they can be shown in order. They may reach beyond a stop;
    the tokens of the result do not.
    """

    id: str
    queued_s: float | None = None
    draft: Draft | None = None
    transfer: Transfer | None = None
    settled: tuple[int, ...] = ()
    result: Result | None = None


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    steps: int = 0
    step_seconds: float = 0.0  # within `step`
    step_cpu_seconds: float = 0.0  # CPU time of the calling thread within `step`, without helper threads
    row_layers: int = 0
    row_layers_saved: int = 0  # of the canvases in the passes that ran, those that the passes left out
    prefix_passes: int = 0
    prefix_row_layers: int = 0
    refreshes: int = 0  # passes of requests that filled or renewed what their policies cache
    prefix_refreshes: int = 0  # passes in which rows of a leased prefix were computed anew
    audits: int = 0  # of shared prefixes
    audit_row_layers: int = 0
    peak_memory_bytes: int = 0  # most K/V pages in use and hidden states held at the end of any step
    recoveries: int = 0  # times that the engine began again with empty memory
    queued_passes: int = 0  # passes that were queued before the one before them was read
    waited_passes: int = 0  # with `overlap`, passes that were read before the next one could be planned
    discarded_passes: int = 0  # speculative steps of requests that were not committed


class Engine:
    """One model, one pool of K/V pages, one prefix store, any number of requests under any policies.

    Not thread-safe: one thread calls `submit`, `add`, `cancel` and `step`. Any may call `check`.

    `clock` tells seconds. Arrivals, deadlines and the times of results are read from it.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        fingerprint: str,
        decode: Decode | None = None,
        defaults: DeviceDefaults | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """With the `defaults` of the model's device for what `config` leaves open.

        Raises `ConfigError` on settings that cannot be, and where what is asked for fails its proof (`engine.proof`).
        """
        shape = model.config
        self.choice = choice = choose(model, config, defaults)
        config = replace(config, graphs=choice.graphs, overlap=choice.overlap)
        executor = choice.executor
        if executor.name != "torch":  # which a model has of itself
            attend(model := copy(model), executor)
        if model.ranks.several:  # the other ranks' models may have had another engine before
            model.ranks.everywhere(attend, model, executor)
        self.model = model = batch_invariant(model) if config.batch_invariant else model
        self.config, self.decode, self.clock = config, decode, clock
        self.max_model_len = config.max_model_len or min(shape.max_length, MAX_DEFAULT_LENGTH)
        if self.max_model_len > shape.max_length:
            raise ConfigError(f"max_model_len={self.max_model_len} exceeds the model's {shape.max_length} positions")
        self.memory = Memory(model, config, self.max_model_len, fingerprint)
        self.limits = RequestLimits.of(config, self.max_model_len)
        self.graphs = make_graphs(model, self.memory.pool) if config.graphs else None
        # An observer may put a runner of its own here.
        self.runner = Runner(model, self.memory.pool, overlap=choice.overlap, graphs=self.graphs)
        self.stats = EngineStats()
        self.meter: CacheMeter | None = None  # an observer may put one here; it notes every pass of every request
        self.costs: CostMeter | None = None  # an observer may put one here; it notes the cost of every pass
        self.probe: Probe | None = (
            None  # an observer may put one here; it is called after every pass, before tokens change
        )
        self._flight: InFlight | None = None  # a pass that is queued, and was not read
        self._waiting = Turns()
        share = config.max_client_row_layers or self.max_model_len * shape.layers
        limits = StepLimits(
            config.max_row_layers, config.max_refreshes, config.max_num_seqs, share, self.memory.pass_rows
        )
        self._running: Scheduler[RunningRequest | SidePass] = Scheduler(limits)
        self._refreshes = RefreshWatch()
        self._ids: set[str] = set()
        self._ended: list[Event] = []
        self.at_work: tuple[str, ...] = ()  # requests that are being worked on; other threads may read it

    @property
    def busy(self) -> bool:
        """Whether any request waits, runs, or has a result that is still to be reported."""
        return bool(self._waiting or len(self._running) or self._ended)

    @property
    def running(self) -> int:
        """Canvases in memory."""
        return sum(len(item.branches) for item in self._running_requests())

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def pool(self) -> Pool:
        """The K/V memory."""
        return self.memory.pool

    @property
    def allocator(self) -> PageAllocator:
        """Who owns which page of it."""
        return self.memory.allocator

    @property
    def store(self) -> PrefixStore:
        """The shared prefixes that it holds."""
        return self.memory.store

    def check(self, request: Request) -> PendingRequest:
        """What `submit` takes for `request`. Queues nothing; any thread may call it.

        Raises `ConfigError` on a request that cannot run.
        """
        self._check_id(request.id)
        if self.config.batch_invariant and request.policy.traits.audits is not None:
            raise ConfigError(
                "depth='online' cannot stand beside batch_invariant: an answer depends on the depth that audits of "
                "earlier requests found; use a depth table or a number of layers"
            )
        self.memory.check_kept(request.policy)
        shape, longest = self.model.config, self.max_model_len
        return check_request(request, shape, longest, self.limits, self.decode, self.memory.page_keys)

    def submit(self, pending: PendingRequest) -> None:
        """Queue what `check` returned; the request arrives now. Raises `ConfigError` where its id is in use."""
        self._check_id(pending.request.id)
        pending.clock = self.clock
        pending.arrived = self.clock()
        self.memory.remember(pending)
        self._queue(pending)
        self._ids.add(pending.request.id)

    def add(self, request: Request) -> None:
        """Check and queue a request. Raises `ConfigError`, and queues nothing, on a request that cannot run."""
        self.submit(self.check(request))

    def cancel(self, request_id: str) -> bool:
        """End a request now; its pages and its lease are free before the next step. False for an unknown id."""
        for pending in self._waiting:
            if pending.request.id == request_id:
                self._end_waiting(pending, "cancelled")
                return True
        for running in self._unfinished():
            if running.request.id == request_id:
                self._end(running, "cancelled")
                return True
        return False

    def step(self) -> list[Event]:
        """Run one denoising step of all requests that fit in it, and admit those that can begin.

        With `overlap` the next one is queued too, before the tokens of this one are known, if all plans repeat.
        Requests past their deadlines end first. What fails on account of one request ends that request with its error.
        Raises what no request is to blame for; `recover` may help.
        """
        start, computed = time.perf_counter(), time.thread_time()
        self._expire()
        self._admit()
        flight = self._flight or self._launch(InFlight(), self._next({}), self._fail)
        self._flight = None
        queued = self._launch_next(flight)
        self._read(flight)
        if queued is not None:
            self._flight = self._committed(queued)
        for each in (flight, queued):
            if each is not None and each.trouble is not None:
                raise each.trouble
        if not (self._waiting or len(self._running)):
            self._flight = None
            self.runner.forget()
            self.check_integrity()  # before events are taken: what it raises loses none
        events, self._ended = self._ended, []
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.step_cpu_seconds += time.thread_time() - computed
        return events

    def recover(self, error: Exception) -> None:
        """Begin again with empty memory after `step` raised `error`. What waits keeps its place.

        Requests that ran and had reported nothing run again, one at a time. Those that had, and those that began
        `MAX_STARTS` times, end with the error. Raises `error` where that cannot help: where nothing ran that could have
        caused it, where the device stays lost, or where a process is lost that computes a part of the model.
        """
        # A pass over a prefix may run alone, and so may one that completes pages: nobody waits for either.
        if not len(self._running) and not poisons(error):
            raise error
        self.model.ranks.check()
        begun = self._unfinished()
        log.error("the engine begins again after an error: %s", error, exc_info=error)
        self.stats.recoveries += 1
        awaiting = self._waiting_of([audit.awaited_by for audit in self.memory.audits])
        self._running = Scheduler(self._running.limits)
        self._waiting.nobody_holds()
        self._refreshes = RefreshWatch()
        self._flight = None
        for running in begun:
            self._begin_again(running, error)
        for pending in awaiting:
            pending.starts += 1
            if pending.starts >= MAX_STARTS:
                self._end_waiting(pending, "error", _failure(pending.request, error, "the engine failed in its audit"))
        self.memory.reset()

    def memory_report(self, *, detail: bool = False) -> MemoryReport:
        """Who holds which pages now, and how many of their slots are of use; with `detail` page tables too."""
        return report(self.memory, self._running_requests(), detail=detail)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page is owned by a running request or a store entry, exactly once each.

        Called by `step` whenever the engine falls idle.
        """
        self.memory.check(self._running_requests())

    def _check_id(self, name: str) -> None:
        """Raise `ConfigError` for an id that is in use."""
        if name in self._ids:
            raise ConfigError(f"id {name!r} is in use by another request; ids must differ")

    def _running_requests(self) -> list[RunningRequest]:
        return [item for item in self._running if isinstance(item, RunningRequest)]

    def _unfinished(self) -> list[RunningRequest]:
        """Running requests whose results are still to be reported."""
        return [running for running in self._running_requests() if not running.closing]

    def _expire(self) -> None:
        """End what has run out of time."""
        now = self.clock()
        for pending in list(self._waiting):
            if _late(pending, now):
                self._end_waiting(pending, "timeout")
        for running in self._unfinished():
            if _late(running.pending, now):
                self._end(running, "timeout")

    def _admit(self) -> None:
        """Begin waiting requests in the order of their turns, as far as slots and pages go.

        A request that awaits a page of a running one lets others pass.
        """
        passed = Counter[Owner]()
        now = time.perf_counter()
        while len(self._waiting) and (pending := self._waiting.first(now, passed)) is not None:
            if not self._has_slot(pending):
                return
            decision = self._find_place(pending)
            if isinstance(decision, NoRoom):
                return
            if isinstance(decision, Placement):
                self._begin(pending, decision)
            elif decision is not None:
                passed[pending.request.owner] += 1
                if isinstance(decision, AuditPlan):
                    self._audit(pending, decision)

    def _has_slot(self, pending: PendingRequest) -> bool:
        """Whether a request may begin beside what runs, if there is memory."""
        canvases, most = self.running + len(self.memory.audits), self.config.max_num_seqs
        if not canvases:
            return True
        if self._apart(pending):
            return False
        return canvases + pending.canvases <= most or self._waiting.beyond(pending, canvases, most)

    def _begin(self, pending: PendingRequest, placement: Placement) -> None:
        """Give a waiting request its place. It ends with the error where it cannot begin."""
        running = self._tried(pending, lambda: self.memory.place(pending, placement), "it could not begin")
        if running is None:
            return
        self._waiting.remove(pending)
        self._waiting.hold(pending)
        pending.starts += 1
        owner = pending.request.owner
        self._running.add(running, owner, pending.canvases)
        if not pending.begun:
            pending.begun = True
            self._ended.append(Event(pending.request.id, queued_s=pending.elapsed_s))
        for lease in running.leases:
            self._bring(lease, owner)
        audit = placement.audit
        if audit is not None and audit.own is not None:
            self._running.add(self.memory.place_audit(pending, audit, awaited=False), owner)

    def _audit(self, pending: PendingRequest, plan: AuditPlan) -> None:
        """Begin an audit that a waiting request awaits. The request ends with the error where it cannot begin."""

        def place() -> AuditPass:
            return self.memory.place_audit(pending, plan, awaited=True)

        audit = self._tried(pending, place, "the audit of its prefix could not begin")
        if audit is not None:
            self._bring(audit.lease, pending.request.owner)
            self._running.add(audit, pending.request.owner)

    def _bring(self, lease: Lease, owner: Owner) -> None:
        """Queue the pass over the entry that was made for this lease, if one was."""
        if not lease.hit and not lease.entry.ready:
            branch, whole = prefix_canvas(lease.entry, self.model.config.layers)
            self._running.add(PrefixPass(entry=lease.entry, branch=branch, whole=whole), owner)

    def _apart(self, pending: PendingRequest) -> bool:
        """Whether `pending` may not run beside what runs: one of them was running when the engine failed."""
        return pending.starts > 0 or any(running.pending.starts > 1 for running in self._running_requests())

    def _queue(self, pending: PendingRequest) -> None:
        """Let a request wait for its turn."""
        self._waiting.add(pending)

    def _find_place(self, pending: PendingRequest) -> Decision | None:
        """Where a request can begin. What nobody reads gives way to it. None where its policy failed and it ended."""
        while True:
            decision = self._tried(pending, lambda: self.memory.plan(pending), POLICY)
            if decision is None:
                return None
            if not isinstance(decision, NoRoom) or not self.memory.give_way(decision):
                return decision

    def _tried(self, pending: PendingRequest, act: Callable[[], T], what: str) -> T | None:
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
            self._end_waiting(pending, "error", _failure(pending.request, error, what))
            return None

    def _launch(self, flight: InFlight, batch: Batch, fail: Fail) -> InFlight:
        """Run a pass over `batch`, and let what it predicts come to the host, as `flight`."""
        try:
            for ran in run_isolated(self.runner, batch, fail):
                if self.costs is not None:
                    self.costs.note([branch.passed(plan, self.config.batch_invariant) for branch, plan in ran.items])
                flight.parts.append((ran, score_isolated(self.runner, ran, fail)))
        # What was run before is read first.
        except Exception as error:
            flight.trouble = error
        return flight

    def _launch_next(self, flight: InFlight) -> InFlight | None:
        """Queue the pass after `flight`, which is still to be read. None where that is read first, or none follows."""
        if not self.config.overlap or self.runner.board is None or not flight.parts or flight.trouble is not None:
            return None
        steps = next_steps(flight) if self.probe is None and self.meter is None else None
        if steps is None:
            self.stats.waited_passes += 1
            return None
        batch = self._next(steps)
        if not batch.members:
            return None
        running = {step: running for running, step in steps.items() if step is not None}
        queued = InFlight({step: running[step] for step in batch.requests if step in running})

        def fail(member: Member, error: Exception) -> None:
            if isinstance(member, RunningRequest) and member in queued.steps:
                queued.failed[member] = error
            else:
                self._fail(member, error)

        self._launch(queued, batch, fail)
        if queued.trouble is not None:
            for step in queued.steps:
                queued.roll_back(step)
            return InFlight(trouble=queued.trouble)
        self.stats.queued_passes += 1
        return queued

    def _read(self, flight: InFlight) -> None:
        """Read a pass, and enter what it computed."""
        if self.probe is not None and not flight.steps:
            for ran, _ in flight.parts:
                self.probe(ran.batch.requests, ran.hidden)
        for ran, scores in flight.read():
            self._settle(ran, scores)

    def _committed(self, queued: InFlight) -> InFlight | None:
        """What was queued, after the pass before it was read, without the steps that are rolled back."""
        for step, running in queued.steps.items():
            committed = False

            def commit(step: RunningRequest = step) -> None:
                nonlocal committed
                committed = queued.commit(step)

            self._guarded(running, POLICY, commit)
            if not committed:
                self.stats.discarded_passes += 1
            elif step in queued.failed:
                self._fail(running, queued.failed[step])
        return queued if queued.passes or queued.requests() else None

    def _next(self, steps: Mapping[RunningRequest, RunningRequest | None]) -> Batch:
        """The work of the next pass, side by side where it reads the same leased prefix.

        Requests that have speculative `steps` take part with these; those with None take no part.
        """
        batch = Batch()
        planned: dict[Member, Member] = {}  # what can run, or its speculative step
        for item in list(self._running):
            if not item.ready:
                continue
            if not isinstance(item, RunningRequest):
                planned[item] = item
            elif item in steps:
                if (step := steps[item]) is not None:
                    planned[item] = step
            elif self._guarded(item, POLICY, item.items):
                planned[item] = item

        def cost(item: Member, left: int | None) -> int:
            member = planned[item]
            return member.cost if isinstance(member, RunningRequest) else member.offer(left)

        def refreshing(item: Member) -> bool:
            member = planned[item]
            return (
                isinstance(item, RunningRequest)
                and isinstance(member, RunningRequest)
                and self._refreshes.heavy(item, member)
            )

        def rows(item: Member) -> int:
            member = planned[item]
            return member.tally.rows if isinstance(member, RunningRequest) else member.rows

        for item in self._running.next(planned.__contains__, cost, refreshing, rows):
            member = planned[item]
            if not isinstance(member, RunningRequest):
                batch.passes.append(member)
            elif member is not item:
                member.admit()
                batch.requests.append(member)
            elif self._guarded(member, POLICY, member.admit) and (
                not member.moves or self._guarded(member, MOVING, self._move, member)
            ):
                batch.requests.append(member)
        batch.requests.sort(key=lambda running: running.branches[0].sharing)
        self.at_work = batch.ids
        if batch.passes:
            waiting = [running.request.id for running in self._running_requests() if not running.ready]
            self.at_work = (*batch.ids, *waiting)
        return batch

    def _move(self, running: RunningRequest) -> None:
        """Copy the stored parts that a request reads at other positions, before its first pass."""
        self.runner.move(running.moves)
        running.moves.clear()

    def _guarded(self, running: RunningRequest, what: str, act: Callable[[*Args], object], *args: *Args) -> bool:
        """Whether `act`, which is about one request, succeeded. Otherwise the request has ended with the error.

        `what` describes the error.
        """
        self.at_work = (running.request.id,)
        try:
            act(*args)
        # Policies and models may be anybody's code: what they raise for one request ends no other.
        except Exception as error:
            if poisons(error):
                raise
            self._end(running, "error", _failure(running.request, error, what))
            return False
        return True

    def _fail(self, member: Member, error: Exception) -> None:
        """End a request that cannot run, or the requests whose shared prefix cannot be computed."""
        if isinstance(member, RunningRequest):
            self._end(member, "error", _failure(member.request, error, "its pass failed"))
            return
        if isinstance(member, AuditPass):
            self._fail_audit(member, error)
            return
        self._running.remove(member)
        for running in self._running_requests():
            if any(lease.entry is member.entry for lease in running.leases):
                self._end(running, "error", _failure(running.request, error, "the pass of its shared prefix failed"))
        for audit in [audit for audit in self.memory.audits if audit.entry is member.entry]:
            self._fail_audit(audit, error)
        self.store.withdraw(member.entry)

    def _fail_audit(self, audit: AuditPass, error: Exception) -> None:
        """Give up an audit, and end the request that awaits it."""
        self._running.remove(audit)
        self.memory.end_audit(audit)
        log.error("an audit of a prefix of %d tokens failed: %s", len(audit.entry), error, exc_info=error)
        for pending in self._waiting_of([audit.awaited_by]):
            self._end_waiting(pending, "error", _failure(pending.request, error, "the audit of its prefix failed"))

    def _waiting_of(self, requests: Sequence[PendingRequest | None]) -> list[PendingRequest]:
        """Those of `requests` that still wait."""
        return [pending for pending in self._waiting if any(pending is each for each in requests)]

    def _begin_again(self, running: RunningRequest, error: Exception) -> None:
        """Queue a request that lost its place, or end it where it has reported something or began too often."""
        if running.closing:
            return
        if running.reported or running.pending.starts >= MAX_STARTS:
            self._report(running.result("error", _failure(running.request, error, "the engine failed while it ran")))
        else:
            self._queue(running.pending)

    def _settle(self, ran: Ran, scores: Sequence[tuple[RunningRequest, Scores]]) -> None:
        """Enter what a pass computed into the store and the requests; `scores` are of those that could be read."""
        batch = ran.batch
        self.stats.steps += 1
        self.stats.row_layers += sum(plan.cost for _, plan in ran.items)
        self.stats.peak_memory_bytes = max(self.stats.peak_memory_bytes, self.memory.bytes_used)
        for work in batch.passes:
            if isinstance(work, AuditPass):
                self.stats.audit_row_layers += work.plan.cost
            else:
                self.stats.prefix_row_layers += work.plan.cost
            work.advance()
            if work.finished:
                self._finish(work)
        for running, predicted in scores:
            if self._guarded(running, SETTLING, self._apply, running, predicted):
                if running.closing:
                    self._release(running)
                elif running.end.reason is not None:
                    self._end(running, running.end.reason)

    def _finish(self, work: SidePass) -> None:
        """Make a prefix readable whose pass is done, or enter what an audit found."""
        if isinstance(work, AuditPass):
            try:
                similarity = self.runner.similarity(work)
            except Exception as error:
                if poisons(error) or exhausts(error):
                    raise
                self._fail_audit(work, error)
                return
            self.memory.end_audit(work, similarity)
            self.stats.audits += 1
        else:
            self.store.publish(work.entry)
            self.stats.prefix_passes += 1
        self._running.remove(work)

    def _apply(self, running: RunningRequest, scores: Scores) -> None:
        """Transfer what a request's pass predicted, and report it."""
        if self.meter is not None:
            for branch, plan in running.items():
                self.meter.note(branch.ledger, plan)
        stats, tally, request = self.stats, running.tally, running.request
        stats.refreshes += tally.refreshes
        stats.prefix_refreshes += tally.refreshes_prefix
        stats.row_layers_saved += tally.saved
        if self.config.max_refreshes is not None:
            self._refreshes.ran(running)
        if running.plan.weigh is not None:
            self.memory.forget_inputs(running)
        scores = running.constrained(scores)
        drafts = request.drafts and not running.plan.fills and not running.closing
        draft = running.draft(scores.tokens, scores.confidence) if drafts else None
        transfer = running.apply(scores)
        if running.closing:
            return
        if draft is not None:
            self._tell(running, Event(request.id, draft=draft))
        settled = running.end.newly_settled()
        running.end.check(running.pending.decoding, running.decoder)
        if transfer is not None or settled:
            self._tell(running, Event(request.id, transfer=transfer, settled=settled))

    def _tell(self, running: RunningRequest, event: Event) -> None:
        running.reported = True
        self._ended.append(event)

    def _end_waiting(self, pending: PendingRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a request that has not begun."""
        self._waiting.remove(pending)
        self._report(pending.result(reason, error))

    def _end(self, running: RunningRequest, reason: FinishReason, error: str | None = None) -> None:
        """Report the end of a running request. Free all that it owns once what others may read is complete."""
        if not running.closing:
            self._report(running.result(reason, error))
        if reason not in ("stop", "length") or not running.close():
            self._release(running)

    def _report(self, result: Result) -> None:
        self._ended.append(Event(result.id, result=result))
        self._ids.discard(result.id)

    def _release(self, running: RunningRequest) -> None:
        self._refreshes.forget(running)
        self._running.remove(running)
        self._waiting.let_go(running.pending)
        self.runner.forget()  # passes with this request do not come again
        self.memory.free(running)
        running.released = True


def _late(pending: PendingRequest, now: float) -> bool:
    limit = pending.request.deadline_s
    return limit is not None and now - pending.arrived >= limit


def _failure(request: Request, error: Exception, what: str) -> str:
    log.error("request %s: %s: %s", request.id, what, error, exc_info=error)
    return f"{what}: {error}"

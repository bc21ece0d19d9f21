"""The engine: requests join and leave at any step; a step is one forward pass over the requests that take part."""

import logging
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import TypeVar

from remask.engine.admission import Admission
from remask.engine.check import check_request
from remask.engine.config import DeviceDefaults, EngineConfig
from remask.engine.faults import poisons
from remask.engine.isolation import Fail, LaunchedPass, run_isolated, score_isolated
from remask.engine.lifecycle import Lifecycle
from remask.engine.limits import RequestLimits
from remask.engine.member import Batch, Member
from remask.engine.memory import Memory
from remask.engine.observer import EngineObserver, Observers
from remask.engine.overlap import QueuedPass, next_steps
from remask.engine.pending import PendingRequest
from remask.engine.proof import choose
from remask.engine.report import MemoryReport, report
from remask.engine.request import Request
from remask.engine.runner import Runner
from remask.engine.running import POLICY, RunningRequest
from remask.engine.scheduler import StepLimits
from remask.engine.stats import EngineStats
from remask.errors import ConfigError
from remask.model.executors import attend, make_graphs
from remask.model.invariant import batch_invariant
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.request.result import Event
from remask.store.pages import PageAllocator
from remask.store.prefix import PrefixStore
from remask.text.stops import Decode

log = logging.getLogger(__name__)

MAX_DEFAULT_LENGTH = 4096

L = TypeVar("L", bound=LaunchedPass)


class Engine:
    """One model, one pool of K/V pages, one prefix store, and any number of requests under any policies.

    Not thread-safe: one thread calls `submit`, `add`, `cancel` and `step`. Any may call `check`.

    `clock` returns seconds. Arrivals, deadlines and the times of results are read from it.

    Attributes:
        stats: counters since the engine was made.
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
        """`defaults` are those of the device, for settings that `config` leaves open.

        Raises `ConfigError` on bad settings, and where an executor that was asked for fails its proof (`engine.proof`).
        """
        shape = model.config
        self.choice = choice = choose(model, config, defaults)
        config = replace(config, graphs=choice.graphs, overlap=choice.overlap)
        executor = choice.executor
        if executor.name != "torch":  # the default of a model
            attend(model := copy(model), executor)
        if model.ranks.several:  # the other ranks' models may have had another engine before
            model.ranks.everywhere(attend, model, executor)
        self.model = model = batch_invariant(model) if config.batch_invariant else model
        self.config, self.decode, self.clock = config, decode, clock
        longest = config.max_model_len or min(shape.max_length, MAX_DEFAULT_LENGTH)
        if longest > shape.max_length:
            raise ConfigError(f"max_model_len={longest} exceeds the model's {shape.max_length} positions")
        self.memory = Memory(model, config, longest, fingerprint)
        self.max_model_len = self.memory.max_model_len
        self.limits = RequestLimits.of(config, self.max_model_len)
        self.graphs = make_graphs(model, self.memory.pool) if config.graphs else None
        self._queued: QueuedPass | None = None  # a pass that is queued and not read yet
        share = config.max_client_row_layers or self.max_model_len * shape.layers
        limits = StepLimits(
            config.max_row_layers, config.max_refreshes, config.max_num_seqs, share, self.memory.pass_rows
        )
        runner = Runner(model, self.memory.pool, overlap=choice.overlap, graphs=self.graphs)
        self._observers = Observers(runner, model)
        self.stats = EngineStats()
        self._lifecycle = Lifecycle(self.memory, self._observers, limits, self.stats)
        self._admission = Admission(self._lifecycle, self.memory, config.max_num_seqs)

    @property
    def runner(self) -> Runner:
        """What runs passes on the device."""
        return self._observers.runner

    @property
    def at_work(self) -> tuple[str, ...]:
        """Ids of the requests that the current step works on. Any thread may read it."""
        return tuple(each.request.id for each in self._lifecycle.at_work)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or an event is still to be reported."""
        return not self._lifecycle.idle or bool(self._lifecycle.events)

    @property
    def running(self) -> int:
        """Canvases of requests that have begun, those between two blocks of a growing canvas included."""
        lifecycle = self._lifecycle
        return sum(running.canvases for running in [*lifecycle.requests(), *lifecycle.growing.values()])

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._lifecycle.waiting)

    @property
    def pool(self) -> Pool:
        """The K/V memory."""
        return self.memory.pool

    @property
    def allocator(self) -> PageAllocator:
        """The allocator of its pages."""
        return self.memory.allocator

    @property
    def store(self) -> PrefixStore:
        """The store of shared prefixes."""
        return self.memory.store

    def check(self, request: Request) -> PendingRequest:
        """Check `request` and return what `submit` takes. Queues nothing; any thread may call it.

        Raises `ConfigError` on a request that cannot run.
        """
        self._check_id(request.id)
        self.memory.check_kept(request.policy)
        shape, longest = self.model.config, self.max_model_len
        return check_request(request, shape, longest, self.limits, self.decode, self.memory.page_keys)

    def submit(self, pending: PendingRequest) -> None:
        """Queue what `check` returned; the request arrives now. Raises `ConfigError` where its id is in use."""
        self._check_id(pending.request.id)
        pending.clock = self.clock
        pending.arrived = self.clock()
        self.memory.remember(pending)
        self._lifecycle.submit(pending)

    def add(self, request: Request) -> None:
        """Check and queue a request. Raises `ConfigError`, and queues nothing, on a request that cannot run."""
        self.submit(self.check(request))

    def cancel(self, request_id: str) -> bool:
        """End a request now; its pages and its lease are free before the next step. False for an unknown id."""
        return self._lifecycle.cancel(request_id)

    def attach(self, observer: EngineObserver) -> None:
        """Call `observer` for every pass that is launched from now on. Any number may be attached."""
        self._observers.attach(observer)

    def detach(self, observer: EngineObserver) -> None:
        """Stop calling `observer`. Raises `ValueError` where it is not attached."""
        self._observers.detach(observer)

    def step(self) -> list[Event]:
        """Admit waiting requests, and run one denoising step of all requests that fit in it.

        With `overlap` the next step is queued before the tokens of this one are known, if all plans repeat. Requests
        past their deadlines end first. An error that one request causes ends that request only. Other errors are
        raised; `recover` may help.
        """
        start, computed = time.perf_counter(), time.thread_time()
        self._lifecycle.expire(self.clock())
        if self._lifecycle.waits:
            self._admit()
        launched = self._queued or self._launch(LaunchedPass(), self._schedule({}), self._fail)
        self._queued = None
        queued = self._launch_next(launched) if self.config.overlap else None
        self._read(launched)
        if queued is not None:
            self._queued = self._commit(queued)
        for each in (launched, queued):
            if each is not None and each.trouble is not None:
                raise each.trouble
        if self._lifecycle.idle:
            self._queued = None
            self._observers.runner.forget()
            self.check_integrity()  # before events are taken, so that an error loses none
        events, self._lifecycle.events = self._lifecycle.events, []
        self._lifecycle.at_work = ()
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.step_cpu_seconds += time.thread_time() - computed
        return events

    def recover(self, error: Exception) -> None:
        """Restart with empty memory after `step` raised `error`. Waiting requests keep their places.

        Running requests that have reported nothing run again, one at a time. The others, and those that began
        `MAX_STARTS` times, end with the error. Raises `error` where a restart cannot help: nothing was running, the
        device is lost, or a process of a parallel model is lost.
        """
        # A prefix-only pass or a closing pass may run alone, and no request waits for either.
        if not len(self._lifecycle.running) and not poisons(error):
            raise error
        self.model.ranks.check()
        log.error("the engine begins again after an error: %s", error, exc_info=error)
        self._queued = None
        self._lifecycle.start_over(error)
        self.memory.reset()

    def memory_report(self, *, detail: bool = False) -> MemoryReport:
        """Which requests and entries hold which pages, and how full these are; with `detail` page tables too."""
        return report(self.memory, self._lifecycle.requests(), detail=detail)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page is owned by a running request or a store entry, exactly once each.

        Called by `step` whenever the engine falls idle.
        """
        self.memory.check(self._lifecycle.requests())

    def _check_id(self, name: str) -> None:
        """Raise `ConfigError` for an id that is in use."""
        if name in self._lifecycle.ids:
            raise ConfigError(f"id {name!r} is in use by another request; ids must differ")

    def _admit(self) -> None:
        """Begin waiting requests while there are slots and pages for them."""
        self._admission.admit(self.clock())

    def _launch(self, launched: L, batch: Batch, fail: Fail) -> L:
        """Run a pass over `batch`, start copying its predictions to the host, and note both in `launched`."""
        try:
            runner = self._observers.runner
            for ran in run_isolated(runner, batch, fail):
                for observer in self._observers.attached:
                    observer.launched(ran)
                launched.parts.append((ran, score_isolated(runner, ran, fail)))
        # Parts that ran are read before the error is raised.
        except Exception as error:
            launched.trouble = error
        return launched

    def _launch_next(self, launched: LaunchedPass) -> QueuedPass | None:
        """Queue the pass after `launched`, which is not read yet. None: it must be read first, or nothing follows."""
        if self.runner.token_buffer is None or not launched.parts or launched.trouble is not None:
            return None
        steps = None if self._observers.wait else next_steps(launched)
        if steps is None:
            self.stats.waited_passes += 1
            return None
        batch = self._schedule(steps.planned)
        if not batch.members:
            return None
        origins = steps.origins
        queued = QueuedPass(steps={step: origins[step] for step in batch.requests if step in origins})

        def fail(member: Member, error: Exception) -> None:
            if member in queued.steps:
                queued.failed[member] = error
            else:
                self._fail(member, error)

        self._launch(queued, batch, fail)
        if queued.trouble is not None:
            for step in queued.steps:
                queued.roll_back(step)
            return QueuedPass(trouble=queued.trouble)
        self.stats.queued_passes += 1
        return queued

    def _read(self, launched: LaunchedPass) -> None:
        """Wait for a pass, and give its results to the store and the requests."""
        if self._observers.attached and not isinstance(launched, QueuedPass):
            for ran, _ in launched.parts:
                for observer in self._observers.attached:
                    observer.computed(ran)
        stats = self.stats
        if self._lifecycle.grown:  # only requests that begin claim memory
            self._lifecycle.grown = False
            stats.peak_memory_bytes = max(stats.peak_memory_bytes, self.memory.bytes_used)
        for ran, read in launched.read():
            stats.steps += 1
            for _, plan in ran.items:
                stats.row_layers += plan.spans.cost
            for member, scores in read:
                member.ran(self._lifecycle, scores)

    def _commit(self, queued: QueuedPass) -> QueuedPass | None:
        """Commit the steps of a queued pass, now that the pass before it is read; None where all are rolled back."""
        for step, running in queued.steps.items():
            committed = False

            def commit(step: RunningRequest = step) -> None:
                nonlocal committed
                committed = queued.commit(step)

            self._lifecycle.guarded(running, POLICY, commit)
            if not committed:
                self.stats.discarded_passes += 1
            elif step in queued.failed:
                self._fail(running, queued.failed[step])
        return queued if queued.passes or queued.requests() else None

    def _schedule(self, steps: Mapping[Member, RunningRequest | None]) -> Batch:
        """The batch of the next pass. Requests that read the same leased prefix are neighbours.

        A request in `steps` takes part with its speculative step; with None it takes no part.
        """
        lifecycle, batch = self._lifecycle, Batch()
        members = lifecycle.running.items
        self.memory.pace.running = len(members)
        planned: dict[Member, Member] = {}  # members that can run, with what runs: themselves or a speculative step
        for member in members:
            if not member.ready:
                continue
            if member in steps:
                step = steps[member]
                if step is not None:
                    planned[member] = step
            elif member.prepare(lifecycle):
                planned[member] = member

        def cost(member: Member, left: int | None) -> int:
            return planned[member].offer(left)

        def refreshing(member: Member) -> bool:
            return lifecycle.refreshes.heavy(member, planned[member])

        def rows(member: Member) -> int:
            return planned[member].tally.rows

        for member in lifecycle.running.next(planned.__contains__, cost, refreshing, rows):
            step = steps.get(member)
            if step is not None:
                step.admit()
                step.join(batch)
            else:
                member.enter(lifecycle, batch)
        if len(batch.requests) > 1:
            batch.requests.sort(key=lambda running: running.branches[0].sharing)
        lifecycle.at_work = batch.requests
        if batch.passes:
            waiting = [running for running in lifecycle.requests() if not running.ready]
            lifecycle.at_work = [*batch.requests, *waiting]
        return batch

    def _fail(self, member: Member, error: Exception) -> None:
        """End a member whose pass cannot run, and whatever depends on it."""
        member.failed(self._lifecycle, error)

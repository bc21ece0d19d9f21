"""The engine: requests join and leave at any step; a step is one forward pass over all that take part."""

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
        self._queued: QueuedPass | None = None  # a pass that is queued, and was not read
        share = config.max_client_row_layers or self.max_model_len * shape.layers
        limits = StepLimits(
            config.max_row_layers, config.max_refreshes, config.max_num_seqs, share, self.memory.pass_rows
        )
        runner = Runner(model, self.memory.pool, overlap=choice.overlap, graphs=self.graphs)
        self._observers = Observers(runner, model)
        self._lifecycle = Lifecycle(self.memory, self._observers, limits)
        self._admission = Admission(self._lifecycle, self.memory, config.max_num_seqs)

    @property
    def runner(self) -> Runner:
        """What runs passes on the device."""
        return self._observers.runner

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return self._lifecycle.stats

    @property
    def at_work(self) -> tuple[str, ...]:
        """Requests that are being worked on. Any thread may ask."""
        return self._lifecycle.at_work

    @property
    def busy(self) -> bool:
        """Whether any request waits, runs, or has a result that is still to be reported."""
        return not self._lifecycle.idle or bool(self._lifecycle.events)

    @property
    def running(self) -> int:
        """Canvases in memory."""
        return sum(running.canvases for running in self._lifecycle.requests())

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
        """Tell `observer` of the passes that are launched from now on, beside those that are attached already."""
        self._observers.attach(observer)

    def detach(self, observer: EngineObserver) -> None:
        """Tell `observer` of no pass any more. Raises `ValueError` where it is not attached."""
        self._observers.detach(observer)

    def step(self) -> list[Event]:
        """Run one denoising step of all requests that fit in it, and admit those that can begin.

        With `overlap` the next one is queued too, before the tokens of this one are known, if all plans repeat.
        Requests past their deadlines end first. What fails on account of one request ends that request with its error.
        Raises what no request is to blame for; `recover` may help.
        """
        start, computed = time.perf_counter(), time.thread_time()
        self._lifecycle.expire(self.clock())
        if self._lifecycle.waiting.count:
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
            self.runner.forget()
            self.check_integrity()  # before events are taken: what it raises loses none
        events = self._lifecycle.take_events()
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
        if not len(self._lifecycle.running) and not poisons(error):
            raise error
        self.model.ranks.check()
        log.error("the engine begins again after an error: %s", error, exc_info=error)
        self._queued = None
        self._lifecycle.start_over(error)
        self.memory.reset()

    def memory_report(self, *, detail: bool = False) -> MemoryReport:
        """Who holds which pages now, and how many of their slots are of use; with `detail` page tables too."""
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
        """Begin waiting requests, as far as slots and pages go."""
        self._admission.admit(self.clock())

    def _launch(self, launched: L, batch: Batch, fail: Fail) -> L:
        """Run a pass over `batch`, and let what it predicts come to the host, as `launched`."""
        try:
            for ran in run_isolated(self.runner, batch, fail):
                for observer in self._observers.attached:
                    observer.launched(ran)
                launched.parts.append((ran, score_isolated(self.runner, ran, fail)))
        # What was run before is read first.
        except Exception as error:
            launched.trouble = error
        return launched

    def _launch_next(self, launched: LaunchedPass) -> QueuedPass | None:
        """Queue the pass after `launched`, which is still to be read. None: that is read first, or none follows."""
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
        """Read a pass, and enter what it computed into the store and the requests."""
        if self._observers.attached and not isinstance(launched, QueuedPass):
            for ran, _ in launched.parts:
                for observer in self._observers.attached:
                    observer.computed(ran)
        stats = self.stats
        if self._lifecycle.grown:  # memory is claimed by what begins, and by nothing else
            self._lifecycle.grown = False
            stats.peak_memory_bytes = max(stats.peak_memory_bytes, self.memory.bytes_used)
        for ran, read in launched.read():
            stats.steps += 1
            for _, plan in ran.items:
                stats.row_layers += plan.spans.cost
            for member, scores in read:
                member.ran(self._lifecycle, scores)

    def _commit(self, queued: QueuedPass) -> QueuedPass | None:
        """What was queued, after the pass before it was read, without the steps that are rolled back."""
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
        """The work of the next pass, side by side where it reads the same leased prefix.

        Requests that have speculative `steps` take part with these; those with None take no part.
        """
        lifecycle, batch = self._lifecycle, Batch()
        self.memory.pace.running = len(lifecycle.running)
        planned: dict[Member, Member] = {}  # what can run, or its speculative step
        for member in list(lifecycle.running):
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
            return planned[member].widest

        for member in lifecycle.running.next(planned.__contains__, cost, refreshing, rows):
            step = steps.get(member)
            if step is not None:
                step.admit()
                step.join(batch)
            else:
                member.enter(lifecycle, batch)
        if len(batch.requests) > 1:
            batch.requests.sort(key=lambda running: running.branches[0].sharing)
        lifecycle.at_work = batch.ids
        if batch.passes:
            waiting = [running.request.id for running in lifecycle.requests() if not running.ready]
            lifecycle.at_work = (*batch.ids, *waiting)
        return batch

    def _fail(self, member: Member, error: Exception) -> None:
        """End a member that cannot run, with everything that cannot go on without it."""
        member.failed(self._lifecycle, error)

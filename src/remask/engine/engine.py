"""The engine: requests join and leave at any step; a step is one forward pass over all that take part."""

import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from remask.core.meter import CacheMeter
from remask.core.pass_cost import CostMeter
from remask.core.request import Draft, FinishReason, Result, Transfer
from remask.engine.canvas_state import prefix_canvas
from remask.engine.chunks import PrefixPass
from remask.engine.config import EngineConfig
from remask.engine.intake import make_job
from remask.engine.job import Decode, Job
from remask.engine.memory import Memory
from remask.engine.refreshes import RefreshWatch
from remask.engine.report import MemoryReport, report
from remask.engine.request import Request
from remask.engine.runner import Runner
from remask.engine.scheduler import Scheduler
from remask.errors import ConfigError
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.store.pages import PageAllocator
from remask.store.prefix import PrefixStore

log = logging.getLogger(__name__)

Probe = Callable[[Sequence[Job], Tensor], None]  # the jobs of a pass, and the hidden states of their predicted rows

MAX_DEFAULT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to one request.

    `queued_s`: it began, after that many seconds of waiting. `settled` are the response tokens that have become final
    with no gap before them, so that they can be shown in order; tokens after a stop may be among them, the result's are
    cut.
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
    step_cpu_seconds: float = 0.0  # of them, what the thread that calls it computed; helper threads are not counted
    row_layers: int = 0
    row_layers_saved: int = 0  # of the canvases in the passes that ran, what these left out
    prefix_passes: int = 0
    prefix_row_layers: int = 0
    refreshes: int = 0  # passes of requests that filled or renewed what their policies cache
    prefix_refreshes: int = 0  # passes in which rows of a leased prefix were computed anew
    peak_memory_bytes: int = 0  # most K/V pages in use and hidden states held at the end of any step


@dataclass(slots=True)
class _Batch:
    jobs: list[Job] = field(default_factory=list)
    passes: list[PrefixPass] = field(default_factory=list)


class Engine:
    """One model, one pool of K/V pages, one prefix store, any number of requests under any policies.

    Not thread-safe: one thread calls `submit`, `add`, `cancel` and `step`. Any may call `check`.
    """

    def __init__(
        self, model: Transformer, config: EngineConfig, fingerprint: str, decode: Decode | None = None
    ) -> None:
        self.model, self.config, self.decode = model, config, decode
        shape = model.config
        self.max_model_len = config.max_model_len or min(shape.max_length, MAX_DEFAULT_LENGTH)
        if self.max_model_len > shape.max_length:
            raise ConfigError(f"max_model_len={self.max_model_len} exceeds the model's {shape.max_length} positions")
        self.memory = Memory(model, config, self.max_model_len, fingerprint)
        self.runner = Runner(model, self.memory.pool)  # another one may be put here, which looks on
        self.stats = EngineStats()
        self.meter: CacheMeter | None = None  # where one is put here, it notes every pass of every request
        self.costs: CostMeter | None = None  # where one is put here, it notes what every pass costs
        self.probe: Probe | None = None  # where one is put here, it is called after every pass, before tokens change
        self._waiting: list[Job] = []  # in the order in which they begin
        self._running: Scheduler[Job | PrefixPass] = Scheduler(config.max_row_layers, config.max_refreshes)
        self._refreshes = RefreshWatch()
        self._ids: set[str] = set()
        self._ended: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, running, or has an end still to be told."""
        return bool(self._waiting or len(self._running) or self._ended)

    @property
    def running(self) -> int:
        """Canvases in memory."""
        return sum(len(item.branches) for item in self._running if isinstance(item, Job))

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

    def check(self, request: Request) -> Job:
        """What `submit` takes for `request`. Queues nothing; any thread may call it.

        Raises `ConfigError` on a request that cannot run.
        """
        self._check_id(request.id)
        return make_job(request, self.model.config, self.max_model_len, self.decode)

    def submit(self, job: Job) -> None:
        """Queue what `check` returned; the request arrives now. Raises `ConfigError` where its id is in use."""
        self._check_id(job.request.id)
        job.arrived = time.perf_counter()
        insort(self._waiting, job, key=lambda job: job.request.priority)
        self._ids.add(job.request.id)

    def add(self, request: Request) -> None:
        """Check and queue a request. Raises `ConfigError`, and queues nothing, on a request that cannot run."""
        self.submit(self.check(request))

    def cancel(self, request_id: str) -> bool:
        """End a request now; its pages and its lease are free before the next step. False for an unknown id."""
        for job in self._jobs():
            if job.request.id == request_id:
                self._end(job, "cancelled")
                return True
        return False

    def step(self) -> list[Event]:
        """Run one denoising step of all requests that fit in it, and admit those that can begin.

        Requests past their deadlines end first.
        """
        start, computed = time.perf_counter(), time.thread_time()
        self._expire()
        self._admit()
        batch = self._next()
        if batch.jobs or batch.passes:
            items = [(work.branch, work.plan) for work in batch.passes]
            items += [item for job in batch.jobs for item in job.items()]
            hidden, items = self.runner.run(items, batch.passes)
            if self.costs is not None:
                self.costs.note([branch.passed(plan) for branch, plan in items])
            if self.probe is not None:
                self.probe(batch.jobs, hidden)
            scores = self.runner.read(hidden, batch.jobs)
            ran = iter(items[len(batch.passes) :])
            for job in batch.jobs:
                job.ran([next(ran) for _ in job.items()])
            self._settle(batch, scores, sum(plan.cost for _, plan in items))
        events, self._ended = self._ended, []
        if not self.busy:
            self.check_integrity()
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.step_cpu_seconds += time.thread_time() - computed
        return events

    def memory_report(self) -> MemoryReport:
        """Who holds which pages now, and how many of their slots are of use."""
        return report(self.memory, (item for item in self._running if isinstance(item, Job)))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page is owned by a running request or a store entry, exactly once each.

        Called by `step` whenever the engine falls idle.
        """
        self.memory.check(item for item in self._running if isinstance(item, Job))

    def _check_id(self, name: str) -> None:
        if name in self._ids:
            raise ConfigError(f"id {name!r} is in use by another request; ids must differ")

    def _jobs(self) -> list[Job]:
        """All requests whose ends are still to be told, waiting and running."""
        running = [item for item in self._running if isinstance(item, Job) and not item.closing]
        return [*self._waiting, *running]

    def _expire(self) -> None:
        """End what has run out of time."""
        now = time.perf_counter()
        for job in self._jobs():
            limit = job.request.deadline_s
            if limit is not None and now - job.arrived >= limit:
                self._end(job, "timeout")

    def _admit(self) -> None:
        """Begin waiting requests by priority, then in order of arrival, as far as slots and pages go.

        One that awaits a page which a running request computes lets others pass.
        """
        for job in list(self._waiting):
            running = self.running
            if running and running + job.branches_needed > self.config.max_num_seqs:
                return
            placement = self.memory.place(job)
            if placement == "full":
                return
            if placement == "awaiting":
                continue
            self._waiting.remove(job)
            self._running.add(job)
            self._ended.append(Event(job.request.id, queued_s=time.perf_counter() - job.arrived))
            if job.lease is not None and not job.lease.hit:
                entry = job.lease.entry
                self._running.add(PrefixPass(entry, *prefix_canvas(entry, self.model.config.layers)))

    def _next(self) -> _Batch:
        """The work of the next step, side by side where it reads the same leased prefix."""
        batch = _Batch()
        for job in [item for item in self._running if isinstance(item, Job) and item.ready]:
            self._guarded(job, job.items)
        for item in self._running.next(_ready, _cost, self._refreshing):
            if isinstance(item, PrefixPass):
                batch.passes.append(item)
            elif self._guarded(item, item.admit):
                batch.jobs.append(item)
        batch.jobs.sort(key=lambda job: job.branches[0].sharing)
        return batch

    def _guarded(self, job: Job, act: Callable[[], object]) -> bool:
        """Whether `act`, which runs the job's policy, went well; else the job is ended with the defect as its error."""
        try:
            act()
        # A policy may be anybody's code: whatever it raises is the end of its own request and of no other.
        except Exception as error:
            log.error("request %s: its cache policy failed: %s", job.request.id, error, exc_info=True)
            self._end(job, "error", f"its cache policy failed: {error}")
            return False
        return True

    def _settle(
        self, batch: _Batch, scores: np.ndarray[tuple[int, int], np.dtype[np.float32]], row_layers: int
    ) -> None:
        self.stats.steps += 1
        self.stats.row_layers += row_layers
        self.stats.peak_memory_bytes = max(self.stats.peak_memory_bytes, self.memory.bytes_used)
        for work in batch.passes:
            self.stats.prefix_row_layers += work.plan.cost
            work.advance()
            if work.finished:
                self.store.publish(work.entry)
                self._running.remove(work)
                self.stats.prefix_passes += 1
        at = 0
        for job in batch.jobs:
            if self.meter is not None:
                for branch, plan in job.items():
                    self.meter.note(branch.ledger, plan)
            tokens, confidence = scores[:, at : at + job.predicted]
            at += job.predicted
            self.stats.refreshes += job.refreshes
            self.stats.prefix_refreshes += job.refreshes_prefix
            self.stats.row_layers_saved += job.saved
            self._refreshes.ran(job)
            if job.closing:
                job.apply(tokens.astype(np.int64), confidence)
                self._release(job)
                continue
            if job.request.drafts and not job.plan.fills:
                self._ended.append(Event(job.request.id, draft=job.draft(tokens, confidence)))
            transfer = job.apply(tokens.astype(np.int64), confidence)
            settled = job.newly_settled()
            if transfer is not None or settled:
                self._ended.append(Event(job.request.id, transfer=transfer, settled=settled))
            reason = job.ending()
            if reason is not None:
                self._end(job, reason)

    def _end(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """Tell the end of a request and free all that it owns, once what others may read is complete."""
        if not job.closing:
            self._ended.append(Event(job.request.id, result=job.result(reason, error)))
            self._ids.discard(job.request.id)
        if job in self._waiting:
            self._waiting.remove(job)
        elif reason not in ("stop", "length") or not job.close():
            self._release(job)

    def _release(self, job: Job) -> None:
        self._refreshes.forget(job)
        self._running.remove(job)
        self.memory.free(job)

    def _refreshing(self, item: Job | PrefixPass) -> bool:
        return isinstance(item, Job) and self._refreshes.heavy(item)


def _ready(item: Job | PrefixPass) -> bool:
    return isinstance(item, PrefixPass) or item.ready


def _cost(item: Job | PrefixPass, left: int | None) -> int:
    return item.offer(left) if isinstance(item, PrefixPass) else item.cost

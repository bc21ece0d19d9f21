"""The engine: requests join and leave at any step; a step is one forward pass over all that take part."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from remask.core.canvas import Canvas
from remask.core.ledger import Ledger
from remask.core.plan import Plan
from remask.core.request import FinishReason, Request, Result, Transfer, Usage
from remask.engine.branch import (
    Branch,
    leased_prefix,
    leased_tables,
    new_states,
    plain_table,
    prefix_branch,
)
from remask.engine.config import EngineConfig
from remask.engine.job import Decode, Job
from remask.engine.pack import pack
from remask.engine.read import read_rows
from remask.engine.scheduler import Scheduler
from remask.errors import ConfigError, IntegrityError
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.policies.base import CachePolicy, Circumstances
from remask.sampling.masked import MaskedDecoder
from remask.sampling.rules import resolve
from remask.store.pages import Extent, PageAllocator
from remask.store.prefix import Entry, Lease, PrefixStore

log = logging.getLogger(__name__)

MAX_DEFAULT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Event:
    """What a step did to one request."""

    id: str
    transfer: Transfer | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPass:
    """The prefix-only pass of a store entry, scheduled like any other work."""

    entry: Entry
    branch: Branch
    plan: Plan


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    steps: int = 0
    row_layers: int = 0
    prefix_passes: int = 0
    prefix_row_layers: int = 0
    peak_memory_bytes: int = 0  # most K/V pages in use and boundary states held at the end of any step


@dataclass(slots=True)
class _Batch:
    jobs: list[Job] = field(default_factory=list)
    passes: list[PrefixPass] = field(default_factory=list)


class Engine:
    """One model, one pool of K/V pages, one prefix store, any number of requests under any policies.

    Not thread-safe: one thread calls `add`, `cancel` and `step`.
    """

    def __init__(
        self, model: Transformer, config: EngineConfig, fingerprint: str, decode: Decode | None = None
    ) -> None:
        self.model, self.config, self.decode = model, config, decode
        shape = model.config
        self.max_model_len = config.max_model_len or min(shape.max_length, MAX_DEFAULT_LENGTH)
        if self.max_model_len > shape.max_length:
            raise ConfigError(f"max_model_len={self.max_model_len} exceeds the model's {shape.max_length} positions")
        canvases = max(2, config.max_num_seqs)  # a guided request must be able to run alone
        # A lease splits a canvas in two, so a canvas may end one page later than its length says.
        pages = canvases + -(-(canvases * self.max_model_len + config.store_budget_tokens) // config.page_size)
        self.allocator = PageAllocator(shape.layers, pages, config.page_size)
        self.pool = Pool(shape, pages, config.page_size, model.dtype, model.device)
        self.store = PrefixStore(
            allocator=self.allocator,
            budget_tokens=config.store_budget_tokens,
            eviction=config.eviction,
            salt=f"{fingerprint}:{model.dtype}".encode(),
            new_states=lambda tokens: new_states(shape.layers, shape.hidden, model.dtype, model.device, tokens),
        )
        self.stats = EngineStats()
        self._waiting: deque[Job] = deque()
        self._running: Scheduler[Job | PrefixPass] = Scheduler(config.max_row_layers)
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
    def memory_bytes(self) -> int:
        """Bytes of the K/V pages in use and of the boundary states held, weights not counted."""
        page = self.config.page_size * self.pool.bytes_per_token
        return self.allocator.used * page + self.store.state_bytes

    def check(self, request: Request, policy: CachePolicy) -> None:
        """Raise `ConfigError` where `add` would; nothing is queued."""
        self._job(request, policy)

    def add(self, request: Request, policy: CachePolicy) -> None:
        """Queue a request under a policy. Raises `ConfigError`, and queues nothing, on a request that cannot run."""
        job = self._job(request, policy)
        self._ids.add(request.id)
        self._waiting.append(job)

    def cancel(self, request_id: str) -> bool:
        """End a request now; its pages and its lease are free before the next step. False for an unknown id."""
        for job in [*self._waiting, *(item for item in self._running if isinstance(item, Job))]:
            if job.request.id == request_id:
                self._end(job, "cancelled")
                return True
        return False

    def step(self) -> list[Event]:
        """Run one denoising step of all requests that fit in it, and admit those that can begin."""
        self._admit()
        batch = self._next()
        if batch.jobs or batch.passes:
            items = [(work.branch, work.plan) for work in batch.passes]
            items += [item for job in batch.jobs for item in job.items()]
            inputs = pack(items, self.model.device)
            hidden = self.model.forward(inputs, self.pool)
            scores = read_rows(self.model, hidden, batch.jobs)
            self._settle(batch, scores, inputs.row_layers)
        events, self._ended = self._ended, []
        if not self.busy:
            self.check_integrity()
        return events

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page is owned by a running request or a store entry, exactly once each.

        Called by `step` whenever the engine falls idle.
        """
        expected = np.zeros_like(self.allocator.references)
        leases: dict[int, int] = {}
        owned = [entry.extent for entry in self.store.entries]
        for item in self._running:
            if isinstance(item, Job):
                owned += item.owned
                if item.lease is not None:
                    owned.append(item.lease.extent)
                    leases[id(item.lease.entry)] = leases.get(id(item.lease.entry), 0) + 1
        for extent in owned:
            expected[extent.layers.start : extent.layers.stop, extent.pages] += 1
        if not np.array_equal(expected, self.allocator.references):
            wrong = np.argwhere(expected != self.allocator.references)
            raise IntegrityError(f"{len(wrong)} page counts are off, the first at (layer, page) {wrong[0].tolist()}")
        for entry in self.store.entries:
            if entry.leases != leases.get(id(entry), 0):
                raise IntegrityError(f"a prefix of {len(entry)} tokens has {entry.leases} leases that nobody holds")

    def _job(self, request: Request, policy: CachePolicy) -> Job:
        shape, params = self.model.config, request.params
        prompt = list(request.prompt_token_ids)
        if request.id in self._ids:
            raise ConfigError(f"id {request.id!r} is in use by another request; ids must differ")
        if not prompt:
            raise ConfigError("the prompt is empty; give at least one token")
        bad = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < shape.vocab]
        if bad:
            raise ConfigError(
                f"prompt_token_ids holds {bad[0]!r}; token ids are whole numbers from 0 to {shape.vocab - 1}"
            )
        length = len(prompt) + params.max_tokens
        if length > self.max_model_len:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} make a canvas of {length}, but "
                f"max_model_len is {self.max_model_len}; shorten one of them or raise max_model_len"
            )
        wanted = request.prefix_length
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(prompt):
            raise ConfigError(f"prefix_length must be from 0 to the prompt's {len(prompt)} tokens, got {wanted!r}")
        if params.stop and self.decode is None:
            raise ConfigError("stop texts need a tokenizer, and this model folder has none; use stop_token_ids")
        rule = resolve(params, shape.family, policy.blockwise)
        policy.check(Circumstances(shape.layers, shape.shift, rule.ordered))
        job = Job(
            request=request,
            policy=policy,
            rule=rule,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(shape.stop_ids)),
            layers=shape.layers,
            arrived=time.perf_counter(),
            decode=self.decode,
            usage=Usage(prompt_tokens=len(prompt)),
        )
        # The decoder checks what depends on the canvas; better now than when the request begins.
        MaskedDecoder(params, rule, Canvas(prompt, params.max_tokens, shape.mask_id), job.seed, "all")
        return job

    def _admit(self) -> None:
        """Begin waiting requests in order of arrival, as far as slots and pages go."""
        while self._waiting:
            running = self.running
            if running and running + self._waiting[0].branches_needed > self.config.max_num_seqs:
                return
            if not self._begin(self._waiting[0]):
                return
            self._running.add(self._waiting.popleft())

    def _begin(self, job: Job) -> bool:
        """Place a request's canvases in memory. False, with nothing changed, where pages or leases stand in the way."""
        shape, request = self.model.config, job.request
        prefix, boundary = self._shareable(job)
        canvases = [Canvas(request.prompt_token_ids, request.params.max_tokens, shape.mask_id)]
        if job.branches_needed == 2:
            canvases.append(_unconditional(canvases[0], shape.mask_id))
        own = self._claim_all(job, [len(canvas) for canvas in canvases], prefix, boundary)
        lease: Lease | None = None
        if own and boundary:
            tokens = request.prompt_token_ids[:prefix]
            lease = self.store.match(tokens, boundary) or self.store.reserve(tokens, boundary)
        if not own or (boundary and lease is None):
            self._free(job)
            return False
        outputs = job.policy.needs_outputs
        if outputs:
            self.pool.keep_outputs()
        leases = [lease, None]  # only the conditional branch starts with the shared prefix; the other one's is masked
        job.start(
            tuple(self._branch(*parts, outputs) for parts in zip(canvases, own, leases, strict=False)),
            lease,
        )
        if lease is not None:
            job.usage.prefix_depth = boundary
            job.usage.cached_tokens = prefix if lease.hit else 0
            if not lease.hit:
                self._running.add(PrefixPass(lease.entry, *prefix_branch(lease.entry, shape.layers, shape.mask_id)))
        return True

    def _shareable(self, job: Job) -> tuple[int, int]:
        """Length of the prefix that can be leased, and how many layers would read it; (0, 0) where none does."""
        request, shape = job.request, self.model.config
        prompt = len(request.prompt_token_ids)
        # The rows that predict the response must be live, so a prefix may not reach into them.
        prefix = min(request.prefix_length, prompt - shape.shift)
        if prefix < 1:
            return 0, 0
        boundary = job.policy.boundary(prefix, prompt + request.params.max_tokens, shape.layers)
        if boundary and not self.store.fits(prefix):
            # A request that waits for pages comes here again and again; it is refused once.
            if job.usage.prefix_note is None:
                budget = self.store.budget_tokens
                job.usage.prefix_note = f"prefix of {prefix} tokens exceeds the store's budget of {budget}"
                self.store.stats.refused += 1
                log.warning("request %s runs uncached: %s", request.id, job.usage.prefix_note)
            return 0, 0
        return prefix, boundary

    def _claim_all(self, job: Job, lengths: list[int], prefix: int, boundary: int) -> list[list[Extent]]:
        """Pages of every canvas' own, for which idle store entries give way; empty, and none claimed, on failure."""
        while True:
            own = [self._claim(job, length, prefix if i == 0 else 0, boundary) for i, length in enumerate(lengths)]
            if all(own):
                return own
            self._free(job)
            if not self.store.give_way():
                return []

    def _claim(self, job: Job, length: int, prefix: int, boundary: int) -> list[Extent]:
        """Pages of a canvas' own: all of it, or what a lease leaves of it; empty where too few are free."""
        layers = self.model.config.layers
        wanted = [(length - prefix, range(boundary)), (length, range(boundary, layers))]
        if not prefix:
            wanted = [(length, range(layers))]
        own: list[Extent] = []
        for tokens, span in wanted:
            if not len(span):
                continue
            extent = self.allocator.allocate(tokens, span)
            if extent is None:
                return []
            own.append(extent)
            job.owned.append(extent)
        return own

    def _branch(self, canvas: Canvas, own: list[Extent], lease: Lease | None, outputs: bool) -> Branch:
        shape = self.model.config
        return Branch(
            canvas=canvas,
            ledger=Ledger(shape.layers, len(canvas), leased_prefix(lease)),
            tables=(plain_table(own[0]),) if lease is None else leased_tables(lease, own),
            lease=lease,
            restored=None if lease is None else lease.entry.states,
            shift=shape.shift,
            outputs=outputs,
        )

    def _next(self) -> _Batch:
        """The work of the next step, side by side where it reads the same leased prefix."""
        batch = _Batch()
        for job in [item for item in self._running if isinstance(item, Job) and item.ready]:
            self._guarded(job, job.items)
        for item in self._running.next(lambda i: isinstance(i, PrefixPass) or i.ready, _cost):
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
        self.stats.peak_memory_bytes = max(self.stats.peak_memory_bytes, self.memory_bytes)
        for work in batch.passes:
            self.store.publish(work.entry)
            self._running.remove(work)
            self.stats.prefix_passes += 1
            self.stats.prefix_row_layers += work.plan.cost
        at = 0
        for job in batch.jobs:
            tokens, confidence = scores[:, at : at + job.predicted]
            at += job.predicted
            transfer = job.apply(tokens.astype(np.int64), confidence)
            if transfer is not None:
                self._ended.append(Event(job.request.id, transfer=transfer))
            reason = job.ending()
            if reason is not None:
                self._end(job, reason)

    def _end(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """Tell the end of a request and free all that it owns."""
        self._ended.append(Event(job.request.id, result=job.result(reason, error)))
        self._ids.discard(job.request.id)
        if job in self._waiting:
            self._waiting.remove(job)
            return
        self._running.remove(job)
        self._free(job)

    def _free(self, job: Job) -> None:
        for extent in job.owned:
            self.allocator.release(extent)
        job.owned.clear()
        if job.lease is not None:
            self.store.release(job.lease)
            job.lease = None


def _cost(item: Job | PrefixPass) -> int:
    return item.plan.cost if isinstance(item, PrefixPass) else item.cost


def _unconditional(canvas: Canvas, mask_id: int) -> Canvas:
    """The other branch of a guided pair: the same canvas with every prompt position masked (LLaDA's guidance)."""
    return Canvas([mask_id] * canvas.prompt, len(canvas) - canvas.prompt, mask_id)

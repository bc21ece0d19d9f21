"""The engine: requests join and leave at any step; a step is one forward pass over the requests that take part."""

import logging
import time
from collections.abc import Callable, Iterator
from operator import attrgetter

from remask.engine.audit import Auditor
from remask.engine.capacity import default_length
from remask.engine.check import RequestLimits, check_request
from remask.engine.config import EngineConfig
from remask.engine.lifecycle import MOVE_FAILED, PASS_FAILED, POLICY_FAILED, WRITE_FAILED, Admission, Lifecycle
from remask.engine.member import EngineStats, Scores, Turn
from remask.engine.memory import Memory
from remask.engine.observer import EngineObserver, Observers
from remask.engine.overlap import Ahead, confirm, plan_ahead, roll_back
from remask.engine.planning import StepLimits
from remask.engine.proof import prepare
from remask.engine.report import MemoryReport, report
from remask.engine.request import PendingRequest, Request
from remask.engine.runner import Batch, LaunchedPass, Runner, run_isolated, score_isolated
from remask.errors import ConfigError
from remask.machine.device import is_fatal
from remask.model.executors import make_graphs
from remask.model.transformer import Transformer
from remask.policies.earned import EarnedDepths
from remask.request.result import Event
from remask.text.incremental import Decode

log = logging.getLogger(__name__)


class Engine:
    """One model, one pool of K/V pages, one prefix store, and any number of requests under any policies.

    Not thread-safe: one thread calls `submit`, `add`, `cancel` and `step`. Any may call `check`. `clock` returns
    seconds. Arrivals, deadlines and the times of results are read from it.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        fingerprint: str,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `ConfigError` on bad settings, and where what was asked for fails its proof (`engine.proof`)."""
        model, config, self.choice = prepare(model, config)
        self.model, self.config, self.decode, self.clock = model, config, decode, clock
        shape = model.config
        longest = config.max_model_len or default_length(shape)
        if longest > shape.max_length:
            raise ConfigError(f"max_model_len={longest} exceeds the model's {shape.max_length} positions")
        depths = EarnedDepths(shape.layers, config.audit_bound)
        self.memory = Memory(model, config, longest, fingerprint, depths if config.earns else None)
        self.max_model_len, self.pool = self.memory.max_model_len, self.memory.pool
        self.store, self.allocator = self.memory.store, self.memory.allocator
        self.limits = RequestLimits.of(config, self.max_model_len)
        self.graphs = make_graphs(model, self.memory.pool) if config.graphs else None
        self._queued: LaunchedPass | None = None  # a pass that is queued and not read yet
        share = config.max_client_row_layers or self.max_model_len * shape.layers
        limits = StepLimits.of(config, share, self.memory.pass_rows)
        runner = Runner(model, self.memory.pool, overlap=self.choice.overlap, graphs=self.graphs)
        self._observers, self.stats = Observers(runner, model), EngineStats()
        self._lifecycle = Lifecycle(self.memory, self._observers, limits, self.stats)
        self._admission = Admission(self._lifecycle, self.memory, config.max_num_seqs)
        self.auditor = Auditor(model, self.memory, self.stats, config, depths)

    @property
    def runner(self) -> Runner:
        """What runs passes on the device."""
        return self._observers.runner

    @property
    def at_work(self) -> tuple[str, ...]:
        """Ids of the requests that the current step works on. Any thread may read it."""
        return tuple(self._lifecycle.at_work)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or an event is still to be reported."""
        return not self._lifecycle.idle or bool(self._lifecycle.events)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._lifecycle.waiting)

    def check(self, request: Request) -> PendingRequest:
        """Check `request` on any thread, and return what `submit` takes. Raises `ConfigError` where it cannot run."""
        self._check_id(request.id)
        self.memory.check_kept(request.policy)
        return check_request(request, self.model, self.limits, self.decode, self.memory.exact_pages.keys)

    def submit(self, pending: PendingRequest) -> None:
        """Queue what `check` returned; the request arrives now. Raises `ConfigError` where its id is in use."""
        self._check_id(pending.request.id)
        pending.clock, pending.arrived = self.clock, self.clock()
        self.memory.prefixes.remember(pending)
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
        lifecycle = self._lifecycle
        if lifecycle.timed:
            lifecycle.expire(self.clock())
        if lifecycle.waiting.count or lifecycle.outgrown:
            self._admission.admit(self.clock())
        launched, self._queued = self._queued or self._run(self._plan()), None
        queued = self._run_ahead(launched) if self.config.overlap else None
        for turn, scores in self._read(launched):
            self._write(turn, scores)
        if queued is not None:
            self._queued = confirm(queued, lifecycle)
        if self.auditor.waiting or self.auditor.open:
            self.auditor.run()
        if not lifecycle.scheduler.line and lifecycle.idle:
            self._queued = None
            self.runner.forget()
            self.check_integrity()  # before events are taken, so that an error loses none
        events, lifecycle.events = lifecycle.events, []
        lifecycle.at_work = ()
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.step_cpu_seconds += time.thread_time() - computed
        return events

    def _plan(self, ahead: Ahead | None = None) -> Batch:
        """The turns of the next pass, neighbours by adapter and prefix. Members in flight get those planned `ahead`."""
        lifecycle, turns, batch, working = self._lifecycle, list[Turn](), list[Turn](), list[str]()
        for member in tuple(lifecycle.scheduler.line):
            if not member.ready:
                continue
            if ahead is not None and member in ahead:
                following = ahead[member]
                if following is not None:
                    turns.append(following)
                continue
            lifecycle.at_work = (member.id,)
            try:
                turns.append(member.plan())
            except Exception as error:
                lifecycle.fail(member, error, POLICY_FAILED)
        for turn in lifecycle.scheduler.next(turns):
            member, what = turn.member, POLICY_FAILED
            lifecycle.at_work = (member.id,)
            try:
                move = member.begin(turn)
                if move is not None:
                    what = MOVE_FAILED
                    self.runner.move(move)
            except Exception as error:
                lifecycle.fail(member, error, what)
                continue
            batch.append(turn)
            working.append(member.id)
        if len(batch) > 1:
            batch.sort(key=attrgetter("member.place"))
        lifecycle.at_work = working
        return batch

    def _run(self, batch: Batch, ahead: Ahead | None = None) -> LaunchedPass:
        """Run a pass over `batch`, of which some is planned `ahead`, and start copying its predictions to the host."""
        launched, runner = LaunchedPass(batch), self._observers.runner
        if ahead is not None:
            launched.queued, launched.speculative = True, {turn for turn in batch if turn.member in ahead}
        try:
            for ran in run_isolated(runner, batch, launched.failed):
                for observer in self._observers.attached:
                    observer.launched(ran)
                for turn in ran.batch:
                    if self.auditor.open or (turn.decoder is not None and turn.decoder.step == 0):
                        self.auditor.launched(ran)
                        break
                launched.parts.append((ran, score_isolated(runner, ran, launched.failed)))
        except Exception as error:
            launched.batch_error = error  # raised once the parts that ran are read
            for turn in launched.speculative:
                roll_back(turn)
        for turn in launched.failed:
            if turn not in launched.speculative and turn.error is not None:
                self._lifecycle.fail(turn.member, turn.error, PASS_FAILED)
        return launched

    def _run_ahead(self, launched: LaunchedPass) -> LaunchedPass | None:
        """Queue the pass after `launched`, which is not read yet. None: it must be read first, or nothing follows."""
        if self.runner.token_buffer is None or not launched.parts or launched.batch_error is not None:
            return None
        ahead = None if self._observers.wait else plan_ahead(launched.turns())
        if ahead is None:
            self.stats.waited_passes += 1
            return None
        if not (batch := self._plan(ahead)):
            return None
        queued = self._run(batch, ahead)
        self.stats.queued_passes += queued.batch_error is None
        return queued

    def _read(self, launched: LaunchedPass) -> Iterator[tuple[Turn, Scores]]:
        """Wait for a pass, count it, and yield what was read of each turn.

        Each must be written before the next one is asked for: that decides who has ended.
        """
        stats = self.stats
        if not launched.queued:
            for ran, _ in launched.parts:
                for observer in self._observers.attached:
                    observer.computed(ran)
        if self._lifecycle.peak_stale:  # only members that begin claim memory
            self._lifecycle.peak_stale = False
            stats.peak_memory_bytes = max(stats.peak_memory_bytes, self.memory.bytes_used)
        for ran, scored in launched.parts:
            stats.steps += 1
            for _, plan in ran.items:
                stats.row_layers += plan.spans.cost
            for pending in scored:
                for turn, scores in pending.wait():
                    if turn in launched.speculative or turn.member.ended:
                        continue
                    still_noisy = launched.still_noisy.get(turn)
                    yield turn, scores if still_noisy is None else scores.of(still_noisy)
        if launched.batch_error is not None:
            raise launched.batch_error

    def _write(self, turn: Turn, scores: Scores) -> None:
        """Give a member what was read of its turn, and report what came of it."""
        member, lifecycle, (_, plan) = turn.member, self._lifecycle, turn.items[0]
        lifecycle.at_work = (member.id,)
        try:
            if turn.tally.forwards:  # it is the pass of a request
                for observer in self._observers.attached:
                    observer.writing(turn)
                if self.auditor.open or (turn.decoder is not None and turn.decoder.step == 0):
                    self.auditor.writing(turn)
            if plan.hook is not None and plan.hook.releases_inputs:
                self.memory.forget_inputs(member.canvases)
            lifecycle.events += member.write(turn, scores, self.stats)
        except Exception as error:
            lifecycle.fail(member, error, WRITE_FAILED)
            return
        if member.done:
            lifecycle.finish(member)

    def recover(self, error: Exception) -> None:
        """Restart with empty memory after `step` raised `error`. Waiting requests keep their places.

        Running requests that have reported nothing run again, one at a time. The others, and those that began
        `MAX_STARTS` times, end with the error. Raises where a restart cannot help: `error` where nothing was running
        and memory can be trusted, `RankLostError` where a rank is lost, and what a lost device raises.
        """
        # A prefix-only pass or a closing pass may run alone, and no request waits for either.
        if not self._lifecycle.scheduler.line and not is_fatal(error):
            raise error
        self.model.ranks.check()
        log.error("the engine begins again after an error: %s", error, exc_info=error)
        self._queued = None
        self._lifecycle.start_over(error)
        self.memory.reset()
        self.auditor.forget()
        self.store, self.allocator = self.memory.store, self.memory.allocator

    def memory_report(self, *, detail: bool = False) -> MemoryReport:
        """Which requests and entries hold which pages, and how full these are; with `detail` page tables too."""
        return report(self.memory, self._lifecycle.requests(), detail=detail)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page has its owners, each once. Called by `step` when all is idle."""
        self.memory.check(self._lifecycle.requests())

    def _check_id(self, name: str) -> None:
        if name in self._lifecycle.ids:
            raise ConfigError(f"id {name!r} is in use by another request; ids must differ")

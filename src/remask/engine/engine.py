"""The engine. Requests join and leave at any step, and a step is one forward pass over those that take part."""

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
from remask.engine.overlap import NextTurns, confirm, plan_ahead, roll_back
from remask.engine.planning import StepLimits
from remask.engine.proof import prepare
from remask.engine.report import MemoryReport, report_pages
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

    Not thread-safe: one thread calls `submit`, `add`, `cancel` and `step`. Any thread may call `check`. `clock` returns
    seconds; arrivals, deadlines and the times of results are read from it.
    """

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        fingerprint: str,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises `ConfigError` on bad settings, and if a setting that `config` demands fails its proof; see `proof`."""
        model, config, self.choice = prepare(model, config)
        self.model = model
        self.config = config
        self.decode = decode
        self.clock = clock
        model_config = model.config
        max_model_len = config.max_model_len or default_length(model_config)
        if max_model_len > model_config.max_length:
            raise ConfigError(f"max_model_len={max_model_len} exceeds the model's {model_config.max_length} positions")
        depths = EarnedDepths(model_config.layers, config.audit_bound)
        self.memory = Memory(model, config, max_model_len, fingerprint, depths if config.earns else None)
        self.max_model_len = self.memory.max_model_len
        self.pool = self.memory.pool
        self.store = self.memory.store
        self.allocator = self.memory.allocator
        self.limits = RequestLimits.of(config, self.max_model_len)
        self.graphs = make_graphs(model, self.pool) if config.graphs else None
        self.stats = EngineStats()
        self._next_pass: LaunchedPass | None = None  # a pass that is queued and not read yet
        limits = StepLimits(
            budget=config.max_row_layers,
            max_refreshes=config.max_refreshes,
            max_canvases=config.max_num_seqs,
            client_budget=config.max_client_row_layers or self.max_model_len * model_config.layers,
            max_rows=self.memory.pass_rows,
        )
        runner = Runner(model, self.pool, overlap=self.choice.overlap, graphs=self.graphs)
        self._observers = Observers(runner, model)
        self._lifecycle = Lifecycle(self.memory, self._observers, limits, self.stats)
        self._admission = Admission(self._lifecycle, self.memory, config.max_num_seqs)
        self.auditor = Auditor(model, self.memory, self.stats, config, depths)

    @property
    def runner(self) -> Runner:
        """Runs passes on the device: the engine's own runner, or that of an observer."""
        return self._observers.runner

    @property
    def active_ids(self) -> tuple[str, ...]:
        """Ids of the requests that the current step works on. Any thread may read it."""
        return tuple(self._lifecycle.active_ids)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or an event is still to be reported."""
        return not self._lifecycle.idle or bool(self._lifecycle.events)

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        return len(self._lifecycle.waiting)

    def check(self, request: Request) -> PendingRequest:
        """Check `request`, and return it ready for `submit`. Raises `ConfigError` if it cannot run.

        Any thread may call it.
        """
        self._check_id(request.id)
        self.memory.check_outputs_fit(request.policy)
        return check_request(request, self.model, self.limits, self.decode, self.memory.exact_pages.keys)

    def submit(self, pending: PendingRequest) -> None:
        """Queue a request that `check` returned. It counts as arrived now. Raises `ConfigError` if its id is in use."""
        self._check_id(pending.request.id)
        pending.clock = self.clock
        pending.arrived = self.clock()
        self.memory.prefixes.remember(pending)
        self._lifecycle.submit(pending)

    def add(self, request: Request) -> None:
        """Check and queue a request. Raises `ConfigError`, and queues nothing, if it cannot run."""
        self.submit(self.check(request))

    def cancel(self, request_id: str) -> bool:
        """End a request now, so that its memory is free before the next step. Returns False if the id is unknown."""
        return self._lifecycle.cancel(request_id)

    def attach(self, observer: EngineObserver) -> None:
        """Call `observer` for every pass that is launched from now on. Any number may be attached."""
        self._observers.attach(observer)

    def detach(self, observer: EngineObserver) -> None:
        """Stop calling `observer`. Raises `ValueError` if it is not attached."""
        self._observers.detach(observer)

    def step(self) -> list[Event]:
        """Admit waiting requests, and run one denoising step of all requests that fit into it. Returns their events.

        With `overlap` the next step is queued before the tokens of this one are known, if all plans repeat. Requests
        past their deadlines end first. An error that one request causes ends that request only. Other errors are
        raised, after which `recover` may help.
        """
        start, cpu_start = time.perf_counter(), time.thread_time()
        lifecycle = self._lifecycle
        if lifecycle.deadline_ids:
            lifecycle.expire(self.clock())
        if lifecycle.waiting.count or lifecycle.growing:
            self._admission.admit(self.clock())
        launched = self._next_pass or self._run(self._plan())
        self._next_pass = None
        next_pass = self._run_ahead(launched) if self.config.overlap else None
        for turn, scores in self._read(launched):
            self._write(turn, scores)
        if next_pass is not None:
            self._next_pass = confirm(next_pass, lifecycle)
        if self.auditor.queue or self.auditor.candidates:
            self.auditor.run()
        if not lifecycle.scheduler.line and lifecycle.idle:
            self._next_pass = None
            self.runner.forget_layouts()
            self.check_integrity()  # before events are taken, so that an error loses none
        events = lifecycle.events
        lifecycle.events = []
        lifecycle.active_ids = ()
        self.stats.step_seconds += time.perf_counter() - start
        self.stats.step_cpu_seconds += time.thread_time() - cpu_start
        return events

    def _plan(self, next_turns: NextTurns | None = None) -> Batch:
        """Plan and begin the turns of the next pass. Members in flight have been planned: `next_turns` are their turns.

        Plans enter the ledgers, and copies of stored K/V are launched. Members that fail end. Sets `active_ids`.
        Returns the turns that began, in the order of their members' `sort_key`.
        """
        lifecycle = self._lifecycle
        turns = list[Turn]()
        for member in tuple(lifecycle.scheduler.line):
            if not member.ready:
                continue
            if next_turns is not None and member in next_turns:
                next_turn = next_turns[member]
                if next_turn is not None:
                    turns.append(next_turn)
                continue
            lifecycle.active_ids = (member.id,)
            try:
                turns.append(member.plan())
            except Exception as error:
                lifecycle.fail(member, error, POLICY_FAILED)
        batch = list[Turn]()
        active_ids = list[str]()
        for turn in lifecycle.scheduler.choose_turns(turns):
            member = turn.member
            lifecycle.active_ids = (member.id,)
            failure = POLICY_FAILED
            try:
                move = member.begin(turn)
                if move is not None:
                    failure = MOVE_FAILED
                    self.runner.move(move)
            except Exception as error:
                lifecycle.fail(member, error, failure)
                continue
            batch.append(turn)
            active_ids.append(member.id)
        lifecycle.active_ids = active_ids
        if len(batch) > 1:
            batch.sort(key=attrgetter("member.sort_key"))
        return batch

    def _run(self, batch: Batch, next_turns: NextTurns | None = None) -> LaunchedPass:
        """Run a pass over `batch`, and start copying its predictions to the host. Turns that cannot run end.

        With `next_turns` the pass before is not read yet, and turns of members in `next_turns` are speculative. Errors
        that no member causes become the `batch_error` of the result.
        """
        runner = self._observers.runner
        launched = LaunchedPass(batch)
        if next_turns is not None:
            launched.is_queued = True
            launched.speculative = {turn for turn in batch if turn.member in next_turns}
        try:
            for result in run_isolated(runner, batch, launched.failed_turns):
                for observer in self._observers.attached:
                    observer.on_launch(result)
                for turn in result.batch:
                    decoder = turn.decoder
                    if self.auditor.candidates or (decoder is not None and decoder.step == turn.member.opening_step):
                        self.auditor.on_launch(result)
                        break
                launched.parts.append((result, score_isolated(runner, result, launched.failed_turns)))
        except Exception as error:
            launched.batch_error = error  # raised once the parts that ran are read
            for turn in launched.speculative:
                roll_back(turn)
        for turn in launched.failed_turns:
            if turn not in launched.speculative and turn.error is not None:
                self._lifecycle.fail(turn.member, turn.error, PASS_FAILED)
        return launched

    def _run_ahead(self, launched: LaunchedPass) -> LaunchedPass | None:
        """Queue the pass after `launched`, which is not read yet.

        Returns None if `launched` must be read first, or nothing follows it.
        """
        if self.runner.token_buffer is None or not launched.parts or launched.batch_error is not None:
            return None
        next_turns = None if self._observers.waits else plan_ahead(launched.turns())
        if next_turns is None:
            self.stats.waited_passes += 1
            return None
        batch = self._plan(next_turns)
        if not batch:
            return None
        next_pass = self._run(batch, next_turns)
        self.stats.queued_passes += next_pass.batch_error is None
        return next_pass

    def _read(self, launched: LaunchedPass) -> Iterator[tuple[Turn, Scores]]:
        """Wait for a pass, count it, and yield the scores of each turn. After the last one its `batch_error` is raised.

        A turn must be written before the next one is requested, because turns of members that have ended are skipped.
        """
        stats = self.stats
        if not launched.is_queued:
            for result, _ in launched.parts:
                for observer in self._observers.attached:
                    observer.on_complete(result)
        if self._lifecycle.is_peak_stale:  # only members that begin claim memory
            self._lifecycle.is_peak_stale = False
            stats.peak_memory_bytes = max(stats.peak_memory_bytes, self.memory.bytes_used)
        for result, parts in launched.parts:
            stats.steps += 1
            for _, plan in result.items:
                stats.row_layers += plan.spans.cost
            for pending in parts:
                for turn, scores in pending.wait():
                    if turn in launched.speculative or turn.member.ended:
                        continue
                    noisy = launched.noisy_masks.get(turn)
                    yield turn, scores if noisy is None else scores.select(noisy)
        if launched.batch_error is not None:
            raise launched.batch_error

    def _write(self, turn: Turn, scores: Scores) -> None:
        """Let a member write the scores of its turn, collect its events, and handle its end."""
        member, lifecycle, (_, plan), decoder = turn.member, self._lifecycle, turn.items[0], turn.decoder
        lifecycle.active_ids = (member.id,)
        try:
            if turn.tally.forwards:  # it is the pass of a request
                for observer in self._observers.attached:
                    observer.on_write(turn)
                if self.auditor.candidates or (decoder is not None and decoder.step == member.opening_step):
                    self.auditor.on_write(turn)
            if plan.hook is not None and plan.hook.releases_inputs:
                self.memory.free_states(member.canvases)
            lifecycle.events += member.write(turn, scores, self.stats)
        except Exception as error:
            lifecycle.fail(member, error, WRITE_FAILED)
            return
        if member.is_done:
            lifecycle.finish_member(member)

    def recover(self, error: Exception) -> None:
        """Restart with empty memory after `step` raised `error`. Waiting requests keep their places.

        Running requests that have reported nothing run again, one at a time. The others, and those that began
        `MAX_STARTS` times, end with the error. Raises if a restart cannot help: `error` if nothing was running and it
        is not one of the device, `RankLostError` if a rank is lost, and the error of a lost device.
        """
        # The line may hold only a prefix pass or a closing pass, for which no request waits.
        if not self._lifecycle.scheduler.line and not is_fatal(error):
            raise error
        self.model.ranks.check()
        log.error("the engine begins again after an error: %s", error, exc_info=error)
        self._next_pass = None
        self._lifecycle.start_over(error)
        self.memory.reset()
        self.auditor.drop_audits()
        self.store = self.memory.store
        self.allocator = self.memory.allocator

    def memory_report(self, *, detail: bool = False) -> MemoryReport:
        """Which requests and entries hold which pages, and how full these are. With `detail` it has page tables too."""
        return report_pages(self.memory, self._lifecycle.requests(), detail=detail)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless page references match their holders. `step` calls it whenever all is idle."""
        self.memory.check(self._lifecycle.requests())

    def _check_id(self, request_id: str) -> None:
        if request_id in self._lifecycle.ids:
            raise ConfigError(f"id {request_id!r} is in use by another request; ids must differ")

"""The engine in its own thread, for callers in an event loop."""

import asyncio
import ctypes
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from remask.checks.values import check_real, check_whole
from remask.engine.engine import Engine
from remask.engine.request import PendingRequest
from remask.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError
from remask.request.result import Event, Result, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNREAD = 1 << 18  # predicted positions of drafts that wait for a reader: some 20 MB


class StepObserver(Protocol):
    """Follows the steps of an engine on the engine's thread, as a profiler does."""

    def before_step(self) -> None:
        """A step is about to run."""

    def after_step(self) -> None:
        """The step has run."""

    def close(self) -> None:
        """No more steps will run."""


class Ticket:
    """Requests that were accepted together. Iterating gives the events of each engine step until all have ended.

    Drafts are dropped while drafts of `MAX_UNREAD` positions are unread: what waits for a slow reader stays small.
    Raises `EngineDeadError` while iterating where the engine died meanwhile.
    """

    def __init__(self, ids: Sequence[str], cancel: Callable[[Sequence[str]], None]) -> None:
        self.ids = tuple(ids)
        self._open = set(ids)
        self._cancel = cancel
        self._unread = 0
        self._delivered: asyncio.Queue[list[Event] | EngineDeadError] = asyncio.Queue()

    def deliver(self, events: list[Event] | EngineDeadError) -> None:
        """Queue events of these requests, or the error of a dead engine. Called in the event loop."""
        if not isinstance(events, EngineDeadError):
            events = [self._shortened(event) for event in events]
        self._delivered.put_nowait(events)

    def _shortened(self, event: Event) -> Event:
        if event.draft is None:
            return event
        if self._unread + len(event.draft.positions) > MAX_UNREAD:
            return replace(event, draft=None)
        self._unread += len(event.draft.positions)
        return event

    def cancel(self) -> None:
        """Cancel the requests that have not ended. Slots and leases are free before the next step. Never waits."""
        if self._open:
            self._cancel(tuple(self._open))

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while self._open:
            events = await self._delivered.get()
            if isinstance(events, EngineDeadError):
                self._open.clear()
                raise events
            self._open -= {event.id for event in events if event.result is not None}
            self._unread -= sum(len(event.draft.positions) for event in events if event.draft is not None)
            yield events


class AsyncEngine:
    """An engine in its own thread, for any number of requests from one event loop.

    Call all methods on the event loop's thread; none of them blocks it. `observer` is called on the engine's thread,
    and `listener` in the event loop with every event of every request. At most `max_num_seqs` + `max_queue` requests
    are accepted at a time. Open requests of one client may cost `max_client_work` row-layers together, estimated from
    their sampling parameters (None: half of a full queue of requests that take as many steps as the longest canvas has
    positions). After `trim_after` seconds without a request, free memory is returned to the system. A step that takes
    longer than `step_limit` seconds is counted, and logged with the requests that it works on. `clock` returns seconds
    and may be called on any thread.
    """

    def __init__(
        self,
        engine: Engine,
        max_queue: int,
        observer: StepObserver | None = None,
        listener: Callable[[Event], None] | None = None,
        step_limit: float = 30.0,
        max_client_work: int | None = None,
        trim_after: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole("max_queue", max_queue, low=0)
        check_whole("max_client_work", max_client_work, low=1, optional=True)
        check_real("step_limit", step_limit, low=0.0, above=True)
        self.engine, self.max_queue, self.step_limit, self.trim_after = engine, max_queue, step_limit, trim_after
        longest = engine.max_model_len**2 * engine.model.config.layers
        self.max_client_work = max_client_work or -(-(engine.config.max_num_seqs + max_queue) // 2) * longest
        self.open: dict[str, PendingRequest] = {}  # those that were accepted and have not ended, by their ids
        self._client_work = Counter[str]()
        self.slow_steps = 0  # steps that took longer than `step_limit`
        self._clock = clock
        self._step_began: float | None = None
        self._watch: asyncio.Task[None] | None = None
        self.draining = False
        self.error: EngineDeadError | None = None
        self._observer, self._listener = observer, listener
        self._tickets: dict[str, Ticket] = {}
        self.begun: set[str] = set()
        self._calls: set[asyncio.Future[object]] = set()
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._stopped = False
        self._untrimmed = False  # whether steps have run since memory was given back
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="remask-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine's loop runs."""
        return self.error is None and self._thread.is_alive()

    @property
    def overdue(self) -> float | None:
        """Seconds that the current step has taken, where they are more than `step_limit`; else None."""
        began = self._step_began
        seconds = 0.0 if began is None else self._clock() - began
        return seconds if seconds > self.step_limit else None

    @property
    def running(self) -> int:
        """Requests that have begun and not ended."""
        return len(self.begun)

    @property
    def waiting(self) -> int:
        """Accepted requests that have not begun."""
        return len(self._tickets) - len(self.begun)

    def start(self) -> None:
        """Start the thread and the watch over its steps. Called once, in the event loop that gets the events."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()
        self._watch = self._loop.create_task(self._watch_steps())

    def submit(self, pending: Sequence[PendingRequest]) -> Ticket:
        """Accept requests that `Engine.check` returned: all of them or none.

        Checking many long prompts may take a while, and any thread may do it. Raises `QueueFullError`, `DrainingError`
        or `EngineDeadError`, and `ConfigError` for ids that are in use.
        """
        self._check_open()
        work = Counter[str]()
        for item in pending:
            work[item.request.owner.client] += item.row_layers
        for client, row_layers in work.items():
            self.check_room(client, len(pending), row_layers)
        ids = [item.request.id for item in pending]
        if len(set(ids)) < len(ids) or not self._tickets.keys().isdisjoint(ids):
            raise ConfigError(f"ids {ids} are in use by other requests; ids must differ")
        self._client_work += work
        self.open.update(zip(ids, pending, strict=True))
        ticket = Ticket(ids, self._cancel)
        self._tickets.update(dict.fromkeys(ids, ticket))
        self._idle.clear()
        self._post(lambda: self._submit(pending))
        return ticket

    def check_room(self, client: str, requests: int, row_layers: int) -> None:
        """Raise `QueueFullError` if `submit` would for this many requests of a client. Any thread may call it."""
        self._check_open()
        count, most = len(self._tickets), self.engine.config.max_num_seqs + self.max_queue
        if count + requests > most:
            raise QueueFullError(
                f"the queue is full: {count} requests are running or waiting, this one needs room for {requests}, and "
                f"the limit is {most}; try again later"
            )
        work, most = self._client_work[client], self.max_client_work
        if work + row_layers > most:
            way_out = "try again later" if row_layers <= most else "ask for fewer answers, fewer steps or less text"
            raise QueueFullError(
                f"the requests of one client may come to {most} row-layers at a time: {work} are open, and this one "
                f"asks for {row_layers}; {way_out}, or raise max_client_work"
            )

    async def call(self, act: Callable[[Engine], T]) -> T:
        """Run `act` on the engine's thread between two steps. Raises what it raises, or `EngineDeadError`."""
        if not self.alive:
            raise self.error or EngineDeadError("the engine has stopped")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                value = act(self.engine)
            # Its errors go to the caller, not to the loop.
            except Exception as error:
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, value)

        self._post(run)
        return await future

    async def drain(self, timeout: float) -> int:
        """Accept no new requests, and wait `timeout` seconds for the open ones; cancel the rest, and say how many."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            late = tuple(self._tickets)
            if not late:
                return 0
            log.warning("drain: %d requests did not end within %g s and are cancelled", len(late), timeout)
            self._cancel(late)
            await self._idle.wait()
            return len(late)
        return 0

    async def stop(self) -> None:
        """End the thread; requests that are still open are cancelled first. Safe to call twice."""
        self.draining = True
        if self._thread.is_alive():
            self._cancel(tuple(self._tickets))
            await self._idle.wait()
            with self._wake:
                self._stopped = True
                self._wake.notify()
            await asyncio.to_thread(self._thread.join)
            for future in tuple(self._calls):  # posted after the thread had looked for the last time
                _fail(future, EngineDeadError("the engine has stopped"))
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_steps(self) -> None:
        """Report each step that takes longer than `step_limit`, once."""
        reported: float | None = None
        while True:
            await asyncio.sleep(min(1.0, self.step_limit / 4))
            ranks = self.engine.model.ranks
            if ranks.lost is not None and self.alive:
                self._post(ranks.check)  # it raises on the engine's thread, also where no request runs
            began, seconds = self._step_began, self.overdue
            if seconds is not None and began != reported:
                reported = began
                self.slow_steps += 1
                at_work = ", ".join(self.engine.at_work) or "no request alone"
                log.error(
                    "a step has taken %.1f s, and %g s are allowed; it works on %s", seconds, self.step_limit, at_work
                )

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self.draining:
            raise DrainingError("the server is draining and takes no new requests; use another one")
        if not self._thread.is_alive():
            raise EngineDeadError("the engine has not been started")

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _cancel(self, ids: Sequence[str]) -> None:
        def act() -> None:
            for name in ids:
                self.engine.cancel(name)

        self._post(act)

    # The methods below run on the engine's thread, except `_deliver`, `_die` and `_end`.

    def _run(self) -> None:
        try:
            while self._next_commands():
                if self.engine.busy or self.engine.auditor.waiting:
                    self._step()
        # The thread must not end silently: every open request ends with the error.
        except BaseException as error:
            log.critical("the engine's loop died: %s", error, exc_info=True)
            with suppress(RuntimeError):  # the event loop may have gone first
                self._call_in_loop(self._die, EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
        finally:
            if self._observer is not None:
                self._observer.close()

    def _next_commands(self) -> bool:
        """Run the posted commands, and sleep while there is nothing to do. Returns False once the loop must end."""
        with self._wake:
            while not (self._commands or self.engine.busy or self.engine.auditor.waiting or self._stopped):
                if not self._wake.wait(self.trim_after if self._untrimmed else None):
                    self._untrimmed = False
                    trim_memory()
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return not self._stopped

    def _step(self) -> None:
        if self._observer is not None:
            self._observer.before_step()
        self._step_began = self._clock()
        self._untrimmed = True
        try:
            events = self.engine.step()
        # The engine restarts with its queue, or raises the error if it cannot.
        except Exception as error:
            self.engine.recover(error)
            events = []
        finally:
            self._step_began = None
        if self._observer is not None:
            self._observer.after_step()
        if events:
            self._call_in_loop(self._deliver, events)

    def _submit(self, requests: Sequence[PendingRequest]) -> None:
        for pending in requests:
            try:
                self.engine.submit(pending)
            # Another user of the engine may have taken the id meanwhile.
            except ConfigError as error:
                request = pending.request
                log.error("request %s was refused after it had been accepted: %s", request.id, error)
                usage = Usage(len(request.prompt_token_ids))
                result = Result(request.id, (), "error", usage, (), None, 0.0, str(error))
                self._call_in_loop(self._deliver, [Event(request.id, result=result)])

    def _call_in_loop(self, act: Callable[[T], None], value: T) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(act, value)

    def _deliver(self, events: list[Event]) -> None:
        by_ticket: dict[Ticket, list[Event]] = {}
        for event in events:
            ticket = self._tickets.get(event.id)
            if ticket is None:  # another user of the engine asked for it
                continue
            by_ticket.setdefault(ticket, []).append(event)
            if self._listener is not None:
                self._listener(event)
            if event.queued_s is not None:
                self.begun.add(event.id)
            if event.result is not None:
                del self._tickets[event.id]
                ended = self.open.pop(event.id)
                self._client_work[client := ended.request.owner.client] -= ended.row_layers
                if not self._client_work[client]:
                    del self._client_work[client]
                self.begun.discard(event.id)
        for ticket, share in by_ticket.items():
            ticket.deliver(share)
        if not self._tickets:
            self._idle.set()

    def _die(self, error: EngineDeadError) -> None:
        self.error = error
        for ticket in dict.fromkeys(self._tickets.values()):
            ticket.deliver(error)
        self._tickets.clear()
        self.open.clear()
        self._client_work.clear()
        self.begun.clear()
        for future in tuple(self._calls):
            _fail(future, error)
        self._idle.set()


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def trim_memory() -> bool:
    """Return free memory to the system, which glibc has a call for. True where there was some."""
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))

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
from remask.request.result import Event

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNREAD = 2**18  # predicted positions of drafts that wait for a reader: about 20 MB


class StepObserver(Protocol):
    """Called on the engine's thread around each step, for example by a profiler."""

    def before_step(self) -> None:
        """A step is about to run."""

    def after_step(self) -> None:
        """The step has run."""

    def close(self) -> None:
        """No more steps will run."""


class Ticket:
    """Requests that were accepted together. Iterating yields the events of each engine step until all have ended.

    To bound the memory that a slow reader takes, drafts are dropped while drafts of `MAX_UNREAD` positions are unread.
    Iterating raises `EngineDeadError` if the engine dies meanwhile.
    """

    def __init__(self, ids: Sequence[str], cancel: Callable[[Sequence[str]], None]) -> None:
        self.ids = tuple(ids)
        self._open_ids, self._running_ids = set(ids), set(ids)  # whose results have not been read, or not delivered
        self._cancel = cancel
        self._unread = 0  # positions of drafts in the inbox
        self._inbox: asyncio.Queue[list[Event] | EngineDeadError] = asyncio.Queue()

    def deliver(self, events: list[Event] | EngineDeadError) -> None:
        """Queue events of these requests, or the error of a dead engine. Called in the event loop."""
        if not isinstance(events, EngineDeadError):
            self._running_ids -= {event.id for event in events if event.result is not None}
            events = [self._admit_draft(event) for event in events]
        self._inbox.put_nowait(events)

    def _admit_draft(self, event: Event) -> Event:
        """Count the draft of `event` as unread. Returns the event, without its draft if too much is unread then."""
        if event.draft is None:
            return event
        if self._unread + len(event.draft.positions) > MAX_UNREAD:
            return replace(event, draft=None)
        self._unread += len(event.draft.positions)
        return event

    def cancel(self) -> None:
        """Cancel the requests that have not ended. Slots and leases are free before the next step. Never waits."""
        if self._running_ids:
            self._cancel(tuple(self._running_ids))

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while self._open_ids:
            events = await self._inbox.get()
            if isinstance(events, EngineDeadError):
                self._open_ids.clear()
                raise events
            self._open_ids -= {event.id for event in events if event.result is not None}
            self._unread -= sum(len(event.draft.positions) for event in events if event.draft is not None)
            yield events


class AsyncEngine:
    """An engine in its own thread, for any number of requests from one event loop.

    Call all methods but `check_room` on the event loop's thread; none of them blocks it. `observer` is called on the
    engine's thread, and `listener` in the event loop with every event of every request. At most `max_num_seqs` +
    `max_queue` requests are accepted at a time. The open requests of one client may cost `max_client_work` row-layers,
    estimated from their sampling parameters. By default it is half the cost of a full queue of requests whose canvases
    are of the largest size and take one step for each position. After `trim_after` seconds without a request, free
    memory is returned to the system. A step that takes longer than `step_limit` seconds is counted, and logged with the
    requests that it works on. `clock` returns seconds and may be called on any thread.
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
        check_real("trim_after", trim_after, low=0.0, above=True)
        self.engine = engine
        self.max_queue = max_queue
        self.step_limit, self.trim_after = step_limit, trim_after
        half_queue = (engine.config.max_num_seqs + max_queue + 1) // 2  # requests, rounded up
        max_request_work = engine.max_model_len**2 * engine.model.config.layers
        self.max_client_work = max_client_work or half_queue * max_request_work
        self.open_requests: dict[str, PendingRequest] = {}  # accepted requests that have not ended, by id
        self.running_ids: set[str] = set()  # those of them that have begun
        self.slow_steps = 0  # steps that took longer than `step_limit`
        self.draining = False
        self.error: EngineDeadError | None = None
        self._clock = clock
        self._observer = observer
        self._listener = listener
        self._client_work = Counter[str]()  # row-layers of the open requests of each client
        self._tickets: dict[str, Ticket] = {}  # by id of the request
        self._calls: set[asyncio.Future[object]] = set()  # of `call`, which are not done
        self._step_start: float | None = None  # by `clock`; None between steps
        self._watch: asyncio.Task[None] | None = None
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # guarded by `_wake`, as is `_stopped`
        self._stopped = False
        self._needs_trim = False  # whether steps have run since memory was returned
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="remask-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the engine's loop runs."""
        return self.error is None and self._thread.is_alive()

    @property
    def overdue_step_s(self) -> float | None:
        """Seconds that the current step has taken, if more than `step_limit`; otherwise None."""
        start = self._step_start
        seconds = 0.0 if start is None else self._clock() - start
        return seconds if seconds > self.step_limit else None

    @property
    def running(self) -> int:
        """Number of requests that have begun and not ended."""
        return len(self.running_ids)

    @property
    def waiting(self) -> int:
        """Number of accepted requests that have not begun."""
        return len(self._tickets) - len(self.running_ids)

    def start(self) -> None:
        """Start the engine's thread and the task that watches its steps. Call it once, in the loop that gets events."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()
        self._watch = self._loop.create_task(self._watch_steps())

    def submit(self, requests: Sequence[PendingRequest]) -> Ticket:
        """Accept all of the requests, or none. They come from `Engine.check`, which any thread may call.

        Raises `QueueFullError`, `DrainingError` or `EngineDeadError`, and `ConfigError` if an id is in use.
        """
        self._check_open()
        work = Counter[str]()
        for pending in requests:
            work[pending.request.owner.client] += pending.row_layers
        for client, row_layers in work.items():
            self.check_room(client, len(requests), row_layers)
        ids = [pending.request.id for pending in requests]
        if len(set(ids)) < len(ids) or not self._tickets.keys().isdisjoint(ids):
            raise ConfigError(f"ids {ids} are in use by other requests; ids must differ")
        self._client_work += work
        self.open_requests.update(zip(ids, requests, strict=True))
        ticket = Ticket(ids, self._cancel)
        self._tickets.update(dict.fromkeys(ids, ticket))
        self._idle.clear()
        self._post(lambda: self._submit(requests))
        return ticket

    def check_room(self, client: str, request_count: int, row_layers: int) -> None:
        """Raise the error that `submit` would raise for so many requests of a client. Any thread may call it."""
        self._check_open()
        count = len(self._tickets)
        max_requests = self.engine.config.max_num_seqs + self.max_queue
        if count + request_count > max_requests:
            raise QueueFullError(
                f"the queue is full: {count} requests are running or waiting, this one needs room for "
                f"{request_count}, and the limit is {max_requests}; try again later"
            )
        work, max_work = self._client_work[client], self.max_client_work
        if work + row_layers > max_work:
            way_out = "try again later" if row_layers <= max_work else "ask for fewer answers, fewer steps or less text"
            raise QueueFullError(
                f"the requests of one client may come to {max_work} row-layers at a time: {work} are open, and this "
                f"one asks for {row_layers}; {way_out}, or raise max_client_work"
            )

    async def call(self, function: Callable[[Engine], T]) -> T:
        """The result of `function`, called on the engine's thread between two steps.

        Raises its exception, or `EngineDeadError` if the engine has stopped.
        """
        if not self.alive:
            raise self.error or EngineDeadError("the engine has stopped")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                value = function(self.engine)
            except Exception as error:  # it goes to the caller, and must not end the engine's loop
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, value)

        self._post(run)
        return await future

    async def drain(self, timeout: float) -> int:
        """Accept no new requests, wait up to `timeout` seconds for the open ones, and cancel the rest.

        Returns the number of cancelled requests.
        """
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        ids = tuple(self._tickets)
        if ids:
            log.warning("drain: %d requests did not end within %g s and are cancelled", len(ids), timeout)
            self._cancel(ids)
            await self._idle.wait()
        return len(ids)

    async def stop(self) -> None:
        """Cancel the open requests and end the thread. Safe to call twice."""
        self.draining = True
        if self._thread.is_alive():
            self._cancel(tuple(self._tickets))
            await self._idle.wait()
            with self._wake:
                self._stopped = True
                self._wake.notify()
            await asyncio.to_thread(self._thread.join)
            for future in tuple(self._calls):  # posted after the thread had run its last commands
                _fail(future, EngineDeadError("the engine has stopped"))
        if self._watch is not None:
            self._watch.cancel()

    async def _watch_steps(self) -> None:
        """Count and log each step that takes longer than `step_limit`, once. Also notices a lost rank."""
        reported: float | None = None  # start of the last step that was logged
        while True:
            await asyncio.sleep(min(1.0, self.step_limit / 4))
            ranks = self.engine.model.ranks
            if ranks.lost is not None and self.alive:
                self._post(ranks.check)  # it raises on the engine's thread, even if no request runs
            start, seconds = self._step_start, self.overdue_step_s
            if seconds is not None and start != reported:
                reported = start
                self.slow_steps += 1
                ids = ", ".join(self.engine.active_ids) or "no request alone"
                log.error(
                    "a step has taken %.1f s, and %g s are allowed; it works on %s", seconds, self.step_limit, ids
                )

    def _check_open(self) -> None:
        """Raise `EngineDeadError` or `DrainingError` unless requests are accepted."""
        if self.error is not None:
            raise self.error
        if not self._thread.is_alive():
            state = "has not been started" if self._thread.ident is None else "has stopped"
            raise EngineDeadError(f"the engine {state}")
        if self.draining:
            raise DrainingError("the server is draining and takes no new requests; use another one")

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _cancel(self, ids: Sequence[str]) -> None:
        def cancel_all() -> None:
            for request_id in ids:
                self.engine.cancel(request_id)

        self._post(cancel_all)

    # The methods below run on the engine's thread, except `_deliver` and `_die`.

    def _run(self) -> None:
        """Run commands and steps until `stop`. If anything raises, all open requests end with `EngineDeadError`."""
        try:
            while self._run_commands():
                if self.engine.busy or self.engine.auditor.queue:
                    self._step()
        except BaseException as error:  # the thread must not end silently: every open request ends with the error
            log.critical("the engine's loop died: %s", error, exc_info=True)
            with suppress(RuntimeError):  # if the event loop was closed first
                self._call_in_loop(self._die, EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
        finally:
            if self._observer is not None:
                self._observer.close()

    def _run_commands(self) -> bool:
        """Sleep until there is work, and run the posted commands. Returns False if the loop must end."""
        with self._wake:
            while not (self._commands or self.engine.busy or self.engine.auditor.queue or self._stopped):
                if not self._wake.wait(self.trim_after if self._needs_trim else None):
                    self._needs_trim = False
                    trim_memory()
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        return not self._stopped

    def _step(self) -> None:
        """Run one step and deliver its events. If it raises, the engine restarts, or raises if that cannot help."""
        if self._observer is not None:
            self._observer.before_step()
        self._step_start = self._clock()
        self._needs_trim = True
        try:
            events = self.engine.step()
        except Exception as error:
            self.engine.recover(error)  # raises the error if a restart cannot help
            events = []
        finally:
            self._step_start = None
        if self._observer is not None:
            self._observer.after_step()
        if events:
            self._call_in_loop(self._deliver, events)

    def _submit(self, requests: Sequence[PendingRequest]) -> None:
        for pending in requests:
            try:
                self.engine.submit(pending)
            except ConfigError as error:  # another user of the engine has taken the id meanwhile
                request = pending.request
                log.error("request %s was refused after it had been accepted: %s", request.id, error)
                result = replace(pending.result("error", str(error)), elapsed_s=0.0)  # the engine never had it
                self._call_in_loop(self._deliver, [Event(request.id, result=result)])

    def _call_in_loop(self, function: Callable[[T], None], value: T) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, value)

    def _deliver(self, events: list[Event]) -> None:
        """Pass events to the listener and their tickets, and stop counting requests that have ended."""
        by_ticket: dict[Ticket, list[Event]] = {}
        for event in events:
            ticket = self._tickets.get(event.id)
            if ticket is None:  # of another user of the engine
                continue
            by_ticket.setdefault(ticket, []).append(event)
            if self._listener is not None:
                self._listener(event)
            if event.queued_s is not None:
                self.running_ids.add(event.id)
            if event.result is not None:
                del self._tickets[event.id]
                pending = self.open_requests.pop(event.id)
                client = pending.request.owner.client
                self._client_work[client] -= pending.row_layers
                if not self._client_work[client]:
                    del self._client_work[client]
                self.running_ids.discard(event.id)
        for ticket, ticket_events in by_ticket.items():
            ticket.deliver(ticket_events)
        if not self._tickets:
            self._idle.set()

    def _die(self, error: EngineDeadError) -> None:
        """End all tickets and calls with `error`, and accept no more requests."""
        self.error = error
        for ticket in dict.fromkeys(self._tickets.values()):
            ticket.deliver(error)
        self._tickets.clear()
        self.open_requests.clear()
        self._client_work.clear()
        self.running_ids.clear()
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
    """Return free memory to the system, on Linux with glibc. Returns whether any was returned."""
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))

"""The engine on its thread: nobody waits for ever, whatever ends."""

import asyncio
import ctypes
import math
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remask.engine import async_engine
from remask.engine.async_engine import AsyncEngine, Ticket, trim_memory
from remask.engine.engine import Engine
from remask.engine.request import Owner, PendingRequest, Request
from remask.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, Reuse
from remask.readers.drafts import Drafts
from remask.request.result import Draft, Event, Result
from tests.engine.support import Work, alone, make_engine, request
from tests.waiting import LONGEST_S


def drive(
    act: Callable[[AsyncEngine], Awaitable[Any]], engine: Engine | None = None, max_queue: int = 100, **more: Any
) -> Any:
    """What `act` returns of a started engine, which is stopped afterwards."""

    async def main() -> Any:
        outer = AsyncEngine(engine or make_engine(), max_queue, **more)
        outer.start()
        try:
            return await asyncio.wait_for(act(outer), LONGEST_S)
        finally:
            if isinstance(paced := more.get("observer"), Paced):
                paced.let(-1)
            await asyncio.wait_for(outer.stop(), LONGEST_S)

    return asyncio.run(main())


def checked(outer: AsyncEngine, *requests: Request) -> list[PendingRequest]:
    """What `submit` takes for these requests."""
    return [outer.engine.check(each) for each in requests]


async def ends(ticket: Ticket) -> dict[str, Result]:
    return {event.id: event.result async for events in ticket for event in events if event.result is not None}


def long(name: str, **fields: Any) -> Any:
    return request(name, max_tokens=32, block_length=1, steps=32, **fields)


class Paced:
    """An observer that lets so many steps run, any number where it is negative, and counts them."""

    def __init__(self, steps: int = -1) -> None:
        self.steps = self.closed = 0
        self._left, self._more, self._standing = steps, threading.Condition(), threading.Event()

    def let(self, steps: int) -> None:
        with self._more:
            self._standing.clear()
            self._left = steps
            self._more.notify()

    async def wait(self) -> None:
        """Wait until the engine's thread stands before a step that may not run."""
        assert await asyncio.to_thread(self._standing.wait, LONGEST_S)

    def before_step(self) -> None:
        assert threading.current_thread().name == "remask-engine"
        with self._more:
            if not self._left:
                self._standing.set()
                assert self._more.wait_for(lambda: self._left, LONGEST_S)
            self._left -= 1

    def after_step(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed += 1


def test_results_are_those_of_the_engine_alone() -> None:
    async def act(engine: AsyncEngine) -> dict[str, Result]:
        tickets = [
            engine.submit(checked(engine, request(f"r{i}", prompt=6 + i, prefix=4).with_policy(Reuse())))
            for i in range(6)
        ]
        found: dict[str, Result] = {}
        for each in await asyncio.gather(*map(ends, tickets)):
            found |= each
        assert engine.running == engine.waiting == 0
        return found

    results = drive(act)
    assert len(results) == 6
    for i in range(6):
        expected = alone(Work(request(f"r{i}", prompt=6 + i, prefix=4), Reuse()))
        assert results[f"r{i}"].token_ids == expected.token_ids


def test_events_come_step_by_step_and_in_order() -> None:
    heard: list[Event] = []
    watched = request("r").with_readers(Drafts())

    async def act(engine: AsyncEngine) -> list[Event]:
        return [event async for events in engine.submit(checked(engine, watched)) for event in events]

    events = drive(act, listener=heard.append)
    assert heard == events
    assert events[0].queued_s is not None
    drafts = [event.draft for event in events if event.draft is not None]
    transfers = [event.transfer for event in events if event.transfer is not None]
    assert [draft.step for draft in drafts] == [transfer.step for transfer in transfers] == list(range(8))
    for draft, transfer in zip(drafts, transfers, strict=True):
        told = dict(zip(draft.positions, draft.token_ids, strict=True))
        assert [told[position] for position in transfer.positions] == list(transfer.token_ids)
        assert all(0 < confidence <= 1 for confidence in draft.confidences)
    assert events[-1].result is not None


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        (Dense(), [1] * 8),
        (BiCache(depth=3, refresh_interval=3), [1] * 8),
        (BiCache(BlockDual("separate"), depth=3, refresh_interval=3), [2, 1, 2, 1, 2, 1, 2, 1]),
    ],
)
def test_drafts_tell_all_the_work_of_their_steps(policy: CachePolicy, passes: list[int]) -> None:
    watched = request("r", prefix=5, max_tokens=8, block_length=2, steps=8).with_readers(Drafts())

    async def act(engine: AsyncEngine) -> list[Event]:
        return [
            event async for events in engine.submit(checked(engine, watched.with_policy(policy))) for event in events
        ]

    events = drive(act)
    drafts = [event.draft for event in events if event.draft is not None]
    result = next(event.result for event in events if event.result is not None)
    assert [len(draft.passes) for draft in drafts] == passes
    told = [work for draft in drafts for each in draft.passes for work in each]
    assert sum(work.rows * len(work.layers) for work in told) == result.usage.row_layers
    assert all(work.reused + work.refreshed == 5 for work in told)
    restored = [draft.step for draft in drafts if any(work.restored for each in draft.passes for work in each)]
    assert restored == ([] if isinstance(policy, Dense) else [0, 3, 6])


def test_a_client_has_room_for_some_requests_and_some_work() -> None:
    async def act(engine: AsyncEngine) -> None:
        engine.check_room("a", 3, 2000)
        engine.submit(checked(engine, *(replace(request(f"r{i}"), owner=Owner("a", "")) for i in range(2))))
        work = sum(each.row_layers for each in engine.open_requests.values())
        engine.check_room("a", 1, 2000 - work)
        engine.check_room("b", 1, 2000)
        for client, requests, row_layers, words in (
            ("a", 1, 2001 - work, f"{work} are open, and this one asks for {2001 - work}; try again later"),
            ("b", 1, 2001, "0 are open, and this one asks for 2001; ask for fewer answers"),
            ("b", 2, 1, "2 requests are running or waiting, this one needs room for 2"),
        ):
            with pytest.raises(QueueFullError, match=words):
                engine.check_room(client, requests, row_layers)

    drive(act, make_engine(max_num_seqs=1), max_queue=2, max_client_work=2000)


def test_drafts_that_nobody_reads_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is told, and drafts come again once some have been read."""
    monkeypatch.setattr(async_engine, "MAX_UNREAD", 5)
    draft = Draft(0, (1, 2), (3, 4), (0.5, 0.5))

    async def read(ticket: Ticket, count: int) -> list[Event]:
        return [event for _ in range(count) for event in await anext(aiter(ticket))]

    async def act() -> None:
        ticket = Ticket(["r"], lambda _: None)
        for token in range(4):
            ticket.deliver([Event("r", settled=(token,)), Event("r", draft=draft)])
        first = await read(ticket, 2)
        ticket.deliver([Event("r", draft=draft)])
        events = first + await read(ticket, 3)
        assert [token for event in events for token in event.settled] == [0, 1, 2, 3]
        drafts = [event.draft for event in events if not event.settled]
        assert drafts == [draft, draft, None, None, draft]

    asyncio.run(act())


def test_several_requests_share_a_ticket_or_none_is_accepted() -> None:
    async def act(engine: AsyncEngine) -> None:
        results = await ends(engine.submit(checked(engine, request("a"), request("b"))))
        assert set(results) == {"a", "b"}
        with pytest.raises(ConfigError, match="ids must differ"):
            engine.submit(checked(engine, request("e"), request("e")))
        assert engine.waiting == 0

    drive(act)


def test_a_full_queue_refuses_and_takes_again_later() -> None:
    async def act(engine: AsyncEngine) -> None:
        tickets = [engine.submit(checked(engine, long(f"r{i}"))) for i in range(4 + 2)]
        with pytest.raises(QueueFullError, match="the limit is 6"):
            engine.submit(checked(engine, request("more")))
        for ticket in tickets:
            ticket.cancel()
        await asyncio.gather(*map(ends, tickets))
        assert set(await ends(engine.submit(checked(engine, request("more"))))) == {"more"}

    drive(act, max_queue=2)
    with pytest.raises(ConfigError, match="max_queue"):
        AsyncEngine(make_engine(), -1)


def test_cancelling_frees_slot_and_lease_at_the_next_step() -> None:
    async def act(engine: AsyncEngine) -> None:
        ticket = engine.submit(checked(engine, long("r", prompt=8, prefix=4).with_policy(Reuse())))
        seen = ticket.__aiter__()
        while not any(event.transfer for event in await anext(seen)):
            pass
        await paced.wait()
        ticket.cancel()
        ticket.cancel()
        paced.let(-1)
        results = [event.result async for events in seen for event in events if event.result is not None]
        assert [result.finish_reason for result in results] == ["cancelled"]
        assert len(results[0].trace) < 32
        used, leases = await engine.call(lambda e: (e.allocator.used, [entry.leases for entry in e.store.entries]))
        assert leases == [0]
        assert used == 1 * 4, "the stored prefix alone"
        ticket.cancel()

    paced = Paced(4)
    drive(act, observer=paced)


def test_a_late_cancellation_leaves_the_next_request_of_that_id_alone() -> None:
    """A client may send an id again once its request has ended, before anybody has read that."""

    async def act(outer: AsyncEngine) -> str:
        first = outer.submit(checked(outer, request("r")))
        while outer.open_requests:
            await asyncio.sleep(0.01)
        second = outer.submit(checked(outer, request("r")))
        first.cancel()
        return (await ends(second))["r"].finish_reason

    assert drive(act) == "length"


def test_a_drain_waits_for_what_was_accepted_and_takes_nothing_more() -> None:
    async def act(engine: AsyncEngine) -> None:
        ticket = engine.submit(checked(engine, request("r")))
        waiting = asyncio.create_task(engine.drain(LONGEST_S))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            engine.submit(checked(engine, request("late")))
        results = await ends(ticket)
        assert results["r"].finish_reason == "length"
        assert await waiting == 0
        assert await engine.drain(0) == 0

    drive(act)


def test_a_drain_cancels_what_is_late() -> None:
    async def act(engine: AsyncEngine) -> None:
        ticket = engine.submit(checked(engine, long("r")))
        await paced.wait()
        late = asyncio.create_task(engine.drain(0))
        while not engine._commands:
            await asyncio.sleep(0)
        paced.let(-1)
        assert await late == 1
        assert (await ends(ticket))["r"].finish_reason == "cancelled"

    paced = Paced(2)
    drive(act, observer=paced)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_everybody_hears_of_a_dead_loop() -> None:
    engine, paced = make_engine(), Paced(0)
    healthy = engine.step

    def step() -> list[Event]:
        if paced.steps == 3:
            raise RuntimeError("the device fell off")
        return healthy()

    def lost() -> None:
        raise RuntimeError("the device fell off")

    vars(engine)["step"] = step
    vars(engine.memory)["reset"] = lost

    async def act(outer: AsyncEngine) -> None:
        tickets = [outer.submit(checked(outer, long(f"r{i}"))) for i in range(6)]
        call = asyncio.create_task(outer.call(lambda e: e.busy))
        paced.let(-1)
        for ticket in tickets:
            with pytest.raises(EngineDeadError, match="the device fell off"):
                await ends(ticket)
        await asyncio.gather(call, return_exceptions=True)
        assert not outer.alive
        assert outer.running == outer.waiting == 0
        with pytest.raises(EngineDeadError):
            outer.submit(checked(outer, request("late")))
        with pytest.raises(EngineDeadError):
            await outer.call(lambda e: e.busy)
        assert await outer.drain(1) == 0

    drive(act, engine, observer=paced)
    assert paced.closed == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, "5"])
def test_a_bad_time_without_requests_is_refused(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="trim_after"):
        AsyncEngine(make_engine(), 1, trim_after=seconds)


def test_a_call_that_waits_hears_of_a_dead_loop_too() -> None:
    engine = make_engine()

    def broken(_engine: Engine) -> None:
        raise SystemExit("not an Exception, so it ends the loop")

    async def act(outer: AsyncEngine) -> None:
        with pytest.raises(EngineDeadError, match="SystemExit"):
            await outer.call(broken)

    drive(act, engine)


def test_a_call_beside_the_end_of_the_thread_is_answered() -> None:
    closing, end = threading.Event(), threading.Event()

    class Lingering(Paced):
        def close(self) -> None:
            closing.set()
            assert end.wait(LONGEST_S)

    async def act(engine: AsyncEngine) -> None:
        stopping = asyncio.create_task(engine.stop())
        assert await asyncio.to_thread(closing.wait, LONGEST_S)
        late = asyncio.create_task(engine.call(lambda e: e.busy))
        await asyncio.sleep(0)  # it is posted, and nobody will look again
        end.set()
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            await late
        await stopping
        with pytest.raises(EngineDeadError, match="the engine has stopped"):
            engine.submit(checked(engine, request("later")))

    drive(act, observer=Lingering())


def test_who_uses_the_engine_without_a_ticket_takes_nothing_from_those_with_one() -> None:
    async def act(engine: AsyncEngine) -> dict[str, Result]:
        await engine.call(lambda e: e.add(long("theirs")))
        return await ends(engine.submit(checked(engine, request("ours"))))

    assert drive(act)["ours"].finish_reason == "length"


def test_calls_run_between_steps_and_raise_where_they_were_made() -> None:
    def name(_engine: Engine) -> str:
        return threading.current_thread().name

    def fails(_engine: Engine) -> None:
        raise KeyError("missing")

    async def act(engine: AsyncEngine) -> None:
        assert await engine.call(name) == "remask-engine"
        with pytest.raises(KeyError):
            await engine.call(fails)
        assert engine.alive

    drive(act)


def test_a_request_that_fails_after_it_was_checked_ends_alone() -> None:
    engine = make_engine()
    submit = engine.submit

    def choosy(pending: PendingRequest) -> None:
        if pending.request.id == "bad":
            raise ConfigError("refused")
        submit(pending)

    vars(engine)["submit"] = choosy

    async def act(outer: AsyncEngine) -> dict[str, Result]:
        return await ends(outer.submit(checked(outer, request("bad"), request("good"))))

    results = drive(act, engine)
    assert (results["bad"].finish_reason, results["bad"].error) == ("error", "refused")
    assert results["good"].finish_reason == "length"


def test_nothing_is_taken_before_the_start() -> None:
    outer = AsyncEngine(make_engine(), 1)
    with pytest.raises(EngineDeadError, match="not been started"):
        outer.submit(checked(outer, request("r")))


def test_an_idle_engine_is_not_overdue() -> None:
    """However long ago its last step began."""
    now = 0.0

    async def act(engine: AsyncEngine) -> None:
        nonlocal now
        await ends(engine.submit(checked(engine, request("r"))))
        now += 1e6
        assert engine.overdue_step_s is None

    drive(act, clock=lambda: now)


def test_memory_is_given_back_once_nothing_has_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once after each run, and not in steps."""
    given = [threading.Event(), threading.Event()]
    trimmed = list[int]()

    def trim() -> None:
        trimmed.append(1)
        given[len(trimmed) - 1].set()

    monkeypatch.setattr(async_engine, "trim_memory", trim)

    async def act(outer: AsyncEngine) -> None:
        for event in given:
            await ends(outer.submit(checked(outer, request())))
            assert await asyncio.to_thread(event.wait, 25)
        await outer.call(lambda engine: engine.busy)
        assert len(trimmed) == 2, "nothing has run since"

    drive(act, trim_after=0.001)


@pytest.mark.skipif(sys.platform != "linux" or not Path("/proc/self/statm").exists(), reason="needs Linux: its /proc")
def test_what_the_c_library_keeps_is_given_back() -> None:
    """Small pieces come from the heap, which does not shrink while the last of them is in use."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    if not hasattr(libc, "malloc_trim"):
        assert not trim_memory()
        return
    pieces = [libc.malloc(60_000) for _ in range(1000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 60_000)
    for piece in pieces[:-1]:
        libc.free(piece)
    held = resident()
    trim_memory()
    assert held - resident() > 40 << 20
    libc.free(pieces[-1])

"""Many clients at a time: nothing leaks, nothing is lost, and company changes no answer."""

import asyncio
import ctypes
import gc
import random
import resource
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import http_load
from tests.server.serving import (
    CHATS,
    LONG,
    SLOW,
    URL,
    Running,
    at_once,
    held,
    joined,
    left_alone,
    make_llm,
    serving,
    text_of,
)
from tests.waiting import LONGEST_S, eventually


def mixed(number: int) -> dict[str, Any]:
    """A body: some sampled, some streamed, under several policies."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": number, "ignore_eos": True},
        {"cache": "none"},
        {"cache": "bicache+block-dual", "block_length": 4, "steps": 16, "max_tokens": 16},
    ]
    return {"messages": CHATS[number % len(CHATS)], **kinds[number % len(kinds)]}


@pytest.mark.thorough
def test_an_answer_under_load_is_the_answer_alone(server: Running) -> None:
    bodies = [mixed(number) for number in range(14)]
    alone = [text_of(server.answer(URL, body)) for body in bodies]

    def ask(body: dict[str, Any]) -> str:
        return joined(server.stream(body)) if body.get("cache") is None else text_of(server.answer(URL, body))

    with ThreadPoolExecutor(len(bodies)) as pool:
        assert list(pool.map(ask, bodies)) == alone


@pytest.mark.few(2)
@pytest.mark.parametrize(("stream", "chunks"), [(True, 1), (True, 6), (False, 0)])
def test_clients_that_go_away_free_everything(server: Running, stream: bool, chunks: int) -> None:
    before = server.service.llm.engine.stats.steps
    with held(server, steps=12) as hold:
        with server.post(URL, {"messages": CHATS[0], **SLOW, "stream": stream}) as connection:
            hold.wait()
            with connection.makefile("rb") as answer:
                for _ in range(chunks):
                    while not answer.readline().startswith(b"data: "):
                        continue
        left_alone(server)
    server.settle()
    assert server.service.llm.engine.stats.steps - before <= 13, "it was not run to its end"
    told = server.cache()
    pages = sum(entry["layers"] * -(-entry["tokens"] // 16) for entry in told["entries"])
    assert told["pages"]["used"] == pages, "stored prefixes alone are in memory"


def test_a_prefix_in_use_is_not_dropped(server: Running) -> None:
    server.client.delete("/v1/cache")
    reads = {"cache": "bicache", "cache_config": {"depth": 5}}
    with server.client.stream("POST", URL, json={"messages": CHATS[0], **SLOW, **reads, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        (entry,) = server.cache()["entries"]
        assert entry["leases"] == 1
        refused = server.client.delete(f"/v1/cache/{entry['prefix_id']}")
        assert refused.status_code == 409
        assert server.client.delete("/v1/cache").json() == {"dropped": 0}
    server.settle()
    assert server.client.delete(f"/v1/cache/{entry['prefix_id']}").json() == {"dropped": 1}
    assert server.client.delete(f"/v1/cache/{entry['prefix_id']}").status_code == 404
    assert server.cache()["entries"] == []


@pytest.mark.thorough
def test_overload_is_429s_only_and_what_is_accepted_ends() -> None:
    """Four times as many clients as there is room for."""
    with serving(make_llm(max_num_seqs=2), max_queue=2) as running:

        def hammer(number: int) -> list[int]:
            rng = random.Random(number)
            bodies = [{**mixed(rng.randrange(24)), "deadline_s": 600} for _ in range(6)]
            return [running.chat(body).status_code for body in bodies]

        statuses = Counter(chain.from_iterable(at_once(*(partial(hammer, number) for number in range(16)))))
        assert statuses.keys() == {200, 429}
        assert statuses.total() == 96
        running.settle()
        running.client.delete("/v1/cache")
        assert running.cache()["pages"]["used"] == 0


def test_a_draining_server_ends_what_it_took_and_refuses_the_rest() -> None:
    with serving(drain_timeout=600.0) as running, ThreadPoolExecutor(1) as pool:
        with held(running, steps=2) as hold:
            early = pool.submit(running.ask, **LONG)
            hold.wait()
            running.service.engine.draining = True
            late = running.ask()
            assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
            probes = [running.client.get(path).status_code for path in ("/ready", "/live")]
            assert probes == [503, 200], "it takes no requests, and is not to be ended"
            assert late.headers["Retry-After"]
            assert running.client.get("/health").status_code == 503
        assert early.result().status_code == 200


def test_what_the_drain_cuts_short_is_told_so() -> None:
    with ThreadPoolExecutor(2) as pool:
        with serving(drain_timeout=0.0) as running:
            engine = running.service.engine
            loop = engine._loop
            assert loop is not None
            with held(running) as hold:
                whole = pool.submit(running.chat, {"messages": CHATS[0], **SLOW})
                streamed = pool.submit(running.chat, {"messages": CHATS[1], **SLOW, "stream": True})
                eventually(lambda: running.open == 2)
                hold.let(8)
                hold.wait()
                future = asyncio.run_coroutine_threadsafe(engine.drain(0.0), loop)
                left_alone(running)
            assert future.result(LONGEST_S) == 2
            assert whole.result().status_code == 503
            lines = streamed.result().text.split("\n")
        assert '"code":"draining"' in lines[-5]
        assert lines[-3] == "data: [DONE]"


def test_a_dead_engine_is_seen_by_all() -> None:
    with serving() as running:

        def broken() -> Any:
            raise RuntimeError("the device fell off")

        vars(running.service.llm.engine)["step"] = broken
        response = running.ask()
        assert response.status_code == 500
        assert "the device fell off" in response.json()["error"]["message"]
        assert running.ask().status_code == 500
        health = running.client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert [running.client.get(path).status_code for path in ("/ready", "/live")] == [503, 503]
        assert running.client.get("/metrics").status_code == 200
        assert running.client.get("/v1/cache").status_code == 500


SOAK = 10_000


def resident() -> int:
    """Bytes of memory that this process holds, once what is not in use has been given back."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps freed memory for the next time
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@dataclass
class Tally:
    """What the clients of a soak have seen between them."""

    left: int
    memory: list[int] = field(default_factory=list)  # bytes, after every tenth of the requests
    statuses: Counter[int] = field(default_factory=Counter)
    cancelled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> bool:
        """Whether there is one more request to send."""
        with self.lock:
            if self.left % (SOAK // 10) == 0 and 0 <= self.left < SOAK:
                self.memory.append(resident())
            self.left -= 1
            return self.left >= 0

    def note(self, status: int, cancelled: bool) -> None:
        """A request has been answered, or left."""
        with self.lock:
            self.statuses[status] += 1
            self.cancelled += cancelled and status == 200


def soak(running: Running, tally: Tally, seed: int) -> None:
    """One client: short requests of all kinds, every fifth one left at a random step."""
    own = random.Random(seed)
    with httpx.Client(base_url=running.base, timeout=60) as client:
        while tally.take():
            body = {**mixed(own.randrange(96)), "max_tokens": 4, "block_length": 2, "steps": 2}
            leaves = own.random() < 0.2
            if leaves:
                with client.stream("POST", URL, json={**body, **SLOW, "stream": True}) as response:
                    lines = response.iter_lines()
                    for _ in range(own.randrange(1, 8)):
                        next(lines, "")
                    tally.note(response.status_code, leaves)
            else:
                tally.note(client.post(URL, json=body).status_code, leaves)


@pytest.mark.soak
def test_ten_thousand_short_requests_leave_nothing_behind() -> None:
    """With cancels at random steps; memory stays where it was after the first thousand."""
    tally, started = Tally(SOAK), time.monotonic()
    with serving(make_llm(max_num_seqs=8, store_budget_tokens=600), max_queue=64) as running:
        at_once(*(partial(soak, running, tally, seed) for seed in range(12)))
        running.settle()
        told = ", ".join(str(size >> 20) for size in tally.memory)
        print(
            f"soak: {SOAK} requests in {time.monotonic() - started:.0f} s, {dict(tally.statuses)}, {tally.cancelled} "
            f"left at a random step; resident MiB after every {SOAK // 10}: {told}"
        )
        assert set(tally.statuses) == {200}
        assert sum(tally.statuses.values()) == SOAK
        assert tally.cancelled > SOAK // 10
        assert resident() - tally.memory[0] < 32 << 20
        assert not running.service.engine._tickets
        running.client.delete("/v1/cache")
        assert running.cache()["pages"]["used"] == 0


@pytest.mark.soak
def test_accepted_requests_end_in_bounded_time_at_four_times_the_capacity() -> None:
    """Arrivals at four times the rate that full slots and a full queue keep up with, both measured here."""
    with serving(make_llm(max_num_seqs=2), max_queue=2) as running:
        asks = http_load.asks(240, prefixes=4, seed=0)
        started = time.monotonic()
        full = asyncio.run(http_load.send_all(running.base, asks[:80], at_a_time=4))
        rate = len(full) / (time.monotonic() - started)
        assert all(told.status == 200 for told in full), "so many are always accepted"
        over = asyncio.run(http_load.send_all(running.base, asks, rate=4 * rate))
        assert {told.status for told in over} == {200, 429}
        accepted = [told.seconds for told in over if told.status == 200]
        usual, slow = (np.percentile(times, 99) for times in ([told.seconds for told in full], accepted))
        print(
            f"overload: capacity {rate:.1f}/s, offered {4 * rate:.1f}/s; {len(accepted)} of {len(asks)} accepted; "
            f"p99 {slow:.2f} s, at capacity {usual:.2f} s"
        )
        assert len(accepted) > 20
        assert slow < 3 * usual, "refused requests cost the others little"
        running.settle()
        running.client.delete("/v1/cache")
        assert running.cache()["pages"]["used"] == 0

"""Half an hour of load on `remask serve`: a canary beside hostile clients, and what the process holds afterwards."""

import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from remask.server.app import create_app
from remask.server.config import ServerConfig
from tests.cli.test_serve import Process, served
from tests.server.largest import Bounds, largest_bodies
from tests.server.serving import CHATS, make_llm
from tests.server.test_hostile_neighbour import (
    KINDS,
    Load,
    Send,
    abusive,
    client_at,
    ordinary,
    running_load,
    watch,
)
from tests.waiting import LONGEST_S, eventually

pytestmark = pytest.mark.soak
SECONDS = float(os.environ.get("REMASK_SOAK_SECONDS", "600"))  # of each load
SIX = [f"127.0.0.{10 + number}" for number in range(6)]  # connections of as many clients
ONE = ["127.0.0.10"] * 6  # of one
PATIENCE_S = 5.0  # a hostile client leaves what takes longer
MOST_WAIT, MOST_MEMORY = 3.0, 1.25  # beside and after hostile clients, over ordinary ones
COMPLETIONS = "/v1/completions"
SMALL = {"prompt": "from ivy", "max_tokens": 16}
LARGE: list[tuple[str, dict[str, Any]]] = [
    # What froze servers, or let one client starve the others.
    (COMPLETIONS, {**SMALL, "structured_outputs": {"json": {"type": "string", "pattern": "(a|b)" * 200_000}}}),
    (COMPLETIONS, {**SMALL, "structured_outputs": {"json": {"prefixItems": [{"type": "null"}] * 100_000}}}),
    (COMPLETIONS, {**SMALL, "uniform": {"initial_canvas": [5] * 500_000}}),
    (COMPLETIONS, {**SMALL, "remasking": {"order": [[1]] * 400_000}}),
    (COMPLETIONS, {"prompt": "a", "n": 128, "max_tokens": 900, "steps": 900, "cache": "none"}),
    (COMPLETIONS, {"prompt": "a", "n": 128, "max_tokens": 64, "steps": 64, "block_length": 64, "cache": "none"}),
]


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of memory, descriptors, processes of its own."""

    memory: int
    descriptors: int
    children: int

    @classmethod
    def of(cls, process: int) -> "Held":
        folder = Path("/proc") / str(process)
        (resident,) = [line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS:")]
        return cls(int(resident.split()[1]) << 10, len(list((folder / "fd").iterdir())), len(children(process)))


def children(process: int) -> list[int]:
    """The processes that a process has started and that run."""
    tasks = (Path("/proc") / str(process) / "task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def impatient(load: Load, client: httpx.Client, path: str, body: object) -> None:
    """Send a body, and leave where its answer takes long."""
    try:
        load.note(client.post(path, json=body, timeout=PATIENCE_S))
    except httpx.TimeoutException:
        load.statuses[0] += 1


def mixed(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """A question of the bundled task, or, once in 20 times, a long text."""
    if rng.random() < 0.95:
        ordinary(load, client, rng)
        return
    length = rng.choice((256, 512, 896))
    body = {**SMALL, "max_tokens": length, "block_length": 32, "steps": length // 8, "ignore_eos": True}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    load.note(answer)


def slow_form(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """A form that takes long to compile, each time another."""
    form = f"(a|b)*a(a|b){{{rng.randint(12, 40)}}}{rng.random()}"
    impatient(load, client, COMPLETIONS, {**SMALL, "structured_outputs": {"regex": form}})


def slow_head(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """A request that comes byte by byte, and never ends."""
    with suppress(OSError), _connected(client) as connection:
        for byte in b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"[: rng.randint(5, 40)]:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
    load.statuses[0] += 1


def unread_drafts(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """A stream of ten choices with drafts, of which nothing is read."""
    chat = {"messages": rng.choice(CHATS), "n": 10, "max_tokens": 256, "stream": True, "stream_drafts": True}
    content = json.dumps({**chat, "steps": 256, "block_length": 1, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with suppress(OSError), _connected(client) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(PATIENCE_S)
    load.statuses[0] += 1


def _connected(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), LONGEST_S)


def large_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Bodies of which one field is as large as may be, of less than 4 MB."""
    document = create_app(make_llm(), ServerConfig(model_names=["a"])).openapi()
    bounds = [(Bounds(1 << 18, 1 << 20), 0), (Bounds(400, 400), 1), (Bounds(40, 40), 3)]
    found = [(path, body) for most, deep in bounds for path, _, body in largest_bodies(document, most, deep)]
    return [(path, body) for path, body in found if len(json.dumps(body)) < 4 << 20]


def hostile(process: Process) -> Send:
    """Takes turns among all that hostile clients do. Now and then one of the server's own processes is killed."""
    largest, lock = large_bodies(), threading.Lock()

    def kill(load: Load, _client: httpx.Client, rng: random.Random) -> None:
        if own := children(process.process.pid):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(own), signal.SIGKILL)
        load.statuses[0] += 1

    def known(number: int) -> Send:
        return lambda load, client, rng: abusive(load, client, rng, number)

    def sends(path: str, body: dict[str, Any]) -> Send:
        return lambda load, client, _: impatient(load, client, path, body)

    def any_large(load: Load, client: httpx.Client, rng: random.Random) -> None:
        impatient(load, client, *rng.choice(largest))

    own = [any_large, any_large, slow_form, slow_head, unread_drafts, kill]
    turns = itertools.cycle(enumerate([*map(known, range(KINDS)), *(sends(*each) for each in LARGE), *own]))

    def send(load: Load, client: httpx.Client, rng: random.Random) -> None:
        with lock:
            kind, act = next(turns)
        act(load, client, rng)
        load.kinds.add(kind)

    return send


def idle(process: Process) -> Held:
    """What the process holds once nothing runs, and memory was given back."""
    eventually(lambda: not process.accepted(), 10 * LONGEST_S)
    time.sleep(10)
    return Held.of(process.process.pid)


def test_hostile_clients_for_half_an_hour() -> None:
    """The canary waits at most `MOST_WAIT` times as long as beside as many clients who ask for short and long texts.

    Its text never differs, and the process holds afterwards what it held after those.
    """
    with served("bundled-transit") as process, client_at(process.base, "127.0.0.2") as canary:
        longest = {"prompt": "a", "n": 128, "max_tokens": 900, "steps": 1, "block_length": 900, "ignore_eos": True}
        assert canary.post(COMPLETIONS, json=longest).status_code == 200  # what the longest canvases take is taken
        loads, held = {}, {}
        for name, send in (("short", ordinary), ("mixed", mixed), ("hostile", hostile(process))):
            end = time.monotonic() + SECONDS
            with running_load(process.base, send, ONE if name == "hostile" else SIX) as load:
                watch(canary, load, lambda _, end=end: time.monotonic() >= end, 1.0)  # type: ignore[misc]
            loads[name], held[name] = load, idle(process)
            assert canary.get("/health").status_code == 200
        assert len({frozenset(load.texts) for load in loads.values()}) == 1
    for name, load in loads.items():
        print(f"{name}: canary {load.told}; answers {dict(sorted(load.statuses.items()))}; afterwards {held[name]}")
    usual, after = held["mixed"], held["hostile"]
    assert loads["hostile"].p99 <= MOST_WAIT * loads["mixed"].p99
    assert after.memory <= MOST_MEMORY * usual.memory
    assert after.descriptors <= usual.descriptors + 8, "beside the pipes of a process that reads large bodies"

"""A canary beside hostile clients: it is answered as beside as many ordinary ones, and nothing is lost."""

import itertools
import random
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.bodies import bodies
from tests.server.serving import CHATS, Running, make_llm, serving
from tests.server.test_hostile import COMPLETIONS, HOSTILE
from tests.waiting import LONGEST_S

CHAT = "/v1/chat/completions"
GENERATORS = ["127.0.0.1"] * 4  # connections beside the canary's: each sends its next request when the last is over
CANARIES = 12  # beside each of the two loads, in every run of the tests
ROW_LAYERS = 40_000  # of one request: some hundred steps of a usual canvas
KINDS = 8  # of hostile requests; they take turns, so that slow machines send all of them too
POLICIES = ("none", "bicache", "block-dual", "dllm-cache", "bicache+block-dual")


class Load:
    """What clients sent for a while, and what came back.

    Attributes:
        kinds: of hostile requests that were answered.
        times: seconds that the canary waited for each of its answers.
        texts: all different answers to the canary.
        statuses: of all answers to the generators; 0 for connections that they left or that were closed.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.texts: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self.kinds: set[int] = set()
        self.over = threading.Event()
        self.failures: list[BaseException] = []

    @property
    def p99(self) -> float:
        return max(self.times) if len(self.times) < 100 else statistics.quantiles(self.times, n=100)[98]

    @property
    def told(self) -> str:
        """How long it waited, in words."""
        median, p99, most = (1e3 * each for each in (statistics.median(self.times), self.p99, max(self.times)))
        return f"median {median:.0f} ms, p99 {p99:.0f} ms, at most {most:.0f} ms of {len(self.times)}"

    def start(self, run: Callable[[], None]) -> threading.Thread:
        """A thread that calls `run` until the load is over."""

        def loop() -> None:
            try:
                while not self.over.is_set():
                    run()
            except BaseException as failure:
                self.failures.append(failure)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def note(self, response: httpx.Response) -> None:
        """Count an answer. Whatever a client sends, the server fails on nobody's account."""
        self.statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code in (503, 504), response.read()


Send: TypeAlias = Callable[[Load, httpx.Client, random.Random], None]


def client_at(base: str, address: str) -> httpx.Client:
    """A client of the server at `base`, at a loopback address of its own."""
    return httpx.Client(base_url=base, timeout=LONGEST_S, transport=httpx.HTTPTransport(local_address=address))


@contextmanager
def running_load(base: str, generate: Send, addresses: Sequence[str]) -> Iterator[Load]:
    """Connections from `addresses` that call `generate` again and again until the block ends."""
    load = Load()
    clients = [client_at(base, address) for address in addresses]
    threads = []
    for number, client in enumerate(clients):
        rng = random.Random(number)
        threads.append(load.start(lambda client=client, rng=rng: generate(load, client, rng)))  # type: ignore[misc]
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
    assert not load.failures, load.failures[0]


def watch(client: httpx.Client, load: Load, enough: Callable[[Load], bool], pause: float = 0.0) -> None:
    """Send the canary's request until it is `enough`, and note how long each takes. All are answered, and alike."""
    body = {"messages": CHATS[0], "seed": 1}
    while not load.failures and not enough(load):
        began = time.monotonic()
        response = client.post(CHAT, json=body)
        load.times.append(time.monotonic() - began)
        assert response.status_code == 200, response.text
        load.texts.add(response.json()["choices"][0]["message"]["content"])
        if pause:
            time.sleep(pause)
    assert len(load.texts) == 1


def ordinary(load: Load, client: httpx.Client, rng: random.Random) -> None:
    load.note(client.post(CHAT, json={"messages": rng.choice(CHATS)}))


def abusive(load: Load, client: httpx.Client, rng: random.Random, kind: int) -> None:
    """What hostile clients send, one of `KINDS` kinds."""
    match kind:
        case 0:
            _, fields, _ = rng.choice([each for each in HOSTILE if each[0] == "masked"])
            load.note(client.post(COMPLETIONS, json={"prompt": "from ivy", **fields}))
        case 1:
            load.note(client.post(COMPLETIONS, json={"prompt": "from ivy " * 400_000}))
        case 2:
            load.note(client.post(COMPLETIONS, json={"prompt": [""] * 100_000}))
        case 3:
            load.note(client.post(COMPLETIONS, content=b"x" * 5_000_000))
        case 4:
            load.note(
                client.post(COMPLETIONS, content=rng.randbytes(200), headers={"Content-Type": "application/json"})
            )
        case 5:
            with client.stream("POST", CHAT, json={"messages": rng.choice(CHATS), "stream": True}) as response:
                load.note(response)
                next(response.iter_bytes(), b"")  # and then the client leaves
            load.statuses[0] += 1
        case 6:
            with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as half:
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            load.statuses[0] += 1
        case _:
            ordinary(load, client, rng)


def at_random(running: Running) -> Send:
    """Hostile clients that also send bodies from the whole ranges of the declared fields."""
    vocab = running.service.llm.loaded.config.vocab
    kinds = itertools.cycle(range(KINDS))

    def generate(load: Load, client: httpx.Client, rng: random.Random) -> None:
        @settings(max_examples=1, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(body=bodies("masked", POLICIES, vocab, usual=False))
        def send(body: dict[str, Any]) -> None:
            load.note(client.post(COMPLETIONS, json=body))

        if rng.random() < 0.3:
            send()
        else:
            kind = next(kinds)
            abusive(load, client, rng, kind)
            load.kinds.add(kind)

    return generate


def enough(kinds: int, load: Load) -> bool:
    """Whether the canary and whoever is there beside it were answered often enough, to so many kinds of requests."""
    return len(load.times) >= CANARIES and len(load.kinds) >= kinds and load.statuses.total() >= CANARIES


@pytest.mark.thorough
def test_a_canary_is_answered_beside_hostile_clients() -> None:
    """Beside ordinary clients, then beside hostile ones, on one server."""
    with serving(make_llm(max_request_row_layers=ROW_LAYERS)) as running:
        watch(running.client, Load(), lambda load: len(load.times) > 1)  # the first requests fill caches
        with running_load(running.base, ordinary, GENERATORS) as usual:
            watch(running.client, usual, partial(enough, 0))
        with running_load(running.base, at_random(running), GENERATORS) as hostile:
            watch(running.client, hostile, partial(enough, KINDS))
        running.settle()
        assert running.client.get("/health").status_code == 200
        assert running.service.engine.engine.stats.recoveries == 0
    assert usual.texts == hostile.texts
    for name, load in (("ordinary", usual), ("hostile", hostile)):
        print(f"{name}: canary {load.told}; answers {dict(sorted(load.statuses.items()))}")
    assert set(usual.statuses) == {200}
    assert {0, 200, 400, 413} <= set(hostile.statuses), "they did what they came for"

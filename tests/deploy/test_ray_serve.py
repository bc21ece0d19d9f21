"""Two replicas on this machine, behind Ray Serve and behind `vllm-router`. Starting Ray twice takes a minute."""

import asyncio
import importlib.util
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import http_load
from tests.deploy.fleets import ROUTER, emptied, fleet, named, router, two_servers
from tests.http_load import Ask
from tests.server.serving import CHATS, URL
from tests.waiting import LONGEST_S, eventually

pytestmark = pytest.mark.soak
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make soak EXTRAS=dev,ray")
BUDGET = 1300  # tokens: five prefixes of the eight
ASKS: Sequence[Ask] = http_load.asks(40, prefixes=8, seed=0)  # four prefixes for each of two servers


def hit_ratio(base_url: str, asks: Sequence[Ask] = ASKS) -> float:
    """Share of the prompt tokens that were read from stores, of all requests sent to one address."""
    return http_load.hit_ratio(asyncio.run(http_load.send_all(base_url, asks, at_a_time=2)))


@pytest.fixture(autouse=True)
def rays_folder_goes() -> Iterator[None]:
    """Ray keeps the folders of its sessions."""
    yield
    shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)


LIMITS = ("--max-queue", "4", "--max-num-seqs", "4", "--max-body-bytes", "50000", "--min-replicas", "2")


def held(client: httpx.Client) -> dict[str, dict[str, object]]:
    """What the stores of the replicas hold, by replica."""
    told = {}
    for _ in range(20):
        response = client.get("/v1/cache")
        told[response.headers["x-remask-replica"]] = response.json()
    return told


@needs_ray
def test_prefixes_go_where_they_are_held_and_answers_stream_through(tmp_path: Path) -> None:
    with fleet(str(tmp_path), BUDGET, *LIMITS) as base, httpx.Client(base_url=base, timeout=LONGEST_S) as client:
        by_prefix = hit_ratio(base)
        assert len(held(client)) == 2
        homes = [{client.post(URL, json=ask.body).headers["x-remask-replica"] for _ in range(2)} for ask in ASKS[:16]]
        assert all(len(home) == 1 for home in homes)

        refused = client.post(URL, json={"messages": CHATS[0], "tools": [1]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        large = client.post(URL, content=b"x" * 60_000)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        assert client.get("/health").json()["status"] == "ok"

        long = {"max_tokens": 700, "block_length": 1, "steps": 700, "ignore_eos": True, "stream": True}
        with client.stream("POST", URL, json={"messages": CHATS[0], **long}) as response:
            home = response.headers["x-remask-replica"]
            lines = (line for line in response.iter_lines() if line)
            chunks = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            assert leases(client, home) == 1, "text came while the request runs"
        eventually(lambda: leases(client, home) == 0)
        nobody = client.get("/v1/cache", headers={"X-Remask-Replica": "nobody"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "not_found")
    with fleet(str(tmp_path), BUDGET, *LIMITS, "--routing", "round-robin") as base:
        in_turn = hit_ratio(base)
    print(f"hit ratio of {len(ASKS)} requests: by prefix {by_prefix:.3f}, round-robin {in_turn:.3f}")
    assert by_prefix > in_turn, "however the eight fall on two replicas of random names"


def leases(client: httpx.Client, replica: str) -> int:
    """Running requests that read from the store of one replica."""
    response = client.get("/v1/cache", headers={"X-Remask-Replica": replica})
    assert response.headers["x-remask-replica"] == replica
    return sum(entry["leases"] for entry in response.json()["entries"])


@needs_ray
def test_a_second_replica_comes_up_under_queued_load(tmp_path: Path) -> None:
    """Twelve requests are kept open where a replica is to have two; the second replica then answers some of them."""
    scaling = ["--max-replicas", "2", "--target-ongoing-requests", "2", "--upscale-delay", "2"]
    scaling += ["--max-num-seqs", "2", "--max-queue", "32"]
    body = {"messages": CHATS[0], "max_tokens": 64, "block_length": 1, "steps": 64, "ignore_eos": True}
    with fleet(str(tmp_path), BUDGET, *scaling) as base, httpx.Client(base_url=base, timeout=300) as client:
        started, stop = time.monotonic(), threading.Event()
        seen: dict[str, float] = {}

        def ask(number: int) -> None:
            salt = 0
            while not stop.is_set():
                # Prefixes of their own, so that not all belong to one replica.
                response = client.post(URL, json={**body, "cache_salt": f"{number} {salt}"})
                assert response.status_code == 200, response.text
                seen.setdefault(response.headers["x-remask-replica"], time.monotonic() - started)
                salt += 1

        with ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask, number) for number in range(12)]
            try:
                eventually(lambda: len(seen) == 2 or any(each.done() for each in asking), 400)
            finally:
                stop.set()
            for each in asking:
                each.result()
    assert len(seen) == 2
    first, second = sorted(seen.values())
    print(f"autoscaling: under queued load the second replica answered {second - first:.0f} s after the first")


def replica_processes(home: Path) -> list[int]:
    """The processes of the replicas of the fleet that has `home`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            title, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if title.startswith(b"ray::ServeReplica:remask:Replica") and f"HOME={home}\0".encode() in environment:
            found.append(int(entry.name))
    return found


@needs_ray
def test_requests_of_a_killed_replica_are_answered_by_the_other_or_end_with_an_error(tmp_path: Path) -> None:
    whole = {"messages": CHATS[0], "max_tokens": 128, "block_length": 1, "steps": 128, "ignore_eos": True}
    two = ("--min-replicas", "2")
    with fleet(str(tmp_path), BUDGET, *two) as base, httpx.Client(base_url=base, timeout=300) as client:
        begun: queue.Queue[str] = queue.Queue()

        def ask(number: int) -> None:
            response = client.post(URL, json={**whole, "cache_salt": str(number)})
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 128

        def stream(replica: str) -> str:
            """The code of the error that ended a stream from `replica`; empty where none did."""
            headers, body = {"X-Remask-Replica": replica}, {**whole, "stream": True}
            with client.stream("POST", URL, json=body, headers=headers) as response:
                lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
                assert next(lines)
                begun.put(replica)
                *_, last, done = lines
            assert done == "[DONE]"
            return str(json.loads(last).get("error", {}).get("code", ""))

        names = list(held(client))
        assert len(names) == 2
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, number) for number in range(4)]
            streamed = {name: [pool.submit(stream, name) for _ in range(2)] for name in names}
            assert sorted(begun.get(timeout=120) for _ in range(4)) == sorted(names * 2)
            killed, _ = replica_processes(tmp_path)
            os.kill(killed, signal.SIGKILL)
            for each in asked:
                each.result(timeout=300)
            ends = sorted([each.result(timeout=300) for each in own] for own in streamed.values())
    assert ends == [["", ""], ["replica_lost", "replica_lost"]]


@pytest.mark.skipif(ROUTER is None, reason="needs the router: pip install vllm-router")
def test_a_named_prefix_goes_where_it_is_held() -> None:
    with two_servers(BUDGET) as servers:
        with router("consistent_hash", *emptied(servers)) as base:
            hashed = hit_ratio(base, [named(ask) for ask in ASKS])
        with router("round_robin", *emptied(servers)) as base:
            in_turn = hit_ratio(base)
    print(f"hit ratio of {len(ASKS)} requests: consistent_hash {hashed:.3f}, round_robin {in_turn:.3f}")
    assert hashed > in_turn + 0.1

"""Two replicas behind Ray Serve on this machine. Starting Ray twice takes most of a minute: `scripts/soak`."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deploy.fleets import ASKS, BUDGET, START, free_port, hit_ratio, process
from tests.server.serving import CHATS, URL, eventually

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'remask[ray]'"),
]


@contextmanager
def fleet(home: Path, routing: str) -> Iterator[str]:
    """`remask deploy` with two replicas; Ray keeps its token in `home`."""
    limits = [
        "--store-budget-tokens",
        str(BUDGET),
        "--max-queue",
        "4",
        "--max-num-seqs",
        "4",
        "--max-body-bytes",
        "50000",
    ]
    words = ["deploy", "bundled", "--dtype", "float32", "--min-replicas", "2", "--routing", routing, *limits]
    command = [sys.executable, "-c", START, *words, "--num-cpus", "0.5", "--port", str(free_port())]
    settings = {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    with process(command, r"INFO running on (http://\S+)", **settings) as base:
        yield base


def held(client: httpx.Client) -> dict[str, dict[str, object]]:
    """What the stores of the replicas hold, by replica."""
    told = {}
    for _ in range(20):
        response = client.get("/v1/cache")
        told[response.headers["x-remask-replica"]] = response.json()
    return told


def test_prefixes_go_where_they_are_held_and_answers_stream_through(tmp_path: Path) -> None:
    with fleet(tmp_path, "prefix") as base, httpx.Client(base_url=base, timeout=60) as client:
        by_prefix = hit_ratio(base)
        assert len(held(client)) == 2
        homes = [{client.post(URL, json=ask.body).headers["x-remask-replica"] for _ in range(2)} for ask in ASKS[:16]]
        assert all(len(home) == 1 for home in homes)

        refused = client.post(URL, json={"messages": CHATS[0], "tools": [1]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        large = client.post(URL, content=b"x" * 60_000)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        assert client.get("/health").json() == {"status": "ok"}

        long = {"max_tokens": 700, "block_length": 1, "steps": 700, "ignore_eos": True, "stream": True}
        with client.stream("POST", URL, json={"messages": CHATS[0], **long}) as response:
            home = response.headers["x-remask-replica"]
            lines = (line for line in response.iter_lines() if line)
            chunks = [json.loads(next(lines).removeprefix("data: ")) for _ in range(4)]
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            assert leases(client, home) == 1, "text came while the request runs"
        eventually(lambda: leases(client, home) == 0, 20)
        nobody = client.get("/v1/cache", headers={"X-Remask-Replica": "nobody"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "not_found")
    with fleet(tmp_path, "round-robin") as base:
        in_turn = hit_ratio(base)
    print(f"hit ratio of {len(ASKS)} requests: by prefix {by_prefix:.3f}, round-robin {in_turn:.3f}")
    assert by_prefix > in_turn, "however the eight fall on two replicas of random names"


def leases(client: httpx.Client, replica: str) -> int:
    """Running requests that read from the store of one replica."""
    response = client.get("/v1/cache", headers={"X-Remask-Replica": replica})
    assert response.headers["x-remask-replica"] == replica
    return sum(entry["leases"] for entry in response.json()["entries"])

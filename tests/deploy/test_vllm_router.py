"""`vllm-router` before two plain servers, with prefixes named in a header and with round-robin."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.deploy.fleets import ASKS, BUDGET, START, free_port, hit_ratio, named, process
from tests.server.serving import eventually

ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(ROUTER is None, reason="needs the router: pip install vllm-router"),
]
SERVE = ["serve", "bundled", "--port", "0", "--dtype", "float32", "--store-budget-tokens", str(BUDGET)]


@contextmanager
def router(policy: str, *workers: str) -> Iterator[str]:
    """The router in front of servers with empty stores."""
    for worker in workers:
        httpx.delete(f"{worker}/v1/cache").raise_for_status()
    port = str(free_port())
    words = [str(ROUTER), "--host", "127.0.0.1", "--port", port, "--worker-urls", *workers, "--policy", policy]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    base = f"http://127.0.0.1:{port}"
    with process([*words, *metrics], "(Starting server on)"):
        eventually(lambda: answers(base))
        yield base


def answers(base: str) -> bool:
    """Whether somebody listens."""
    try:
        return httpx.get(f"{base}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_named_prefix_goes_where_it_is_held() -> None:
    command = [sys.executable, "-c", START, *SERVE]
    listens = r"running on (http://127\.0\.0\.1:\d+)"
    with process(command, listens) as one, process(command, listens) as other:
        with router("consistent_hash", one, other) as base:
            hashed = hit_ratio(base, [named(ask) for ask in ASKS])
        with router("round_robin", one, other) as base:
            in_turn = hit_ratio(base)
    print(f"hit ratio of {len(ASKS)} requests: consistent_hash {hashed:.3f}, round_robin {in_turn:.3f}")
    assert hashed > in_turn + 0.1

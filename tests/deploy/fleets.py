"""Servers and fleets in processes of their own, for as long as a test needs them."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import xxhash

from remask.deploy.routing import prefix_identity
from tests.http_load import Ask

REMASK = (sys.executable, "-c", "import sys; from remask.cli import main; sys.exit(main())")
ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
START_S, STOP_S = 300, 90


@contextmanager
def process(words: Sequence[str], pattern: str, **environment: str) -> Iterator[str]:
    """A process until the block ends, stopped by SIGTERM. Yields the first group of `pattern` in its output."""
    lines: list[str] = []
    env = {**os.environ, **environment}
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert child.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(child.stdout,))
    reader.start()
    try:
        yield _awaited(child, lines, pattern)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            status = child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        reader.join()
        child.stdout.close()
    assert status in (0, -signal.SIGTERM), "".join(lines[-50:])


def _awaited(child: "subprocess.Popen[str]", lines: list[str], pattern: str) -> str:
    end = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < end:
        found = re.search(pattern, "".join(list(lines)))
        if found is not None:
            return found.group(1)
        time.sleep(0.02)
    raise AssertionError(f"the output has no {pattern!r}:\n{''.join(list(lines))}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def server(*words: str) -> Iterator[str]:
    """`remask serve` on a free port. Yields its address."""
    with process([*REMASK, "serve", "--port", "0", *words], r"running on (http://\S+:\d+)") as url:
        yield url


@contextmanager
def two_servers(budget: int) -> Iterator[list[str]]:
    """Two plain servers, whose stores hold `budget` tokens. Yields their addresses."""
    words = ["bundled-transit", "--dtype", "float32", "--threads", "1", "--store-budget-tokens", str(budget)]
    with server(*words) as one, server(*words) as other:
        yield [one, other]


def emptied(servers: Sequence[str]) -> Sequence[str]:
    """The servers, once their stores are empty."""
    for base in servers:
        httpx.delete(f"{base}/v1/cache").raise_for_status()
    return servers


@contextmanager
def fleet(home: str, budget: int, *own: str) -> Iterator[str]:
    """`remask deploy` with these further words. Ray keeps its token in `home`. Yields its address."""
    words = ["deploy", "bundled-transit", "--dtype", "float32", "--num-cpus", "0.5", "--port", str(free_port())]
    words += ["--store-budget-tokens", str(budget), *own]
    settings = {"OMP_NUM_THREADS": "1", "HOME": home, "RAY_USAGE_STATS_ENABLED": "0"}
    with process([*REMASK, *words], r"INFO running on (http://\S+)", **settings) as base:
        yield base


@contextmanager
def router(policy: str, *workers: str) -> Iterator[str]:
    """`vllm-router` in front of servers. Yields its address."""
    port = str(free_port())
    words = [str(ROUTER), "--host", "127.0.0.1", "--port", port, "--worker-urls", *workers, "--policy", policy]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    base = f"http://127.0.0.1:{port}"
    with process([*words, *metrics], "(Starting server on)"):
        while not _is_healthy(base):
            time.sleep(0.05)
        yield base


def _is_healthy(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def named(ask: Ask) -> Ask:
    """The same with a header that names its prefix, for routers that hash one."""
    identity = prefix_identity(ask.body)
    assert identity is not None
    return replace(ask, headers=(("X-Session-ID", xxhash.xxh64_hexdigest(identity)),))

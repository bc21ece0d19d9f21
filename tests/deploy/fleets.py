"""Two replicas of the bundled model, and what they are asked: more prefixes than one replica's store can hold."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import xxhash

from remask.deploy.identity import prefix_identity
from remask.evals.serving.load import Load, put
from remask.evals.serving.mix import Ask, Mix
from remask.evals.serving.target import Target, find_target
from tests.server.serving import eventually

START = "import sys; from remask.cli import main; sys.exit(main())"
BUDGET = 1300  # tokens: five prefixes of the eight
BUNDLED = Target("http://unused", "bundled", info={"model_path": "bundled"})
ASKS: Sequence[Ask] = Mix(num_prompts=40, prefixes=8, seed=3).draw(BUNDLED)


def named(ask: Ask) -> Ask:
    """The request with its prefix named in a header, for routers that hash one."""
    identity = prefix_identity(ask.body)
    assert identity is not None
    return replace(ask, headers={"X-Session-ID": xxhash.xxh64_hexdigest(identity)})


def hit_ratio(base_url: str, asks: Sequence[Ask] = ASKS) -> float:
    """Share of the prompt tokens that were read from stores, of all requests sent to one address."""
    outcomes = asyncio.run(put(find_target(base_url), asks, Load(max_concurrency=2))).outcomes
    assert [outcome.message for outcome in outcomes if outcome.error is not None] == []
    assert all(outcome.correct for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.input_tokens for outcome in outcomes)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def process(words: Sequence[str], pattern: str, **environment: str) -> Iterator[str]:
    """A process until the block ends; gives what `pattern` finds in its output, once it is there."""
    lines: list[str] = []
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    assert child.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(child.stdout,))
    reader.start()

    def found() -> str | None:
        match = re.search(pattern, "".join(list(lines)))
        return None if match is None else match.group(1)

    try:
        eventually(lambda: child.poll() is not None or found() is not None, 300)
        assert child.poll() is None, "".join(lines)
        yield found() or ""
    finally:
        child.send_signal(signal.SIGTERM)
        status = child.wait(90)
        reader.join()
        child.stdout.close()
    assert status in (0, -signal.SIGTERM), "".join(lines[-50:])

"""Servers of processes of their own, and where the time of a load on them goes."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import httpx

from remask.engine.engine import EngineStats
from remask_lab.load.target import Target, find_target

REMASK = (sys.executable, "-c", "import sys; from remask.cli import main; sys.exit(main())")
START_S, STOP_S = 300, 90
_SAMPLE = re.compile(r"^(?:remask:)?(\w+?)(?:\{model_name=[^}]*\})? (\S+)$", re.MULTILINE)


@contextmanager
def process(words: Sequence[str], pattern: str, **environment: str) -> Iterator[str]:
    """A process until the block ends, which stops it by SIGTERM; gives what `pattern` finds in its output, once there.

    Raises `RuntimeError` where the process ends before, or with another status than that of a stop.
    """
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
        status = child.wait(STOP_S)
        reader.join()
        child.stdout.close()
    if status not in (0, -signal.SIGTERM):
        raise RuntimeError(f"{words[:4]} ended with status {status}:\n{''.join(lines[-50:])}")


def _awaited(child: "subprocess.Popen[str]", lines: list[str], pattern: str) -> str:
    end = time.monotonic() + START_S
    while child.poll() is None and time.monotonic() < end:
        found = re.search(pattern, "".join(list(lines)))
        if found is not None:
            return found.group(1)
        time.sleep(0.02)
    raise RuntimeError(f"{pattern!r} was not said in {START_S} s:\n{''.join(list(lines))}")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(*words: str) -> Iterator[Target]:
    """`remask serve` with these words on a free port, until the block ends."""
    with process([*REMASK, "serve", "--port", "0", *words], r"running on (http://\S+:\d+)") as url:
        yield find_target(url)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Readings that only grow. Times are in seconds.

    Attributes:
        wall: of this process' clock.
        steps: of the engine.
        in_steps: what the engine's thread spent in them.
        engine: of that, what it computed itself; the rest it waited: for the interpreter's lock, for a core, for helper
            threads, for a device.
        server: what the server's process computed beside that: HTTP, JSON, tokenizing, and helper threads of the model.
        client: what this process computed.
    """

    wall: float
    steps: float
    in_steps: float
    engine: float
    server: float
    client: float

    @classmethod
    def of_engine(cls, stats: EngineStats) -> "Clocks":
        """Now, where the engine is in this process and there is no server."""
        return cls(time.perf_counter(), stats.steps, stats.step_seconds, stats.step_cpu_seconds, 0.0, 0.0)

    @classmethod
    def of_server(cls, target: Target) -> "Clocks":
        """Now, by the metrics of a server and the clocks of this process."""
        text = httpx.get(f"{target.base_url}/metrics", headers=dict(target.headers)).raise_for_status().text
        found = {name: float(value) for name, value in _SAMPLE.findall(text)}
        engine = found["engine_step_cpu_seconds_total"]
        return cls(
            wall=time.perf_counter(),
            steps=found["engine_steps_total"],
            in_steps=found["engine_step_seconds_total"],
            engine=engine,
            server=found["process_cpu_seconds_total"] - engine,
            client=time.process_time(),
        )

    def since(self, before: "Clocks") -> "Clocks":
        """What has passed between two readings."""
        return Clocks(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


def overhead(alone: Clocks, served: Clocks) -> dict[str, float]:
    """What serving adds to the time of an engine alone with the same requests, as shares of the time served.

    `total` is the sum of the other three: the engine's thread computes more slowly, as it shares caches; it waits more
    in steps, for the interpreter's lock and for cores; and it spends time outside of steps, taking work in or having
    none.
    """

    def lost(of: Any) -> float:
        return float(of(served) - of(alone)) / served.wall

    return {
        "total": lost(lambda clocks: clocks.wall),
        "computing_slower": lost(lambda clocks: clocks.engine),
        "waiting_in_steps": lost(lambda clocks: clocks.in_steps - clocks.engine),
        "between_steps": lost(lambda clocks: clocks.wall - clocks.in_steps),
    }


def per_request(spent: Sequence[Clocks], requests: int) -> dict[str, float]:
    """The median over turns of what each of `requests` took: steps, and milliseconds of the clocks."""
    told = {}
    for each in fields(Clocks):
        values = sorted(getattr(clocks, each.name) / requests for clocks in spent)
        middle = values[len(values) // 2]
        told["steps" if each.name == "steps" else f"{each.name}_ms"] = middle if each.name == "steps" else 1e3 * middle
    return told

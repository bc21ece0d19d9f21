"""Servers in processes of their own, and the parts of the time of a load on them."""

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from remask.engine.stats import EngineStats
from remask_lab.load.target import Target, find_target, read_metrics
from remask_lab.speed.command import REMASK

START_S, STOP_S = 300, 90
_SAMPLE = re.compile(r"^(?:remask:)?(\w+?)(?:\{model_name=[^}]*\})? (\S+)$", re.MULTILINE)


@contextmanager
def process(words: Sequence[str], pattern: str, **environment: str) -> Iterator[str]:
    """Run a process until the block ends, then stop it by SIGTERM. Yields the first group of `pattern` in its output.

    Raises `RuntimeError` where the process ends earlier, or with another status than that of a stop.
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
        try:
            status = child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
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
    state = f"after {START_S} s" if child.poll() is None else f"and the process ended with status {child.returncode}"
    raise RuntimeError(f"the output has no {pattern!r} {state}:\n{''.join(list(lines))}")


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(*words: str) -> Iterator[Target]:
    """Run `remask serve` with these words on a free port, until the block ends."""
    with process([*REMASK, "serve", "--port", "0", *words], r"running on (http://\S+:\d+)") as url:
        yield find_target(url)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Readings of counters that only grow. Times are in seconds.

    Attributes:
        wall: the clock of this process.
        steps: the number of steps of the engine.
        in_steps: the time of the engine's thread in these steps.
        engine: the CPU time of that thread in them. For the rest it waited: for the interpreter's lock, a core, helper
            threads, or a device.
        server: the server process' other CPU time: HTTP, JSON, tokenizing, and helper threads of the model.
        client: the CPU time of this process.
    """

    wall: float
    steps: float
    in_steps: float
    engine: float
    server: float
    client: float

    @classmethod
    def of_engine(cls, stats: EngineStats) -> "Clocks":
        """Read the clocks of an engine in this process, without a server."""
        return cls(time.perf_counter(), stats.steps, stats.step_seconds, stats.step_cpu_seconds, 0.0, 0.0)

    @classmethod
    def of_server(cls, target: Target) -> "Clocks":
        """Read the metrics of a server and the clocks of this process."""
        found = {name: float(value) for name, value in _SAMPLE.findall(read_metrics(target))}
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
        """The difference between two readings."""
        return Clocks(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


def overhead(alone: Clocks, served: Clocks) -> dict[str, float]:
    """The time that serving adds to that of an engine alone with the same requests, as shares of the time served.

    `total` is the sum of the other three. The engine's thread computes more slowly, because it shares caches. It waits
    more in steps, for the interpreter's lock and for cores. And it spends time between steps, where it accepts requests
    or has none.
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
    """The median over turns of the steps and the milliseconds that each of `requests` took."""
    medians = {}
    for each in fields(Clocks):
        values = sorted(getattr(clocks, each.name) / requests for clocks in spent)
        middle = values[len(values) // 2]
        medians["steps" if each.name == "steps" else f"{each.name}_ms"] = (
            middle if each.name == "steps" else 1e3 * middle
        )
    return medians

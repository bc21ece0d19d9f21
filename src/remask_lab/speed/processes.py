"""Whole processes: the start of the command line, and commands beside busy neighbours."""

import argparse
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from remask.checks.values import one_of
from remask.machine.cpu import read_cpu
from remask_lab.records.machine import commit, conditions, host
from remask_lab.speed.command import REMASK, median_and_range

PYTHON, TORCH = "python -c pass", "python -c 'import torch'"
STARTS: Mapping[str, Sequence[str]] = {
    PYTHON: (sys.executable, "-c", "pass"),
    TORCH: (sys.executable, "-c", "import torch"),
    "python -c 'import remask'": (sys.executable, "-c", "import remask"),
    "remask --version": (*REMASK, "--version"),
    "remask --help": (*REMASK, "--help"),
}


def startup(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of starting Python, PyTorch and remask.

    Runs bare Python, `import torch`, `import remask`, `remask --version` and `remask --help` in turns, each in a
    process of its own, and takes the CPU time of the process, user and system together. One round before the others
    fills the caches of files. Each time is reported in seconds, in seconds above bare Python, and as a ratio to
    `import torch`: medians over rounds, and ranges.
    """
    rounds = [{name: _cpu_seconds(words) for name, words in STARTS.items()} for _ in range(args.rounds + 1)][1:]
    results = {}
    for name in STARTS:
        figures = {
            "cpu_s": [each[name] for each in rounds],
            "above_python_s": [each[name] - each[PYTHON] for each in rounds],
            "ratio_to_torch": [each[name] / each[TORCH] for each in rounds],
        }
        results[name] = _summary(figures)
    about = {"machine": {**host(), "python": platform.python_version()}, "commit": commit()}
    return {**about, "rounds": args.rounds, "results": results}


def _cpu_seconds(words: Sequence[str]) -> float:
    """User and system time of a process and its children. Raises `CalledProcessError` where the process fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _summary(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {key: found for name, each in figures.items() for key, found in median_and_range(each, name).items()}


AUTO = "auto"
NEIGHBOUR = (sys.executable, "-c", "while True: pass")
COMMANDS: Mapping[str, Sequence[str]] = {
    "demo": ("demo", "--picture", "depth.png"),
    "bench": ("bench", "--model", "bundled-tariff", "--requests", "48", "--rounds", "1"),
}


def neighbours(args: argparse.Namespace) -> dict[str, Any]:
    """What busy neighbours cost: the time of a command alone on the machine, and beside processes that never pause.

    Runs `remask demo`, or `remask bench` on the bundled model, each time in a process of its own, so that the start
    counts too. Turns alone and turns beside the neighbours alternate. Each neighbour is a process of this command's
    priority that computes without end. The aim is a `ratio` of at most 2 with `auto`, for which the command chooses its
    number of threads. The turns alone say what others used meanwhile: on a machine with other work their times are no
    idle ones.
    """
    one_of("--command", args.command, COMMANDS)
    words = [*REMASK, "--quiet", *COMMANDS[args.command]]
    words += [] if args.requests is None else ["--requests", str(args.requests)]
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in args.threads.split(",")}
    alone: list[dict[str, object]] = []
    for _ in range(args.rounds):
        for name, own in turns.items():
            command = [*words, *([] if name == AUTO else ["--threads", name])]
            began = read_cpu()
            idle = _seconds(command)
            alone.append(conditions(began))
            with busy(args.neighbours):
                own.append((idle, _seconds(command)))
    threads = {}
    for name, own in turns.items():
        idle_s, beside_s = zip(*own, strict=True)
        threads[name] = _summary({"alone_s": idle_s, "beside_s": beside_s, "ratio": [b / a for a, b in own]})
    asked = {"command": " ".join(COMMANDS[args.command]), "neighbours": args.neighbours, "rounds": args.rounds}
    return {"machine": host(), "commit": commit(), **asked, "threads": threads, "alone": alone}


def _seconds(command: Sequence[str]) -> float:
    """Time that a process takes in a folder of its own. Raises `CalledProcessError` where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(folder))
        return time.perf_counter() - start


@contextmanager
def busy(number: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that compute without end, as long as the block lasts."""
    with ExitStack() as stack:
        started = []
        for _ in range(number):
            started.append(stack.enter_context(subprocess.Popen(NEIGHBOUR)))
            stack.callback(started[-1].kill)
        yield started

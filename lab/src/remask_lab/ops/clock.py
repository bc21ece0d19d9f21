"""Clocks: the time of nested operations, each without the operations inside it, and the time of whole calls."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from remask.engine.engine import Engine
from remask_lab.observe import SECTIONS, run_in_sections

REST = "rest"  # planning, scheduling, embedding, residuals, and rows carried or restored between stages
OPERATIONS = (*SECTIONS, REST)


class Clock:
    """Divides the time from `start` to `stop` among operations. Every moment belongs to exactly one of them.

    On CUDA it records events of the current stream, without waiting, and times are the device's: an operation lasts
    until its kernels are done, idle time of the device included. Elsewhere times are the host's.
    """

    def __init__(self, device: torch.device, rest: str) -> None:
        """`rest` is the name under which the time outside of all operations is counted."""
        self._rest = rest
        cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _event if cuda else time.perf_counter
        self._between: Callable[[Any, Any], float] = _elapsed if cuda else lambda begin, end: end - begin
        self._stack: list[str] = []
        self._marks: list[tuple[Any, str]] = []  # a time, and the operation that runs from then on

    def start(self) -> None:
        """Begin a measurement, outside of all operations."""
        self._stack, self._marks = [], []
        self._mark(self._rest)

    def stop(self) -> Mapping[str, float]:
        """End the measurement, wait for the device, and return each operation's seconds, without those inside it."""
        self._mark(self._rest)
        seconds: dict[str, float] = {}
        for (begin, name), (end, _) in pairwise(self._marks):
            seconds[name] = seconds.get(name, 0.0) + self._between(begin, end)
        return seconds

    def running(self, name: str) -> "_Running":
        """A context manager that counts time for the operation `name`, except while another one runs inside it."""
        return _Running(self, name)

    def enter(self, name: str) -> None:
        """Begin an operation inside the current one."""
        self._stack.append(name)
        self._mark(name)

    def leave(self) -> None:
        """End the current operation and continue the one around it."""
        self._stack.pop()
        self._mark(self._stack[-1] if self._stack else self._rest)

    def _mark(self, name: str) -> None:
        self._marks.append((self._now(), name))


class _Running:
    """The context manager of `Clock.running`, a class because a generator would take longer than some operations."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()


def time_operations(engine: Engine) -> Clock:
    """Let a clock time the operations of `engine` from now on, and return the clock."""
    clock = Clock(engine.model.device, REST)
    run_in_sections(engine, clock.running)
    return clock


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until `device` has done its work."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _elapsed(begin: Any, end: Any) -> float:
    """Seconds between two CUDA events; waits for the second."""
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds

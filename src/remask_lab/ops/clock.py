"""A clock for nested operations: each is given the time that passes in it, without what runs inside it for others."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch


class Clock:
    """Time of one stretch after another, read from `start` to `stop`; every moment belongs to one operation.

    On CUDA the marks are events of the current stream, which wait for nothing, and times are the device's own: an
    operation is given the time until what it launched is done, and what the device idles while the host prepares it.
    Elsewhere times are the host's.
    """

    def __init__(self, device: torch.device, rest: str) -> None:
        self._rest = rest
        cuda = device.type == "cuda"
        self._now: Callable[[], Any] = _event if cuda else time.perf_counter
        self._between: Callable[[Any, Any], float] = _elapsed if cuda else _difference
        self._stack: list[str] = []
        self._marks: list[tuple[Any, str]] = []  # when, and whose time begins

    def start(self) -> None:
        """The stretch begins; time is the rest's until an operation runs."""
        self._stack, self._marks = [], []
        self._mark(self._rest)

    def stop(self) -> Mapping[str, float]:
        """The stretch ends. Seconds by operation, which add up to all of it; waits for the device."""
        self._mark(self._rest)
        seconds: dict[str, float] = {}
        for (begin, name), (end, _) in pairwise(self._marks):
            seconds[name] = seconds.get(name, 0.0) + self._between(begin, end)
        return seconds

    def running(self, name: str) -> "_Running":
        """Time is that operation's within the block, until another one runs inside."""
        return _Running(self, name)

    def enter(self, name: str) -> None:
        """An operation begins, inside the one that ran."""
        self._stack.append(name)
        self._mark(name)

    def leave(self) -> None:
        """It ends, and the one around it goes on."""
        self._stack.pop()
        self._mark(self._stack[-1] if self._stack else self._rest)

    def _mark(self, name: str) -> None:
        self._marks.append((self._now(), name))


class _Running:
    """`Clock.running`; a class, as a generator would cost more than what it measures."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._clock.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()


def _difference(begin: float, end: float) -> float:
    return end - begin


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _elapsed(begin: Any, end: Any) -> float:
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds

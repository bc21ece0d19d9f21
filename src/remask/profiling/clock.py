"""A clock for nested operations: each is given the time that passes in it, without what runs inside it for others."""

import time
from collections.abc import Mapping
from types import TracebackType

import torch


class Clock:
    """Time of one stretch after another, read from `start` to `stop`; every moment belongs to one operation.

    On CUDA the marks are events of the current stream, so that they wait for nothing, and times are the device's own: an
    operation is given the time until what it launched is done, idle time while the host prepares it included. Elsewhere
    they are the host's.
    """

    def __init__(self, device: torch.device, rest: str) -> None:
        self._cuda, self._rest = device.type == "cuda", rest
        self._stack: list[str] = []
        self._marks: list[tuple[float | torch.cuda.Event, str]] = []  # when, and whose time begins

    def start(self) -> None:
        """The stretch begins; time is the rest's until an operation runs."""
        self._stack, self._marks = [], []
        self._mark(self._rest)

    def stop(self) -> Mapping[str, float]:
        """The stretch ends. Seconds by operation, which add up to all of it; waits for the device."""
        self._mark(self._rest)
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (begin, name), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            seconds[name] = seconds.get(name, 0.0) + _between(begin, end)
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
        if not self._cuda:
            self._marks.append((time.perf_counter(), name))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, name))


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


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds from one mark to the next."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    return begin.elapsed_time(end) / 1e3

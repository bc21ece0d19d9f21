"""What tests wait for, and the clocks that they move: no test passes or fails by the time that something takes."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

LONGEST_S = 120.0  # only keeps a broken test from waiting for ever
PAUSE_S = 0.005


def eventually(reached: Callable[[], object], longest: float = LONGEST_S) -> None:
    """Wait for a state that other threads or processes bring about, and that has no event to wait for."""
    end = time.monotonic() + longest
    while not reached():
        assert time.monotonic() < end, f"not reached in {longest:g} s"
        time.sleep(PAUSE_S)


def ended(pid: int) -> bool:
    """Whether a process has ended; its parent may still have to collect it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


class Clock:
    """A clock that shows what the test says, and goes on by `tick` seconds whenever it is read."""

    def __init__(self, now: float = 1000.0, tick: float = 0.0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time goes on by itself, and leaps when the test says so. All its timers follow."""

    _leapt = 0.0

    def time(self) -> float:
        return super().time() + self._leapt

    def leap(self, seconds: float) -> None:
        """Let so many seconds pass, and run what was due meanwhile. For other threads than the loop's."""

        async def act() -> None:
            self._leapt += seconds
            for _ in range(4):  # the timers, what they schedule, and what that closes
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(act(), self).result(LONGEST_S)

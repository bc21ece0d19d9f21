"""Which functions of `remask` a call enters: what a reader has to know to follow it.

    python -m tests.engine.entered

prints those of a steady step, file by file.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import remask
from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams

SOURCE = Path(remask.__file__).parent
STEPS = 16


@contextmanager
def entered(*, threads: bool = False) -> Iterator[dict[CodeType, int]]:
    """Calls of each function of `remask` while the block runs; with `threads` also on those that start in it.

    Comprehensions and generators count as functions.
    """
    calls: dict[CodeType, int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{SOURCE}/"):
            calls[frame.f_code] = calls.get(frame.f_code, 0) + 1

    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    if threads:
        threading.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def steady_step() -> Callable[[], None]:
    """A step in the middle of a block, of one plain request under `bicache` whose prefix is not refreshed in it."""
    llm = LLM("bundled", device="cpu", threads=1, engine=EngineConfig(attention="torch", overlap=False, graphs=False))
    engine, policy = llm.engine, llm.session.policy("bicache", {"depth": 2, "refresh_interval": STEPS})
    params = SamplingParams(max_tokens=STEPS, block_length=STEPS, steps=STEPS)
    engine.add(Request("0", range(5, 69), params, 48, policy))
    for _ in range(4):
        engine.step()
    refreshes = engine.stats.refreshes

    def step() -> None:
        (event,) = engine.step()
        assert event.transfer is not None
        assert event.result is None
        assert engine.stats.refreshes == refreshes

    return step


def report(calls: dict[CodeType, int]) -> str:
    """The files with their functions, and how many there are."""
    files: dict[str, list[str]] = {}
    for code in calls:
        files.setdefault(Path(code.co_filename).relative_to(SOURCE).as_posix(), []).append(code.co_qualname)
    lines = [f"{name}: {', '.join(sorted(functions))}" for name, functions in sorted(files.items())]
    return "\n".join([*lines, f"{len(files)} files, {len(calls)} functions"])


if __name__ == "__main__":
    steady = steady_step()
    with entered() as found:
        steady()
    print(report(found))

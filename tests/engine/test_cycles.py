"""What a request leaves behind is free at once: its tensors do not wait for the garbage collector."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from remask.engine.prefix_pass import PrefixPass
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from tests.engine.support import CPU


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_and_prefix_passes_are_in_no_cycle(monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    made: list[weakref.ref[Any]] = []
    for kind in (RunningRequest, PrefixPass):

        def noted(self: Any, *arguments: Any, begin: Any = kind.__init__, **named: Any) -> None:
            begin(self, *arguments, **named)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", noted)
    llm = LLM("bundled", device=str(CPU), threads=1)
    engine = llm.engine
    policy = llm.session.policy("bicache", {"depth": 2})
    params = SamplingParams(max_tokens=6, block_length=6, steps=6)
    for number in range(2):
        engine.add(Request(str(number), range(5, 69), params, 48, policy))
    steps = 0
    while engine.busy:
        if cancelled and steps == 3:
            for number in range(2):
                engine.cancel(str(number))
        engine.step()
        steps += 1
    engine.step()
    assert len(made) == 3
    assert [each() for each in made] == [None] * 3

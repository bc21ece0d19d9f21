"""What a step in the middle of a block launches, sends, waits for and calls, counted without a device and without data.

Neither launches nor copies nor waits may grow with the number of requests, and bytes only by what each must tell.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remask.checkpoint.loaded import dummy_weights
from remask.engine import pack, runner
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.machine.transfers import send
from remask.model import executors, graphs, stage
from remask.model.graphs import Graphs
from remask.model.transformer import Transformer
from remask.model.weights import empty_weights
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, name_of
from remask.request.sampling_params import SamplingParams
from remask.sampling import choice
from tests.engine.entered import entered
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import CPU, small_config
from tests.engine.test_no_waits import reads_of
from tests.model.test_launches import Count

CONFIG = replace(small_config("llada"), layers=4)
BLOCK, LENGTH = 16, 64
POLICIES: list[CachePolicy] = [
    Dense(),
    BlockDual(),
    BiCache(Dense(), 2, BLOCK),
    BiCache(BlockDual(), 2, BLOCK),
]


class Noted:
    """A kernel that computes nothing and notes that it was launched."""

    def __init__(self, name: str, count: Count) -> None:
        self.name, self.count = name, count

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return lambda *_, **__: self.count.names.append(self.name)


@dataclass
class Step:
    """What one step has done: what it launched, the bytes of each copy to the device, and how often it waited."""

    count: Count = field(default_factory=Count)
    sent: list[int] = field(default_factory=list)
    waits: int = 0

    @property
    def launches(self) -> int:
        return len(self.count.names)


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Step]:
    """Whatever is computed while this is open is noted."""
    from remask.model import attention_triton, layer_triton  # which the tested set of packages lacks
    from remask.sampling import kernels_triton

    kernels = {
        attention_triton: ("_attend", "_merge"),
        layer_triton: ("_sum_and_norm", "_heads", "_gate"),
        kernels_triton: ("_greedy", "_transfer"),
    }
    step = Step()

    def sent(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        step.sent.append(array.nbytes)
        return send(array, device)

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        before = len(step.count.names)
        work()
        del step.count.names[before:]
        return lambda: step.count.names.append("graph")

    for kernel_module, names in kernels.items():
        for name in names:
            patch.setattr(kernel_module, name, Noted(name, step.count))
    for module in (pack, runner, stage, attention_triton, graphs, choice):
        patch.setattr(module, "send", sent)
    patch.setattr(executors, "capture_on", lambda _: captured)
    patch.setattr(Graphs, "run", Graphs.run.__wrapped__)  # type: ignore[attr-defined]  # without poisoned buffers
    with FakeTensorMode(), step.count:
        yield step


def steady(policy: CachePolicy, requests: int, patch: pytest.MonkeyPatch, **limits: Any) -> Step:
    """One step in the middle of a block, without a refresh."""
    with watched(patch) as step:
        model = Transformer(CONFIG, empty_weights(CONFIG, torch.float32, CPU))
        engine = Engine(
            model,
            EngineConfig(
                max_num_seqs=requests,
                max_model_len=LENGTH,
                page_size=16,
                store_budget_tokens=LENGTH,
                attention="triton",
                **limits,
            ),
            "counted",
        )
        reads = reads_of(engine, patch)
        params = SamplingParams(max_tokens=32, block_length=BLOCK, steps=32, ignore_eos=True)
        for number in range(requests):
            engine.add(Request(str(number), [7] * 16 + [8, 9], params, 16, policy))
        while engine.waiting or engine.stats.steps < 6:
            engine.step()
        step.count.names.clear()
        step.sent.clear()
        refreshes, before = engine.stats.refreshes, len(reads.shapes)
        engine.step()
        assert engine.stats.refreshes == refreshes or policy == Dense()
        step.waits = len(reads.shapes) - before
    return step


MODES: dict[str, dict[str, bool]] = {
    "plain": {"overlap": False, "graphs": False},
    "graphs": {"overlap": False, "graphs": True},
    "overlap": {"overlap": True, "graphs": True},
}
# Of one stage and of three. A graph holds a layer, or all where one stage has them; each stage's rows go into buffers
# first. With overlap tokens are taken from their buffer (2), the device chooses (1), and its choice joins the scores.
LAUNCHES = {"plain": (48, 55), "graphs": (9, 24), "overlap": (13, 28)}


@NEEDS_TRITON
@pytest.mark.few(6)
@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_step_launches_and_waits_as_often_for_any_number_of_requests(
    policy: CachePolicy, mode: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = steady(policy, requests, monkeypatch, **MODES[mode])
    most = LAUNCHES[mode][isinstance(policy, BiCache)]
    assert step.launches <= most, Counter(step.count.names)
    assert step.waits == 1
    # Tokens of all rows and predicted rows in one copy. With overlap predicted rows alone, and in a second one of each
    # its request, its place and how it is chosen, and six numbers of each request.
    assert len(step.sent) == 1 + (mode == "overlap")
    assert sum(step.sent) <= 8 * requests * (4 * BLOCK + 6 if mode == "overlap" else LENGTH + BLOCK)


@pytest.mark.parametrize(("overlap", "most"), [(False, 40), (True, 85)])
@pytest.mark.parametrize("policy", [Dense(), BlockDual(), BiCache(BlockDual(), 2, BLOCK)], ids=name_of)
def test_one_request_more_calls_few_functions(policy: CachePolicy, overlap: bool, most: int) -> None:
    """Of the package, in a step in the middle of a block."""
    model, calls = Transformer(CONFIG, dummy_weights(CONFIG, torch.float32, CPU)), list[int]()
    for requests in (2, 10):
        limits = EngineConfig(max_num_seqs=requests, max_model_len=LENGTH, store_budget_tokens=LENGTH, overlap=overlap)
        engine = Engine(model, limits, "counted")
        params = SamplingParams(max_tokens=32, block_length=32, steps=16, ignore_eos=True)
        for number in range(requests):
            engine.add(Request(str(number), [3] * 32, params, 24, policy))
        while engine.waiting or engine.stats.steps < 6:
            engine.step()
        with entered() as found:
            engine.step()
        calls.append(sum(found.values()))
    assert (calls[1] - calls[0]) / 8 <= most

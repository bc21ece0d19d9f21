"""How much a layer launches where Triton's kernels compute between products. They run in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from remask.checks import AttentionName
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.model.transformer import Transformer
from remask.policies import BiCache, CachePolicy, Dense
from remask.policies.block import BlockDual
from remask.policies.dllm import DllmCache
from remask.request.sampling_params import SamplingParams
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import lively_weights, small_config

pytestmark = NEEDS_TRITON
LARGEST = 12  # launches of a layer
# What computes nothing: another shape for the same numbers, room for numbers, and what a stage sends once.
FREE = {"view", "_unsafe_view", "slice", "select", "t", "transpose", "expand", "unsqueeze", "squeeze", "split", "alias"}
FREE |= {"detach", "flatten", "permute", "reshape", "unbind", "as_strided", "lift_fresh"}
FREE |= {"empty", "empty_like", "new_empty", "split_with_sizes", "device"}


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is launched: operations that compute, and kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Kernel:
    """A kernel that notes its launches. What its interpreter does by PyTorch is none."""

    def __init__(self, kernel: Any, count: Count) -> None:
        self.kernel, self.count = kernel, count

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count.names.append(self.kernel.__name__)
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Count]:
    from remask.model import attention_triton, layer_triton

    count = Count()
    for module, names in (
        (attention_triton, ("_attend", "_merge")),
        (layer_triton, ("_sum_and_norm", "_heads", "_gate")),
    ):
        for name in names:
            patch.setattr(module, name, Kernel(getattr(module, name), count))
    with count:
        yield count


class Counting(Transformer):
    count: Count
    launched: list[list[str]]
    before = 0

    def project(self, *inputs: Any) -> Tensor:
        self.before = len(self.count.names)
        return super().project(*inputs)

    def finish_layer(self, *inputs: Any) -> Tensor:
        out = super().finish_layer(*inputs)
        self.launched.append(self.count.names[self.before :])
        return out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "requests"), [(Dense(), 1), (BiCache(BlockDual(), 1, 2), 2), (DllmCache(4, 2), 2)], ids=repr
)
def test_a_layer_is_a_few_launches(policy: CachePolicy, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy, the number of canvases and the leases; matrix products are four of them."""
    config = replace(small_config("llada"), layers=2)
    weights = lively_weights(config, torch.float32)
    with counted(monkeypatch) as count:
        model = Counting(config, weights)
        model.count, model.launched = count, []
        tokens = answers(model, policy, requests, "triton")
    assert len(model.launched) >= config.layers
    assert max(map(len, model.launched)) <= LARGEST, max(model.launched, key=len)
    assert all(names.count("linear") == 4 for names in model.launched)
    assert {"_heads", "_attend", "_gate", "_sum_and_norm"} <= set(model.launched[0])
    assert tokens == answers(Transformer(config, weights), policy, requests, "torch")


def answers(
    model: Transformer, policy: CachePolicy, requests: int, attention: AttentionName
) -> dict[str, tuple[int, ...]]:
    """The tokens of some requests, which share a prefix."""
    engine = Engine(model, EngineConfig(max_num_seqs=4, max_model_len=8, page_size=4, attention=attention), "test")
    params = SamplingParams(max_tokens=2, steps=2, block_length=2, ignore_eos=True)
    for number in range(requests):
        engine.add(Request(str(number), [7] * 4 + [9 + number], params, 4, policy))
    found = dict[str, tuple[int, ...]]()
    while engine.busy:
        found |= {event.id: event.result.token_ids for event in engine.step() if event.result is not None}
    return found

"""What captures work: it is repeated on the same memory, and the code that made it is not run again."""

import gc
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from remask.errors import ConfigError
from remask.model.graphs import capture_on
from tests.device import device
from tests.engine.executors import NEEDS_TRITON
from tests.recording import recorded_on

Operation = Callable[[Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "product": lambda x, w: x @ w.t(),
    "in place": lambda x, w: (x @ w).add_(1).mul_(2),
    "views": lambda x, w: (x.view(2, 2, 4).transpose(0, 1)[1] @ w).t().contiguous(),
    "several results": lambda x, w: torch.cat(x.chunk(2)[::-1]) + x.topk(4, dim=1).values @ w,
    "named result": lambda x, w: torch.add(x, w, out=torch.empty_like(x)),
    "room": lambda x, w: x.new_empty(x.shape).copy_(x).index_copy_(0, torch.arange(2, device=x.device), w[:2]),
    "indices": lambda x, w: x[w.argsort(dim=0)[:, 0]],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_work_is_repeated_on_what_stands_in_its_memory(name: str) -> None:
    place = torch.device(device())
    x, w = (torch.randn(4, 4, device=place) for _ in range(2))
    out, calls = torch.zeros_like(OPERATIONS[name](x, w)), list[int]()

    def work() -> None:
        calls.append(1)
        out.copy_(OPERATIONS[name](x, w))

    again = recorded_on(place)(work)
    torch.testing.assert_close(out, OPERATIONS[name](x, w))
    made = len(calls)
    for _ in range(2):
        x.normal_()
        again()
        torch.testing.assert_close(out, OPERATIONS[name](x, w))
    assert len(calls) == made, "what is repeated is not the code"


def test_what_a_graph_has_captured_is_not_lost_with_the_next() -> None:
    place, x = torch.device(device()), torch.zeros(3, device=torch.device(device()))
    capture = recorded_on(place)

    def add() -> None:
        x.add_(torch.ones_like(x) + 1)

    def halve() -> None:
        x.sub_(x / 2)

    more, less = capture(add), capture(halve)
    x.fill_(4)
    more()
    less()
    more()
    assert x.tolist() == [5, 5, 5]


def test_memory_that_nothing_was_written_to_is_nan() -> None:
    """On a CPU: in a graph it would be whatever others have left there."""
    x, out = torch.ones(4), torch.zeros(4)

    def work() -> None:
        room = x.new_empty(4)
        room[:2] = x[:2]
        out.copy_(room)

    again = recorded_on(torch.device("cpu"))(work)
    again()
    assert out.isnan().tolist() == [False, False, True, True]


def test_a_number_for_the_host_cannot_be_captured() -> None:
    x = torch.ones(3)

    def work() -> None:
        x.mul_(x.sum().item())

    with pytest.raises(RuntimeError, match="gives the host a number"):
        recorded_on(torch.device("cpu"))(work)


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_devices_without_graphs_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"graphs=True needs a CUDA device, and the device is {name}; leave graphs"):
        capture_on(torch.device(name))


@NEEDS_TRITON
def test_kernels_are_repeated() -> None:
    from remask.model.layer_triton import TritonLayer
    from tests.engine.support import small_config

    place = torch.device(device())
    layer = TritonLayer(small_config("llada"))
    x, out = torch.randn(3, 8, device=place), torch.zeros(3, 4, device=place)

    def work() -> None:
        out.copy_(layer.gate(x))

    again = recorded_on(place)(work)
    x.normal_()
    again()
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of an engine that is gone may be part of it, and freeing one ends the capture."""

    class Graph:
        def capture_begin(self, **_: object) -> None: ...
        def capture_end(self) -> None: ...
        def replay(self) -> None: ...

    stand_ins = {
        "CUDAGraph": Graph,
        "Stream": lambda _: None,
        "graph_pool_handle": tuple,
        "synchronize": lambda _: None,
    }
    for name, stand_in in {**stand_ins, "stream": lambda _: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    collects: list[bool] = []

    def work() -> None:
        collects.append(gc.isenabled())
        if fails and len(collects) == 2:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory") if fails else nullcontext():
        capture_on(torch.device("cuda"))(work)
    assert collects == [True, False]
    assert gc.isenabled()

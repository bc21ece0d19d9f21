"""Which way of computing attention is chosen, how kernels are timed, and what is refused."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.families import preset
from remask.model import cpu_kernels, executors
from remask.model.attention import NumpyAttention
from remask.model.attention_torch import TorchAttention
from remask.model.cpu_kernels import ROWS, SIDE, Kernel, average, dtype_speeds, speeds
from remask.model.executors import graphs_obstacle, resolve_executor
from remask.model.invariant import UnitwiseAttention
from remask.model.transformer import Transformer
from remask.model.weights import empty_weights
from tests.engine.support import MODELS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = preset("llada-tiny")


@pytest.fixture
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is there, outside of its interpreter."""
    monkeypatch.setattr(executors, "find_spec", lambda _: True)
    kernels = SimpleNamespace(INTERPRETED=False)
    monkeypatch.setitem(sys.modules, "remask.model.layer_triton", kernels)


@pytest.fixture
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "find_spec", lambda _: None)


def chosen(device: torch.device, asked: Any = "auto", **settings: Any) -> tuple[str, str]:
    found = resolve_executor(asked, settings.pop("config", CONFIG), device, **settings)
    return found.name, found.why


@pytest.mark.usefixtures("_triton")
def test_auto() -> None:
    assert chosen(CPU) == ("torch", "auto: device cpu")
    assert chosen(CUDA) == ("triton", "auto: device cuda")
    name, why = chosen(CUDA, batch_invariant=True)
    assert name == "torch"
    assert why.startswith("auto: batch_invariant=True, and it is not shown")
    assert chosen(CUDA, config=replace(CONFIG, head_dim=256))[0] == "triton"
    name, why = chosen(CUDA, config=replace(CONFIG, head_dim=257))
    assert (name, why) == ("torch", "auto: it computes heads of at most 256 channels, and this model's have 257")


@pytest.mark.usefixtures("_no_triton")
def test_auto_without_triton() -> None:
    assert chosen(CUDA) == ("torch", "auto: it needs triton: pip install triton")
    with pytest.raises(
        ConfigError, match=r"attention='triton' cannot run: it needs triton: pip install triton. Use 'a"
    ):
        resolve_executor("triton", CONFIG, CUDA)


@pytest.mark.usefixtures("_triton")
def test_what_is_asked_for_by_name() -> None:
    assert chosen(CPU, "numpy", batch_invariant=True) == ("numpy", "as asked")
    assert chosen(CUDA, "torch") == ("torch", "as asked")
    assert chosen(CUDA, "triton") == ("triton", "as asked")
    with pytest.raises(ConfigError, match="cannot run: it needs a CUDA device, and the device is cpu"):
        resolve_executor("triton", CONFIG, CPU)
    with pytest.raises(ConfigError, match="cannot run: batch_invariant=True, and it is not shown"):
        resolve_executor("triton", CONFIG, CUDA, batch_invariant=True)


@pytest.mark.parametrize("changes", [{"sliding": None}, {"self_conditioning": False}], ids=str)
def test_rows_or_layers_that_differ_are_not_repeated(changes: dict[str, Any]) -> None:
    config = replace(preset("diffusion-gemma-tiny"), mixture=None, **changes)
    model = Transformer(config, empty_weights(config, torch.float32, torch.device("meta")))
    said = graphs_obstacle(model)
    assert said is not None
    assert "computed alike" in said


def test_an_engine_computes_by_what_was_chosen() -> None:
    model = MODELS["llada"]
    engines = {
        name: Engine(model, EngineConfig(max_model_len=32, attention=name), "test") for name in ("auto", "numpy")
    }
    assert engines["auto"].model is model
    assert isinstance(engines["auto"].model.attention, TorchAttention)
    assert isinstance(engines["numpy"].runner.model.attention, NumpyAttention)
    assert engines["numpy"].model.weights is model.weights
    assert isinstance(model.attention, TorchAttention), "the given model is not changed"
    tiled = Engine(
        model, EngineConfig(max_model_len=32, attention="numpy", batch_invariant=True), "test"
    ).model.attention
    assert isinstance(tiled, UnitwiseAttention)
    assert isinstance(tiled.inner, NumpyAttention)


class Clock:
    """A clock that products move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cpu_kernels, "time", made)
    monkeypatch.setattr(cpu_kernels, "_EVICTING", 16)
    return made


def test_the_least_time_counts_but_for_the_first_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_float32_seconds", lambda: (6.0, 6.0, 12.0))
    taken: dict[int, list[float]] = {1: [0.1, 9, 3, 9, 9, 9], 32: [0.1, 2, 2, 2, 2, 2], 128: [9, 9, 9, 9, 9, 8]}
    shapes = []

    def act(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        clock.now += taken[len(x)].pop(0)
        return x

    assert speeds(act) == pytest.approx((2, 3, 1.5))
    assert shapes == [(count, SIDE) for count in ROWS for _ in range(6)]
    assert not any(taken.values())


def test_speeds_of_a_dtype_are_beside_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dtype_speeds(torch.float32) == (1, 1, 1)
    monkeypatch.setattr(cpu_kernels, "speeds", lambda act: (float(act(torch.ones(2, SIDE))[0, 0]),))
    assert dtype_speeds.__wrapped__(torch.bfloat16) == (SIDE,)


def test_few_rows_count_as_much_as_many() -> None:
    assert average((1.0, 8.0, 1.0)) == pytest.approx(2) == average((8.0, 1.0, 1.0))
    assert str(Kernel("int_mm", True, (1.0, 2.04, 3.0))) == (
        "int_mm on rows of seven bits, 1.0, 2.0, 3.0 times as fast as float32 at 1, 32, 128 rows"
    )

"""Which way of computing attention is chosen, and what is refused."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.families import preset
from remask.model import executors
from remask.model.attention import NumpyAttention
from remask.model.attention_torch import TorchAttention
from remask.model.executors import resolve_executor
from remask.model.invariant import ApartAttention
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
    assert isinstance(tiled, ApartAttention)
    assert isinstance(tiled.inner, NumpyAttention)

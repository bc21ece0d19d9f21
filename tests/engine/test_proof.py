"""A start that proves itself, with stand-ins that fail as kernels may."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remask.checkpoint.dummy import dummy_weights
from remask.checkpoint.presets import preset
from remask.engine import proof
from remask.engine.config import DeviceDefaults, EngineConfig
from remask.engine.device_defaults import device_key, read_defaults, write_defaults
from remask.engine.proof import choose, prove
from remask.errors import ConfigError
from remask.model import executors
from remask.model.attention import Attention, Sink
from remask.model.attention_names import AttentionName
from remask.model.attention_numpy import NumpyAttention
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.executors import Executor
from remask.model.graphs import Graphs
from remask.model.stage import Stage
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import CPU, small_config
from tests.recording import Recording

LENGTH = 40


class OnGpu(Transformer):
    """A model that says it is on a GPU. Its weights, and all that is computed of them, are on the CPU."""

    device = torch.device("cuda")


def model_of(
    family: str = "llada", dtype: torch.dtype = torch.float32, kind: type[Transformer] = Transformer
) -> Transformer:
    config = preset("gidd-tiny") if family == "gidd" else small_config(family)
    return kind(config, dummy_weights(config, dtype, CPU))


def on_gpu(family: str = "llada") -> Transformer:
    return model_of(family, kind=OnGpu)


class Uncompiled(TorchAttention):
    """Raises as a compiler does, when it is first called."""

    def __call__(self, *_: object) -> Tensor:
        raise TypeError("initial value for `at` is int32[32,128], but the then block redefines it\nin line 7")


class Forgetful(TorchAttention):
    """Leaves out the second unit of a row: wrong where results are merged, and right elsewhere."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        if len(work.owners) == len(set(work.owners.tolist())):
            return super().__call__(q, k, v, work, sink)
        return super().__call__(q, k, v, WorkList(work.units[:1], work.slots), sink)


class NotANumber(TorchAttention):
    """Gives NaN for the last row of a list in which rows see different parts."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        out = super().__call__(q, k, v, work, sink)
        out[-1] = torch.nan
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[TorchAttention]], None]:
    """Puts an attention in the place of Triton's, on a model that says it is on a GPU."""

    def put(kind: type[TorchAttention]) -> None:
        attention = Executor.attention

        def of(self: Executor, config: ModelConfig) -> Attention:
            return kind() if self.name == "triton" else attention(self, config)

        monkeypatch.setattr(Executor, "attention", of)
        monkeypatch.setattr(Executor, "kernels", lambda *_: None)
        monkeypatch.setattr(executors, "capture_on", lambda _: Recording())
        monkeypatch.setattr(proof, "resolve_executor", resolved)
        monkeypatch.setattr(proof, "LENGTH", LENGTH)

    return put


def resolved(asked: AttentionName, *_: Any, **__: Any) -> Executor:
    return Executor("triton", "auto: device cuda") if asked == "auto" else Executor(asked, "as asked")


class RightlyTriton(TorchAttention):
    """What Triton would be, if it were right."""


def test_what_is_right_runs(stand_in: Callable[[type[TorchAttention]], None]) -> None:
    stand_in(RightlyTriton)
    choice = choose(on_gpu(), EngineConfig())
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("triton", False, False)
    assert choice.executor.why == "auto: device cuda; agrees with torch"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Uncompiled, "full pass: TypeError: initial value for `at` is int32[32,128]"),
        (Forgetful, "merged pass: "),
        (NotANumber, "full pass: its results are not finite"),
    ],
)
def test_what_fails_is_named_and_pytorch_takes_its_place(
    kind: type[TorchAttention],
    said: str,
    stand_in: Callable[[type[TorchAttention]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in(kind)
    choice = choose(on_gpu(), EngineConfig())
    assert choice.executor.name == "torch"
    assert said in choice.executor.why
    assert "auto: triton failed at the start" in choice.executor.why
    (warning,) = [record.getMessage() for record in caplog.records]
    assert said in warning
    assert "PyTorch computes attention" in warning
    with pytest.raises(ConfigError, match="attention='triton' was asked for") as refused:
        choose(on_gpu(), EngineConfig(attention="triton"))
    assert said in str(refused.value)


def test_only_the_merged_pass_is_told_of_what_only_merging_gets_wrong(
    stand_in: Callable[[type[TorchAttention]], None],
) -> None:
    stand_in(Forgetful)
    (fault,) = prove(model_of(), Executor("triton", ""), graphs=False, length=LENGTH)
    assert fault.startswith("merged pass: ")
    assert "rows differ" in fault


def broken_graphs(patch: pytest.MonkeyPatch) -> None:
    """What is repeated, and was not captured just now, is wrong."""
    run = Graphs.run
    seen: list[Stage] = []

    def wrong(self: Graphs, model: Any, stage: Stage, h: Tensor) -> Tensor:
        out = run(self, model, stage, h)
        if any(stage is each for each in seen):
            out[0] *= 2
        seen.append(stage)
        return out

    patch.setattr(Graphs, "run", wrong)


def test_what_fails_under_graphs_alone(
    stand_in: Callable[[type[TorchAttention]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the engine chose graphs they are left out, and the executor stays. Where they were asked for it says so."""
    stand_in(RightlyTriton)
    usual = DeviceDefaults("triton", overlap=True, graphs=True, source="proven on this device")
    choice = choose(on_gpu(), EngineConfig(), usual)
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("triton", True, True)
    assert choice.why == "overlap and graphs: proven on this device"
    broken_graphs(monkeypatch)
    faults = prove(model_of(), Executor("triton", ""), graphs=True, length=LENGTH)
    assert [fault.partition(":")[0] for fault in faults] == [
        f"{name} pass, repeated" for name in ("full", "cached", "merged")
    ]
    choice = choose(on_gpu(), EngineConfig(), usual)
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("triton", False, True)
    assert "graphs are off" in caplog.text
    with pytest.raises(ConfigError, match="graphs=True was asked for"):
        choose(on_gpu(), EngineConfig(graphs=True))


def test_an_explicit_setting_wins_over_the_device_defaults(
    stand_in: Callable[[type[TorchAttention]], None],
) -> None:
    stand_in(RightlyTriton)
    usual = DeviceDefaults("torch", overlap=True, graphs=True, source="proven on this device")
    choice = choose(on_gpu(), EngineConfig(attention="triton", overlap=False, graphs=False), usual)
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("triton", False, False)
    choice = choose(on_gpu(), EngineConfig(), usual)
    assert (choice.executor.name, choice.executor.why) == ("torch", "auto: proven on this device")
    assert choose(on_gpu("llada-moe"), EngineConfig(), usual).graphs is False, "graphs need a dense model"


@pytest.mark.parametrize("family", ["llada", "dream", "gidd", "sdar", "llada2", "llada-moe", "fast-dllm-v2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_right_executors_pass_on_every_family(family: str, dtype: torch.dtype) -> None:
    """NumPy's attention is another computation of the same passes."""
    model = model_of(family, dtype)
    assert prove(model, Executor("numpy", ""), graphs=model.config.mixture is None, length=LENGTH) == []


@NEEDS_TRITON
@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llada", "gidd"])
def test_the_kernels_pass_in_the_interpreter(family: str) -> None:
    config = model_of(family).config
    small = replace(config, max_length=16)
    model = Transformer(small, dummy_weights(small, torch.float32, CPU))
    assert prove(model, Executor("triton", ""), graphs=False, length=16) == []


def test_a_proof_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    before = vars(model).copy()
    prove(model, Executor("numpy", ""), graphs=True, length=LENGTH)
    assert vars(model) == before
    assert isinstance(model.attention, TorchAttention)
    assert not isinstance(model.attention, NumpyAttention)
    state = torch.random.get_rng_state()
    prove(model, Executor("numpy", ""), graphs=False, length=LENGTH)
    assert torch.equal(state, torch.random.get_rng_state())


def test_defaults_are_kept_by_device_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_defaults(CPU) is None
    file = write_defaults(CPU, {"attention": "torch", "overlap": True, "graphs": False, "why": "a rehearsal"})
    assert file == tmp_path / "remask" / "devices.json"
    found = read_defaults(CPU)
    assert found is not None
    assert (found.attention, found.overlap, found.graphs) == ("torch", True, False)
    assert str(file) in found.source
    assert device_key(CPU).startswith("cpu | remask ")
    with monkeypatch.context() as patch:
        patch.setattr("remask.engine.device_defaults.code_digest", lambda: "of other code")
        assert read_defaults(CPU) is None
        write_defaults(CPU, {"attention": "triton", "overlap": False, "graphs": False})
    assert read_defaults(CPU) == found, "entries stand side by side"
    assert not caplog.records
    file.write_text(json.dumps({device_key(CPU): {"attention": "fast"}}), encoding="utf-8")
    assert read_defaults(CPU) is None
    assert "is not used: overlap must be" in caplog.text

"""A start that proves itself, with stand-ins that fail as kernels may."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import dummy_weights
from remask.checks import AttentionName
from remask.engine import proof
from remask.engine.config import EngineConfig
from remask.engine.proof import choose, prove
from remask.errors import ConfigError
from remask.families import preset, presets
from remask.model import executors
from remask.model.attention import Attention, NumpyAttention, Sink
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.executors import Executor, graphs_obstacle, resolve_executor
from remask.model.graphs import Graphs
from remask.model.quantized import empty_matrix
from remask.model.stage import Stage
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from remask.sampling.choice import RowChoice
from tests.device import device
from tests.engine.executors import NEEDS_FP8, NEEDS_TRITON
from tests.engine.support import CPU, small_config
from tests.recording import Recording

LENGTH = 40


class OnGpu(Transformer):
    """A model that says it is on a GPU. Its weights, and all that is computed of them, are on the CPU."""

    device = torch.device("cuda")


def model_of(
    family: str = "llada", dtype: torch.dtype = torch.float32, kind: type[Transformer] = Transformer
) -> Transformer:
    config = preset(f"{family}-tiny") if family in ("gidd", "sumi") else small_config(family)
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
        monkeypatch.setattr(proof, "MIN_LAYER_BYTES", 0)

    return put


def resolved(asked: AttentionName, *_: Any, **__: Any) -> Executor:
    return Executor("triton", "auto: device cuda") if asked == "auto" else Executor(asked, "as asked")


class RightlyTriton(TorchAttention):
    """What Triton would be, if it were right."""


@pytest.mark.parametrize(
    ("family", "asked", "runs", "why"),
    [
        ("llada", {}, ("triton", True, True), "auto: device cuda"),
        (
            "llada",
            {"graphs": False},
            ("triton", False, False),
            "auto: device cuda; no overlap: without graphs the host",
        ),
        ("llada", {"graphs": False, "overlap": True}, ("triton", False, True), "as asked"),
        ("llada", {"overlap": False}, ("triton", True, False), "auto: device cuda"),
        ("llada", {"overlap": False, "graphs": False}, ("triton", False, False), "as asked"),
        ("llada", {"attention": "torch"}, ("torch", True, True), "auto: device cuda"),
        ("llada", {"batch_invariant": True}, ("triton", False, False), "auto: batch_invariant=True"),
        ("llada-moe", {}, ("triton", False, False), "auto: device cuda; no graphs: graphs=True needs a dense model"),
    ],
)
def test_what_is_right_runs_without_any_setting(
    family: str,
    asked: dict[str, Any],
    runs: tuple[str, bool, bool],
    why: str,
    stand_in: Callable[[type[TorchAttention]], None],
) -> None:
    stand_in(RightlyTriton)
    choice = choose(on_gpu(family), EngineConfig(**asked))
    assert (choice.executor.name, choice.graphs, choice.overlap) == runs
    assert choice.why.startswith(why)
    assert choice.executor.why == ("as asked" if "attention" in asked else "auto: device cuda; agrees with torch")


def test_passes_over_small_layers_are_not_queued_ahead(
    stand_in: Callable[[type[TorchAttention]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their graphs are used, and whoever asks for overlap gets it."""
    stand_in(RightlyTriton)
    model = on_gpu()
    layers = model.weights.layers
    size = sum(tensor.nbytes for layer in layers for tensor in layer.named_tensors().values()) // len(layers)
    assert size < model.weights.nbytes // len(layers), "without the embedding and the head"
    for least, ahead in ((size, True), (size + 1, False)):
        monkeypatch.setattr(proof, "MIN_LAYER_BYTES", least)
        choice = choose(model, EngineConfig())
        assert (choice.graphs, choice.overlap) == (True, ahead)
        assert ("no overlap: layers of 0.0" in choice.why) is not ahead
        assert choose(model, EngineConfig(overlap=True)).overlap


@pytest.mark.parametrize(("name", "ahead"), [("llada-8b", True), ("dream-7b", True), ("llada-100m", False)])
def test_of_which_models_passes_are_queued_ahead(name: str, ahead: bool) -> None:
    """As measured of the first and the last; `docs/lab/log.md` has the figures."""
    config = preset(name)
    assert (2 * config.parameters // config.layers >= proof.MIN_LAYER_BYTES) is ahead


def test_a_cpu_leaves_out_what_gains_nothing_there() -> None:
    choice = choose(model_of(), EngineConfig())
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("torch", False, False)
    assert choice.why == "auto: device cpu"


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
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("torch", True, True)
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


def test_a_choice_that_the_device_makes_is_proven_too(
    stand_in: Callable[[type[TorchAttention]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(RightlyTriton)
    choose_rows, computed = RowChoice.choose, list[bool]()

    def wrong(self: RowChoice, *numbers: Tensor) -> Tensor:
        computed.append(True)
        found = choose_rows(self, *numbers)
        found[5] ^= len(computed) > 1  # the first one is PyTorch's own
        return found

    monkeypatch.setattr(RowChoice, "choose", wrong)
    (fault,) = prove(model_of(), Executor("triton", ""), graphs=False, length=LENGTH)
    assert fault.startswith("choosing: ")


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
    broken_graphs(monkeypatch)
    faults = prove(model_of(), Executor("triton", ""), graphs=True, length=LENGTH)
    assert [fault.partition(":")[0] for fault in faults] == [
        f"{name} pass, repeated" for name in ("full", "cached", "merged")
    ]
    choice = choose(on_gpu(), EngineConfig())
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("triton", False, False)
    assert choice.why.startswith("auto: device cuda; graphs failed at the start: full pass, repeated: ")
    assert "graphs are off" in caplog.text
    with pytest.raises(ConfigError, match="graphs=True was asked for"):
        choose(on_gpu(), EngineConfig(graphs=True))


def test_where_both_fail_pytorch_runs_alone(
    stand_in: Callable[[type[TorchAttention]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in(Forgetful)
    broken_graphs(monkeypatch)
    choice = choose(on_gpu(), EngineConfig())
    assert (choice.executor.name, choice.graphs, choice.overlap) == ("torch", False, False)
    assert "graphs failed at the start: " in choice.why
    assert choice.executor.why.startswith("auto: triton failed at the start: ")
    assert [record.getMessage().partition(" failed")[0] for record in caplog.records] == [
        "attention='triton'",
        "attention='torch', graphs=True",
    ]


@pytest.mark.parametrize(
    "family", ["llada", "dream", "gidd", "sdar", "llada2", "llada2.2", "sumi", "llada-moe", "fast-dllm-v2"]
)
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
    small = replace(config, max_length=16, layers=1)
    model = Transformer(small, dummy_weights(small, torch.float32, torch.device(device())))
    assert prove(model, Executor("triton", ""), graphs=False, length=16) == []


@pytest.mark.skipif(torch.device(device()).type != "cuda", reason="needs a GPU: pytest --device cuda")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(name for name in presets() if name.endswith("-tiny")))
def test_the_kernels_pass_on_every_family(name: str, dtype: torch.dtype, graphs: bool) -> None:
    config, place = preset(name), torch.device(device())
    model = Transformer(config, dummy_weights(config, dtype, place))
    if graphs and (obstacle := graphs_obstacle(model)) is not None:
        pytest.skip(f"a GPU repeats no such layers: {obstacle}")
    assert prove(model, resolve_executor("triton", config, place), graphs=graphs) == []


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


def in_fp8(model: Transformer) -> Transformer:
    """The same model with matrices of eight bits, of branches that count for more than what they are added to."""

    def quantized(matrix: Tensor) -> Tensor:
        found = empty_matrix("fp8", matrix.shape, matrix.dtype, matrix.device, (len(matrix),))
        found.write(slice(0, len(matrix)), 8 * matrix)
        return found

    layers = [
        replace(
            each,
            qkv=quantized(each.qkv),
            out=quantized(each.out),
            gate_up=quantized(each.gate_up),
            down=quantized(each.down),
        )
        for each in model.weights.layers
    ]
    return Transformer(model.config, replace(model.weights, layers=tuple(layers)))


@NEEDS_FP8
def test_products_of_eight_bits_may_differ_by_their_rounding(
    stand_in: Callable[[type[TorchAttention]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further than a dense model's, as NumPy's attention does, and what is wrong is found all the same."""
    config = replace(small_config("llada"), hidden=256, intermediate=512, heads=4, kv_heads=4, head_dim=64)
    model = in_fp8(Transformer(config, dummy_weights(config, torch.bfloat16, CPU)))
    assert prove(model, Executor("numpy", ""), graphs=False, length=LENGTH) == []
    stand_in(Forgetful)
    (fault,) = prove(model, Executor("triton", ""), graphs=False, length=LENGTH)
    assert fault.startswith("merged pass: ")
    assert fault.endswith("0.2 is allowed")
    monkeypatch.setattr(proof, "QUANTIZED_TOLERANCE", proof.TOLERANCE[torch.bfloat16])
    assert prove(model, Executor("numpy", ""), graphs=False, length=LENGTH) != []

"""Quantized weights: their error, their cuts, what is quantized, and whole models beside unquantized ones."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from remask import LLM
from remask.checkpoint.loaded import dummy_weights, find_model
from remask.checkpoint.settings import ModelSettings
from remask.checks import Quantization
from remask.cli import main
from remask.engine.capacity import DeviceMemory, check_weights_fit, weight_bytes
from remask.engine.config import EngineConfig
from remask.errors import CheckpointError, ConfigError, TableError, UnknownNameError
from remask.families import preset
from remask.model import cpu_kernels, quantized
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import Kernel, int4_kernel, int8_kernel, int_mm_limit, needs_reduced_rows
from remask.model.invariant import TiledArithmetic
from remask.model.quantized import (
    Codes,
    Int4Matrix,
    Int8Matrix,
    PackedInt8Matrix,
    QuantizedMatrix,
    UnroundedArithmetic,
    check_quantization,
    empty_matrix,
    encode,
)
from remask.model.ranks import Shard
from remask.model.sizes import GROUP, check_matrix_sizes
from remask.model.weights import empty_weights
from tests.checkpoint import checkpoints
from tests.engine.executors import NEEDS_FP8
from tests.goldens import nemotron

CPU = torch.device("cpu")
KINDS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
EACH = pytest.mark.parametrize("kind", KINDS)
MULTIPLIED = pytest.mark.parametrize("kind", ["int8", "int4", pytest.param("fp8", marks=NEEDS_FP8)])
ERROR = {"int8": 0.025 if int8_kernel().reduced else 0.015, "int4": 0.12, "fp8": 0.06}
BITS = {"int8": (8, 9.6), "int4": (5, 5.6), "fp8": (8, 9)}
PIECES = (64, 32, 32)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(kind: Quantization, values: Tensor, pieces: tuple[int, ...] = PIECES) -> QuantizedMatrix:
    made = empty_matrix(kind, values.shape, torch.float32, CPU, pieces)
    made.write(slice(None), values)
    return made


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@MULTIPLIED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_product_is_near_that_of_the_numbers(kind: Quantization, dtype: torch.dtype, rows: int) -> None:
    values, x, bias = numbers(128, 96), numbers(rows, 96, seed=1).to(dtype), numbers(128, seed=2).to(dtype)
    values[5] = 0  # a row without a scale
    values[7] *= 1000  # and a large one, which must not spoil others
    found = F.linear(x, matrix(kind, values), bias)
    assert found.dtype == dtype
    exact = x.double() @ values.double().t() + bias.double()
    apart = [place for place in range(128) if place != 7]
    assert far(found[:, apart], exact[:, apart]) < ERROR[kind] + (0.01 if dtype == torch.bfloat16 else 0)
    terms = x.double().norm(dim=1) * values[7].double().norm()
    assert ((found[:, 7] - exact[:, 7]).abs() < ERROR[kind] * terms).all()
    torch.testing.assert_close(
        found[:, 5], bias[5].expand(rows), rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    assert F.linear(x[:0], matrix(kind, values)).shape == (0, 128)
    apart_in_memory = torch.cat((x, x), dim=1)[:, :96]
    assert torch.equal(F.linear(apart_in_memory, matrix(kind, values), bias), found)


def test_int8_is_the_nearest_of_its_numbers() -> None:
    values, x = numbers(32, 64), numbers(5, 64, seed=1)
    made = Int8Matrix(values.shape, torch.float32, CPU)
    made.write(slice(None), values)
    scale = values.abs().amax(1) / 127
    assert torch.equal(made.parts()["values"], (values / scale[:, None]).round().to(torch.int8))
    rows = x.abs().amax(1) / int_mm_limit()
    by_hand = (x / rows[:, None]).round().double() @ made.parts()["values"].double().t() * rows[:, None] * scale
    torch.testing.assert_close(F.linear(x, made).double(), by_hand, rtol=1e-5, atol=1e-5)


def test_int4_keeps_a_scale_and_a_zero_for_each_group() -> None:
    """Groups that are far from zero, or far apart, are met within half a step."""
    values = numbers(32, 4 * GROUP) * torch.tensor([0.01, 1.0, 30.0, 1.0]).repeat_interleave(GROUP)
    values[:, -GROUP:] += 5
    found = F.linear(torch.eye(4 * GROUP), matrix("int4", values, (32,))).t()
    grouped = values.view(32, 4, GROUP)
    step = (grouped.amax(-1) - grouped.amin(-1)) / 15
    # A product takes numbers that are rounded to 1 / 126 of the row's largest.
    allowed = step * 0.51 + values.abs().amax(-1, keepdim=True) * (0.6 / 126)
    assert ((found - values).view(32, 4, GROUP).abs() <= allowed[..., None]).all()


def test_int4_keeps_numbers_whatever_codes_stand_for() -> None:
    """Steps below zero, groups of one number with a step of any size, and groups of a few of the codes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (4, 4 * GROUP), generator=generator).to(torch.uint8)
    codes[0, :GROUP], codes[1, GROUP : 2 * GROUP] = 8, 14
    codes[1, GROUP] = 15
    codes[3] = 3
    scales, zeros = numbers(4, 4), numbers(4, 4, seed=1)
    scales[0, 0], scales[1, 1], zeros[1, 1] = 1e30, 0.5, -3
    expected = (codes.double().view(4, 4, GROUP) - 8) * scales.double()[..., None] + zeros.double()[..., None]
    made = Int4Matrix(codes.shape, torch.float32, CPU)
    made.store(slice(None), Codes(codes, scales, zeros))
    for by in ("int_mm", "float32"):
        found = cpu_kernels.int4_product(torch.eye(4 * GROUP), made.codes, made.scales, by).t().double()
        allowed = expected.flatten(1).abs().amax(1, keepdim=True) / 126 * (0.7 if by == "int_mm" else 0.2)
        assert ((found - expected.flatten(1)).abs() <= allowed).all(), by


def test_int4_multiplies_rows_apart_and_sums_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in company, beside rows that are not finite, and whatever part of a matrix is unpacked at a time."""
    values, x = numbers(45, 96), numbers(67, 96, seed=1)
    x[6] = 0
    groups, units = matrix("int4", values, (45,)).parts().values()
    whole = cpu_kernels.int4_product(x, groups, units, "int_mm")
    weights = (cpu_kernels.int4_product(torch.eye(96), groups, units, "int_mm").t().double() / units[:, None]).round()
    scales = (x.abs().amax(1, keepdim=True) / int_mm_limit()).clamp_min(1e-12)
    rows = (x / scales).round().double()
    torch.testing.assert_close(whole.double(), rows @ weights.t() * scales * units, rtol=1e-6, atol=0)
    for row in (0, 5, 66):
        assert torch.equal(cpu_kernels.int4_product(x[row : row + 1], groups, units, "int_mm")[0], whole[row])
    monkeypatch.setattr(cpu_kernels, "TILE", 7 * 96)
    x[5] *= 1000
    x[7, 3], x[8, 4] = torch.nan, torch.inf
    found = cpu_kernels.int4_product(x, groups, units, "int_mm")
    others = [row for row in range(67) if row not in (5, 7, 8)]
    assert torch.equal(found[others], whole[others])
    assert not found[7:9].isfinite().any()


@pytest.mark.parametrize("kernel", ["fbgemm", "int_mm"])
def test_either_kernel_for_int8_multiplies_rows_apart(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside a row a thousand times as large and beside one that is not finite, a row has the same bits."""
    monkeypatch.setattr(quantized, "int8_kernel", lambda: Kernel(kernel, reduced=False))  # type: ignore[arg-type]
    if kernel == "fbgemm" and needs_reduced_rows() is None:
        pytest.skip("PyTorch has no FBGEMM on this processor")
    values, x = numbers(128, 96), numbers(67, 96, seed=1)
    made = matrix("int8", values)
    assert isinstance(made, PackedInt8Matrix) == (kernel == "fbgemm")
    assert torch.equal(made.parts()["values"], encode("int8", values).values)
    assert torch.equal(made.parts()["scales"], encode("int8", values).scales)
    whole = F.linear(x, made)
    for row in (0, 5, 66):
        assert torch.equal(F.linear(x[row : row + 1], made)[0], whole[row])
    x[5] *= 1000
    x[7, 3], x[8, 4] = torch.nan, torch.inf
    found = F.linear(x, made)
    others = [row for row in range(67) if row not in (5, 7, 8)]
    assert torch.equal(found[others], whole[others])
    assert kernel == "int_mm" or not found[7:9].isfinite().any()
    assert torch.equal(F.linear(numbers(0, 96), made), numbers(0, 128))


FBGEMM = """
reduced = kernels.needs_reduced_rows()
packed = kernels.pack_int8(largest.abs(), torch.ones(16))
found = kernels.int8_product(x.abs(), [packed], reduced) / (127 * 64)
print(reduced, found.sub(1).abs().max().item())
"""
INT_MM = """
found = kernels.int_mm_product(x, largest, torch.ones(16)) / (127 * 64)
print(kernels.int_mm_limit() in (63, 127), found.abs().sub(1).abs().max().item())
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kernel", "variable", "allowed"),
    [(FBGEMM, "FBGEMM_ENABLE_INSTRUCTIONS", 0.01), (INT_MM, "ONEDNN_MAX_CPU_ISA", 1e-6)],
)
def test_rows_have_seven_bits_where_eight_overflow(kernel: str, variable: str, allowed: float) -> None:
    """Neighbours that are all large, as in no random matrix, without VNNI's sums in 32 bits."""
    if kernel == FBGEMM and needs_reduced_rows() is None:
        pytest.skip("PyTorch has no FBGEMM on this processor")
    common = "import torch\nfrom remask.model import cpu_kernels as kernels\nx = torch.ones((3, 64))\nx[1] = -1\n"
    common += "largest = torch.full((16, 64), 127, dtype=torch.int8)\nlargest[1] = -127"
    command = [sys.executable, "-c", common + kernel]
    done = subprocess.run(command, env=os.environ | {variable: "AVX2"}, capture_output=True, text=True, check=True)
    limited, error = done.stdout.split()
    assert limited == "True"
    assert float(error) < allowed


@pytest.mark.parametrize(
    ("speed", "name"), [((2.0, 2.0, 2.0), "fbgemm"), ((2.0, 3.0, 4.0), "fbgemm"), ((3.0, 4.0, 4.0), "int_mm")]
)
def test_the_faster_kernel_is_taken_where_it_is_much_faster(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, ...], name: str
) -> None:
    found = iter([speed, (2.0, 2.0, 2.0)])
    monkeypatch.setattr(cpu_kernels, "speeds", lambda _: next(found))
    monkeypatch.setattr(cpu_kernels, "needs_reduced_rows", lambda: False)
    kernel = int8_kernel.__wrapped__()
    assert kernel.name == name
    assert kernel.speed == ((2.0, 2.0, 2.0) if name == "fbgemm" else speed)
    assert "times as fast as float32 at 1, 32, 128 rows" in str(kernel)


@pytest.mark.parametrize(("speed", "name"), [((0.5, 0.5, 0.5), "float32"), ((0.9, 0.5, 0.9), "int_mm")])
def test_rows_stay_float32_where_whole_ones_are_slow(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, ...], name: str
) -> None:
    found = iter([(1.0, 1.0, 1.0), speed])
    monkeypatch.setattr(cpu_kernels, "speeds", lambda _: next(found))
    kernel = int4_kernel.__wrapped__()
    assert (kernel.name, kernel.reduced) == (name, name == "int_mm" and int_mm_limit() < 127)


def test_whole_rows_that_are_multiplied_wrongly_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a processor makes 127 of whatever is beyond it."""
    usual = cpu_kernels.int4_product

    def wrong(x: Tensor, groups: Tensor, units: Tensor, by: str) -> Tensor:
        found = usual(x, groups, units, by)
        return found.clamp(max=0) if by == "int_mm" else found

    monkeypatch.setattr(cpu_kernels, "int4_product", wrong)
    monkeypatch.setattr(cpu_kernels, "speeds", lambda _: (1.0, 1.0, 1.0))
    assert int4_kernel.__wrapped__().name == "float32"


@MULTIPLIED
def test_cuts_by_rows_are_those_of_the_product(kind: Quantization) -> None:
    made, x = matrix(kind, numbers(128, 64)), numbers(9, 64, seed=1)
    whole = F.linear(x, made)
    for part in (slice(0, 64), slice(64, 128), slice(96, 128), slice(-32, None), slice(None)):
        assert torch.equal(F.linear(x, made[part]), whole[:, part])
        assert made[part].nbytes <= made.nbytes, "no copy, and nothing more"
    assert len(made) == 128
    if isinstance(made, PackedInt8Matrix):
        with pytest.raises(NotImplementedError, match=f"rows 5 to 64 of an {kind} matrix cut at"):
            made[5:64]


@MULTIPLIED
def test_experts_are_matrices_of_their_own(kind: Quantization) -> None:
    values, x = numbers(3, 64, 32), numbers(4, 32, seed=1)
    made = empty_matrix(kind, values.shape, torch.float32, CPU, (32, 32))
    for number, own in enumerate(values):
        made.expert(number).write(slice(None), own)
    alone = [matrix(kind, own, (32, 32)) for own in values]
    for number, own in enumerate(made):
        assert torch.equal(F.linear(x, own), F.linear(x, alone[number]))
        assert torch.equal(F.linear(x, made[number]), F.linear(x, own))
    assert made.nbytes == sum(each.nbytes for each in alone)


@EACH
def test_it_is_no_tensor_of_numbers(kind: Quantization) -> None:
    made = matrix(kind, numbers(128, 64))
    low, high = BITS[kind]
    assert low <= 8 * made.nbytes / made.numel() <= high
    assert (tuple(made.shape), made.dtype, made.device, made.dim()) == ((128, 64), torch.float32, CPU, 2)
    assert type(made).__name__ in repr(made)
    acts: list[Callable[[], object]] = [lambda: made + 1, lambda: made.sum(), lambda: made.copy_(made)]
    for act in acts:
        with pytest.raises((NotImplementedError, TypeError, RuntimeError)):
            act()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_have_the_same_bits_in_any_company(kind: Quantization) -> None:
    made, x, tiled = matrix(kind, numbers(128, 96)), numbers(130, 96, seed=1), TiledArithmetic()
    tiled.check([made])
    whole = tiled.linear(x, made)
    for rows in ([3], [0, 129], [*range(7, 90)], [*range(129, -1, -1)]):
        assert torch.equal(tiled.linear(x[rows], made), whole[rows])


@pytest.mark.parametrize("name", ["llada-tiny", "llada2-tiny", "gidd-tiny", "llada-moe-tiny"])
@EACH
def test_routers_norms_biases_and_vocabularies_stay_as_they_are(name: str, kind: Quantization) -> None:
    config = preset(name)
    plain, made = (empty_weights(config, torch.bfloat16, torch.device("meta"), quantization=q) for q in (None, kind))
    for (field, layer, whole), (same, number, own) in zip(plain.named_tensors(), made.named_tensors(), strict=True):
        assert (field, layer, own.shape) == (same, number, whole.shape)
        quantized = isinstance(own, QuantizedMatrix)
        assert quantized == (field.removeprefix("mixture.") in ("qkv", "out", "gate_up", "down") and own.numel() > 0)
        assert quantized or own.dtype == whole.dtype
    assert made.nbytes == weight_bytes(config, torch.bfloat16, quantization=kind) < plain.nbytes


def small(raw: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose sizes the kernel for int4 takes."""
    if "text_config" in raw:
        widths = {"hidden_size": 64, "head_dim": 16, "global_head_dim": 32, "intermediate_size": 128}
        return raw | {"text_config": raw["text_config"] | widths | {"moe_intermediate_size": 32}}
    return raw | {
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 128,
        **({"moe_intermediate_size": 32} if "num_experts" in raw else {}),
    }


def folder_of(tmp_path: Path, raw: dict[str, Any]) -> str:
    return str(checkpoints.write(tmp_path / "model", raw, checkpoints.random_tensors(raw)))


RAWS = {
    "llada2": checkpoints.LLADA2,
    "sdar": checkpoints.SDAR,
    "sdar-moe": checkpoints.SDAR_MOE,
    "a2d": checkpoints.A2D,
    "modernbert": checkpoints.MODERNBERT,
    "nemotron": checkpoints.NEMOTRON,
    "diffusion-gemma": checkpoints.DIFFUSION_GEMMA,
}
MIXTURES = ("llada2", "sdar-moe", "diffusion-gemma")  # which are not for fp8
EACH_MODEL = pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in RAWS for kind in KINDS if kind != "fp8" or name not in MIXTURES]
)


@EACH_MODEL
@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_is_quantized_as_it_is_read(tmp_path: Path, name: str, size: int, kind: Quantization) -> None:
    """Each rank's matrices are those of its part of the numbers, whatever tensors they come from."""
    found = find_model(ModelSettings(folder_of(tmp_path, small(RAWS[name]))))
    for rank in range(size):
        shard = Shard(rank, size)
        plain = found.load(torch.float32, CPU, shard=shard).weights.named_tensors()
        made = found.load(torch.float32, CPU, shard=shard, quantization=kind)
        for (field, layer, whole), (_, _, own) in zip(plain, made.weights.named_tensors(), strict=True):
            if not isinstance(own, QuantizedMatrix):
                assert torch.equal(own, whole), (field, layer)
                continue
            pairs = zip(own, whole, strict=True) if own.dim() == 3 else [(own, whole)]
            for few, many in pairs:
                stored = few.unrounded_product(torch.eye(many.shape[1])).t()
                assert far(stored, many) < 2 * ERROR[kind], (field, layer)


def test_dummy_weights_are_the_same_numbers() -> None:
    config = preset("llada-moe-tiny")
    plain, made = (dummy_weights(config, torch.float32, CPU, quantization=kind) for kind in (None, "int8"))
    for (field, _, whole), (_, _, own) in zip(plain.named_tensors(), made.named_tensors(), strict=True):
        if isinstance(own, QuantizedMatrix) and own.dim() == 2:
            assert far(F.linear(torch.eye(whole.shape[1]), own).t(), whole) < ERROR["int8"], field
        elif not isinstance(own, QuantizedMatrix):
            assert torch.equal(own, whole), field


def test_damaged_numbers_are_still_found(tmp_path: Path) -> None:
    tensors = checkpoints.random_tensors(checkpoints.LLADA)
    tensors["model.transformer.blocks.1.q_proj.weight"][0, 0] = torch.nan
    folder = checkpoints.write(tmp_path / "model", checkpoints.LLADA, tensors)
    with pytest.raises(CheckpointError, match=r"q_proj.* holds 1 values"):
        find_model(ModelSettings(str(folder))).load(torch.float32, CPU, quantization="int8")


CACHE_SETTINGS: dict[str, dict[str, Any]] = {"bicache": {"depth": 2}}


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "block-dual", "dllm-cache", "bicache"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_cache_policy_runs_on_few_bits(kind: Quantization, cache: str) -> None:
    """Under batch invariance too, and then in any company with the same answer."""
    limits = EngineConfig(max_model_len=64, batch_invariant=True)
    llm = LLM("bundled-tariff", dtype="float32", device="cpu", threads=1, quantization=kind, engine=limits)
    asked = {"max_tokens": 8, "steps": 8, "block_length": 4}
    settings = CACHE_SETTINGS.get(cache)
    prompts = [list(range(40, 60)), list(range(80, 110)), list(range(40, 60))]
    outputs = llm.generate(prompts, asked, prefix_length=10, cache=cache, cache_config=settings)
    alone = llm.generate(prompts[1], asked, prefix_length=10, cache=cache, cache_config=settings)
    assert outputs[0].token_ids == outputs[2].token_ids
    assert outputs[1].token_ids == alone[0].token_ids


def test_a_depth_table_is_of_one_kind_of_weights(tmp_path: Path) -> None:
    plain = LLM("bundled-tariff", dtype="float32", device="cpu", threads=1)
    file = tmp_path / "table.json"
    assert plain.depth_table is not None
    plain.depth_table.save(file)
    with pytest.raises(TableError, match=r"-int8, 8 layers\) is loaded. Measure a table of it"):
        LLM("bundled-tariff", dtype="float32", device="cpu", threads=1, quantization="int8", depth_table=file)


def refused(kind: str, config: ModelConfig, device: torch.device = CPU) -> str:
    with pytest.raises(ConfigError) as error:
        check_quantization(kind, config, device)
    return str(error.value)


def test_what_cannot_be_quantized_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = preset("llada-8b"), torch.device("cuda", 0)
    with pytest.raises(UnknownNameError, match="Unknown quantization 'int7'"):
        check_quantization("int7", config, CPU)
    assert "needs a CUDA device, and the model is on cpu: use 'int8' or 'int4'" in refused("fp8", config)
    assert "quantization='int4' is for CPUs, and the model is on cuda:0: use 'fp8'" in refused("int4", config, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "compute capability 8.9" in refused("fp8", config, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_quantization("fp8", config, cuda)
    assert "is for dense models" in refused("fp8", preset("llada2-mini"), cuda)
    odd = preset("sdar-tiny")
    said = refused("int4", replace(odd, hidden=40, intermediate=50))
    assert "hidden=40 is not a multiple of 32" in said
    assert "a feed-forward 50 wide is not a multiple of 32" in said
    for kind in (None, "int8", "int4"):
        check_quantization(kind, config, CPU)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "kind", "fault"),
    [
        (8, 4, "int8", None),
        (24, 2, "int4", None),
        (12, 2, "int4", "heads x head_dim=48 in layer 0 and 1 more is not a multiple of 32. Use 'int8'"),
        (12, 1, "fp8", "K/V heads x head_dim=12 in layer 0 and 1 more is not a multiple of 16. Use the model without"),
    ],
)
def test_every_layers_sizes_are_checked(head_dim: int, kv_heads: int, kind: Quantization, fault: str | None) -> None:
    """Layers with windows have heads of their own; those of the last layer, 4 of 32 channels, fit all kernels."""
    config = replace(preset("diffusion-gemma-tiny"), mixture=None)
    near = config.sliding
    assert near is not None
    check_matrix_sizes(kind, config)
    config = replace(config, sliding=replace(near, head_dim=head_dim, kv_heads=kv_heads))
    if fault is None:
        check_matrix_sizes(kind, config)
        return
    with pytest.raises(ConfigError, match=f"^quantization={kind!r} does not take this model: {fault}"):
        check_matrix_sizes(kind, config)


def test_the_feed_forward_of_every_layer_is_checked() -> None:
    config = preset("llada2-mini")
    assert config.mixture is not None
    assert config.mixture.dense_layers == (0,)
    check_matrix_sizes("int4", config)
    for odd, said in (
        (replace(config, intermediate=5000), "a feed-forward 5000 wide in layer 0 is"),
        (replace(config, mixture=replace(config.mixture, intermediate=100)), "100 wide in layer 1 and 18 more is"),
        (replace(config, hidden=2000), ": hidden=2000 is"),
    ):
        with pytest.raises(ConfigError, match=f"{said} not a multiple of 32"):
            check_matrix_sizes("int4", odd)
    # Nothing of this width is quantized, as no layer is dense.
    check_matrix_sizes("int4", replace(config, intermediate=5000, mixture=replace(config.mixture, dense_layers=())))


def test_an_8b_model_fits_a_laptop_in_few_bits() -> None:
    config, laptop = preset("llada-8b"), DeviceMemory(16 * 10**9, 11 * 10**9, 1.0)
    with pytest.raises(ConfigError, match=r"16\.03 GB as bfloat16.* Use --quantization int8 or a smaller model"):
        check_weights_fit(config, torch.bfloat16, laptop, 1, apart=False)
    check_weights_fit(config, torch.bfloat16, laptop, 1, apart=False, quantization="int8")
    assert weight_bytes(config, torch.bfloat16, quantization="int8") == pytest.approx(9.06e9, rel=0.01)
    assert weight_bytes(config, torch.bfloat16, quantization="int4") == pytest.approx(6.4e9, rel=0.02)


def written(tmp_path: Path, model: str, kind: Quantization) -> str:
    target = tmp_path / f"out-{kind}"
    assert main(["--quiet", "quantize", "--model", model, "--quantization", kind, "--output", str(target)]) == 0
    return str(target)


@EACH_MODEL
@pytest.mark.parametrize("size", [1, 2])
def test_a_quantized_checkpoint_loads_as_the_same_codes(
    tmp_path: Path, name: str, size: int, kind: Quantization
) -> None:
    """As if it were quantized when it is read; a rank that reads some columns takes the scales of the whole row."""
    folder = folder_of(tmp_path, small(RAWS[name]))
    kept = find_model(ModelSettings(written(tmp_path, folder, kind)))
    assert kept.quantization == kind
    shard = Shard(size - 1, size)
    made = find_model(ModelSettings(folder)).load(torch.float32, CPU, shard=shard, quantization=kind)
    read = kept.load(torch.float32, CPU, shard=shard)
    assert read.fingerprint != made.fingerprint
    for (field, layer, a), (_, _, b) in zip(made.weights.named_tensors(), read.weights.named_tensors(), strict=True):
        if not isinstance(a, QuantizedMatrix):
            assert torch.equal(a, b), (field, layer)
            continue
        assert isinstance(b, QuantizedMatrix)
        same = all(torch.equal(x, b.parts()[name]) for name, x in a.parts().items())
        cut = size > 1 and field in ("out", "down") and kind != "int4"
        assert same != cut or field == "mixture.down", (field, layer)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_model_answers_as_one_that_is_quantized_when_read(tmp_path: Path, kind: Quantization) -> None:
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
    asked, prompt = {"max_tokens": 8, "steps": 8}, list(range(40, 60))
    folder = written(tmp_path, "bundled-tariff", kind)
    kept, made = LLM(folder, **common), LLM("bundled-tariff", quantization=kind, **common)
    assert kept.tokenizer is not None
    assert kept.session.sampling == made.session.sampling
    assert kept.generate(prompt, asked)[0].token_ids == made.generate(prompt, asked)[0].token_ids
    plain = find_model(ModelSettings("bundled-tariff")).folder
    assert plain is not None
    sizes = [sum(file.stat().st_size for file in place.glob("*.safetensors")) for place in (Path(folder), plain)]
    assert sizes[0] < 0.6 * sizes[1]
    with pytest.raises(ConfigError, match=f"is quantized as '{kind}', and quantization="):
        LLM(folder, quantization="int4" if kind == "int8" else "int8", **common)


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, checkpoints.SDAR)
    monkeypatch.setattr("remask.checkpoint.quantized_files.SHARD_BYTES", 2000)
    out = Path(written(tmp_path, folder, "int8"))
    assert len(list(out.glob("*.safetensors"))) > 3
    read, made = (
        find_model(ModelSettings(each)).load(torch.float32, CPU, quantization="int8") for each in (str(out), folder)
    )
    checkpoints.same(read.weights, made.weights)


def test_the_adapter_for_drafts_comes_along(tmp_path: Path) -> None:
    plain = nemotron.folder("plain")
    kept, given = (
        find_model(ModelSettings(written(tmp_path, str(plain), "int8"))),
        find_model(ModelSettings(str(plain))),
    )
    ours, theirs = (each.load(torch.float32, CPU, quantization="int8").weights for each in (kept, given))
    assert ours.adapters == theirs.adapters == {"linear_spec_lora"}


def test_what_cannot_be_written_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(model: str, kind: str, target: Path) -> str:
        assert main(["--quiet", "quantize", "--model", model, "--quantization", kind, "--output", str(target)]) == 2
        return capsys.readouterr().err

    folder = folder_of(tmp_path, checkpoints.SDAR)
    assert "Unknown quantization 'int5'" in ask(folder, "int5", tmp_path / "new")
    assert "hidden=16 is not a multiple of 32" in ask(folder, "int4", tmp_path / "new")
    mixture = folder_of(tmp_path / "mixture", checkpoints.SDAR_MOE)
    assert "quantization='fp8' is for dense models" in ask(mixture, "fp8", tmp_path / "new")
    assert "exists and is not an empty folder" in ask(folder, "int8", tmp_path)
    assert not (tmp_path / "new").exists()
    done = written(tmp_path, folder, "int8")
    with monkeypatch.context() as patched:
        fail = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
        patched.setattr("remask.checkpoint.quantized_files.read_numbers", fail)
        told = ask(folder, "int8", tmp_path / "new")
        assert "model.safetensors cannot be read: [Errno 5] Input/output error" in told, "it is not --output's fault"
    with monkeypatch.context() as patched:
        full = Mock(side_effect=SafetensorError("I/O error: No space left on device"))
        patched.setattr("remask.checkpoint.quantized_files.save_file", full)
        told = ask(folder, "int8", tmp_path / "full")
        assert f"--output: '{tmp_path / 'full'}' cannot be written: " in told
        assert "No space left on device" in told
    assert "is quantized already" in ask(done, "int8", tmp_path / "again")
    config = Path(done) / "config.json"
    config.write_text(config.read_text().replace('"remask"', '"gptq"'))
    with pytest.raises(CheckpointError, match=r"is quantized by GPTQ .*gptq"):
        find_model(ModelSettings(done))


def test_missing_scales_are_named(tmp_path: Path) -> None:
    done = Path(written(tmp_path, folder_of(tmp_path, checkpoints.SDAR), "int8"))
    file = done / "model-00001.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[f"{name}_scale"] = tensors[f"{name}_scale"][:5].clone()
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"The int8 model in .* lacks .*up_proj.weight_scale \[24\]"):
        find_model(ModelSettings(str(done))).load(torch.float32, CPU)


@EACH
def test_rows_that_are_not_rounded_are_multiplied_with_what_the_numbers_stand_for(kind: Quantization) -> None:
    """It is linear, which a product that rounds its rows is not, and near what was quantized."""
    values, x, bias = numbers(128, 96), numbers(9, 96, seed=1), numbers(128, seed=2)
    made, unrounded = matrix(kind, values), UnroundedArithmetic()
    stored = unrounded.linear(torch.eye(96), made).t()
    assert far(stored, values) < ERROR[kind]
    torch.testing.assert_close(unrounded.linear(x, made, bias), x @ stored.t() + bias, rtol=1e-5, atol=1e-4)
    assert far(unrounded.linear(x.bfloat16(), made), x @ stored.t()) < 0.01
    assert torch.equal(unrounded.linear(x, values), F.linear(x, values))

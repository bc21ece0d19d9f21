"""RoPE in float32 whatever the model's dtype, as a checkpoint's `rope_full_precision` asks for it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from remask.families.llada import LLADA as LLADA_FAMILY
from remask.families.llada_moe import LLADA_MOE as LLADA_MOE_FAMILY
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from tests.checkpoint.checkpoints import LLADA, LLADA_MOE
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import lively_weights, small_config

ROWS = 64


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """`x` [N, heads, Dh] in float64: channels c and c + Dh / 2 are a complex number, which is turned by an angle."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, None, None] * frequencies)
    number = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([number.real, number.imag], dim=-1)


def case(*, wide: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[ModelConfig, Transformer, Tensor, Tensor]:
    config = replace(small_config("llada"), rope_float32=wide)
    model = Transformer(config, lively_weights(config, dtype))
    positions = torch.arange(config.max_length)[-ROWS:]
    return config, model, torch.randn(ROWS, config.hidden).to(dtype), positions


@torch.inference_mode()
def queries(model: Transformer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Before and after RoPE."""
    w, heads = model.weights.layers[0], model.config.heads
    plain = model.arithmetic.linear(x, w.qkv[: heads * model.config.head_dim])
    found, _ = model._project(x, w, range(heads), model.cos[positions], model.sin[positions])
    return plain.view_as(found), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """Each number is the right one's neighbour; with rounded cosines some are further away."""
    far = {}
    for wide in (False, True):
        config, model, x, positions = case(wide=wide, dtype=dtype)
        assert model.cos.dtype == (torch.float32 if wide else dtype)
        plain, found = queries(model, x, positions)
        assert found.dtype == dtype
        exact = turned(plain, positions, config.rope_theta)
        far[wide] = ((found.double() - exact).abs() / exact.abs().clamp_min(1e-3)).max().item()
    assert far[True] <= torch.finfo(dtype).eps / 2 * 1.05 < far[False]


def test_a_model_of_float32_computes_the_same_either_way() -> None:
    for wide in (False, True):
        _, model, x, positions = case(wide=wide, dtype=torch.float32)
        plain, found = queries(model, x, positions)
        assert model.cos.dtype == torch.float32
        torch.testing.assert_close(
            found, turned(plain, positions, model.config.rope_theta).float(), rtol=1e-4, atol=1e-5
        )


@NEEDS_TRITON
@pytest.mark.usefixtures("on_device")
def test_the_kernel_rounds_once_too() -> None:
    from remask.model.layer_triton import TritonLayer

    config, model, x, positions = case(wide=True)
    w, slots = model.weights.layers[0], torch.arange(ROWS)
    k, v = (torch.empty(ROWS, config.kv_heads, config.head_dim, dtype=x.dtype) for _ in range(2))
    with torch.inference_mode():
        qkv = model.arithmetic.linear(x, w.qkv)
        found = TritonLayer(config).heads(qkv, w, model.cos[positions], model.sin[positions], k, v, slots)
    every = qkv.view(ROWS, -1, config.head_dim)
    for part, own in ((found, every[:, : config.heads]), (k, every[:, config.heads :][:, : config.kv_heads])):
        exact = turned(own, positions, config.rope_theta)
        error = (part.double() - exact).abs() / exact.abs().clamp_min(1e-3)
        assert error.max() <= torch.finfo(x.dtype).eps / 2 * 1.05


@pytest.mark.parametrize(("given", "expected"), [(None, True), (True, True), (False, False)])
def test_llada_says_so(given: bool | None, expected: bool) -> None:
    assert LLADA_FAMILY.config(LLADA | {"rope_full_precision": given}).rope_float32 is expected


@pytest.mark.parametrize(("given", "expected"), [(None, False), (True, True), (False, False)])
def test_llada_moe_may_say_so(given: bool | None, expected: bool) -> None:
    assert LLADA_MOE_FAMILY.config(LLADA_MOE | {"rope_full_precision": given}).rope_float32 is expected

"""RoPE in float32 whatever the model's dtype, as a checkpoint's `rope_full_precision` asks for it, and scaled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.families.llada import LLADA as LLADA_FAMILY
from remask.families.llada_moe import LLADA_MOE as LLADA_MOE_FAMILY
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from tests.checkpoint.checkpoints import LLADA, LLADA_MOE, write
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import CPU, CheckedTransformer, lively_weights, small_config
from tests.engine.test_adapters import logits

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
    found, _ = model._project(x, 0, range(heads), model.cos_sin(0, positions))
    return plain.view_as(found), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """Each number is the right one's neighbour; with rounded cosines some are further away."""
    far = {}
    for wide in (False, True):
        config, model, x, positions = case(wide=wide, dtype=dtype)
        assert model.rope_tables[0][0].dtype == (torch.float32 if wide else dtype)
        plain, found = queries(model, x, positions)
        assert found.dtype == dtype
        exact = turned(plain, positions, config.rope_theta)
        far[wide] = ((found.double() - exact).abs() / exact.abs().clamp_min(1e-3)).max().item()
    assert far[True] <= torch.finfo(dtype).eps / 2 * 1.05 < far[False]


def test_a_model_of_float32_computes_the_same_either_way() -> None:
    for wide in (False, True):
        _, model, x, positions = case(wide=wide, dtype=torch.float32)
        plain, found = queries(model, x, positions)
        assert model.rope_tables[0][0].dtype == torch.float32
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
        found = TritonLayer(config).place_heads(qkv, w, *model.cos_sin(0, positions), k, v, slots)
    every = qkv.view(ROWS, -1, config.head_dim)
    for part, own in ((found, every[:, : config.heads]), (k, every[:, config.heads :][:, : config.kv_heads])):
        exact = turned(own, positions, config.rope_theta)
        error = (part.double() - exact).abs() / exact.abs().clamp_min(1e-3)
        assert error.max() <= torch.finfo(x.dtype).eps / 2 * 1.05


@pytest.mark.parametrize("given", [None, True, False])
def test_a_checkpoint_says_so(given: bool | None) -> None:
    """LLaDA's computes so unless it says otherwise, and LLaDA-MoE's only where it says so."""
    more = {"rope_full_precision": given}
    assert LLADA_FAMILY.config(LLADA | more).rope_float32 is (given is not False)
    assert LLADA_MOE_FAMILY.config(LLADA_MOE | more).rope_float32 is (given is True)


SCALED: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)


@pytest.mark.parametrize("scaled", SCALED, ids=lambda scaled: scaled["rope_type"])
@pytest.mark.parametrize(
    ("model_type", "kind", "model"),
    [
        ("a2d-llama", LlamaConfig, LlamaForCausalLM),
        ("a2d-qwen2", Qwen2Config, Qwen2ForCausalLM),
        ("a2d-qwen3", Qwen3Config, Qwen3ForCausalLM),
    ],
)
def test_logits_of_scaled_positions_are_those_of_transformers(
    model_type: str, kind: Any, model: Any, scaled: dict[str, Any], tmp_path: Path
) -> None:
    """Llama, Qwen2 and Qwen3 without their causal mask, beyond the positions of their first training."""
    own = kind(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rope_parameters=scaled | {"rope_theta": 5000.0},
    )  # fmt: skip
    reference = model(own).requires_grad_(False)
    for weight in reference.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    raw = own.to_dict() | {"model_type": model_type, "mask_token_id": 60, "eos_token_id": 2, "dtype": "float32"}
    write(tmp_path, raw, {name: weight.contiguous() for name, weight in reference.state_dict().items()})
    tokens = torch.randint(3, 60, (50,))
    loaded = find_model(ModelSettings(str(tmp_path))).load(torch.float32, CPU)
    (found,) = logits(
        CheckedTransformer(loaded.config, loaded.weights), [(None, Canvas.masked(tokens.tolist(), 14, 60))]
    )
    canvas = torch.cat([tokens, torch.full((14,), 60)])
    expected = reference(canvas[None], attention_mask=torch.zeros(1, 1, 64, 64), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    plain = reference.__class__(kind(**own.to_dict() | {"rope_parameters": {"rope_theta": 5000.0}})).requires_grad_(
        False
    )
    plain.load_state_dict(reference.state_dict())
    unscaled = plain(canvas[None], attention_mask=torch.zeros(1, 1, 64, 64), use_cache=False).logits[0]
    assert (unscaled - expected).abs().max() > 0.1, "the scaling matters here"

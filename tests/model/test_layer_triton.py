"""The kernels between the products of a layer, in Triton's interpreter, against PyTorch's own operations."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.executors import Executor
from remask.model.stage import NO_ADAPTERS
from remask.model.transformer import Transformer
from remask.request.sampling_params import SamplingParams
from remask.sampling.vocabulary import WHOLE
from tests.device import device
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import lively_adapters, lively_weights, small_config

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("on_device")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def kernels(config: ModelConfig) -> Any:
    from remask.model.layer_triton import TritonLayer

    return TritonLayer(config)


@DTYPES
def test_norm_and_sum(dtype: torch.dtype) -> None:
    config = small_config("llada")
    layer, size = kernels(config), 37
    h, new, weight = (torch.randn(*shape).to(dtype) for shape in ((5, size), (5, size), (size,)))
    close(layer.norm(h, weight), F.rms_norm(h, (size,), weight, config.norm_eps))
    total, kept = h + new, torch.full((9, size), torch.nan).to(dtype)
    slots = torch.tensor([3, -1, 0, 8, -1])
    given = new.clone()
    normed = layer.add(h, new, weight, kept, slots)
    close(normed, F.rms_norm(total, (size,), weight, config.norm_eps))
    assert torch.equal(h, total)
    assert torch.equal(new, given)
    assert torch.equal(kept[[3, 0, 8]], new[[0, 2, 3]])
    assert kept[[1, 2, 4, 5, 6, 7]].isnan().all()
    assert layer.add(h, new, None) is h
    assert torch.equal(h, total + new)
    assert layer.norm(h[:0], weight).shape == (0, size)


@pytest.mark.few(5)
@DTYPES
@pytest.mark.parametrize("norm", [None, "head", "whole"])
@pytest.mark.parametrize(("heads", "groups", "dim", "turned"), [(4, 4, 8, None), (6, 2, 12, 8), (3, 1, 16, None)])
def test_heads(heads: int, groups: int, dim: int, turned: int | None, norm: Any, dtype: torch.dtype) -> None:
    """As the transformer computes them without kernels; rows without a slot write nothing."""
    config = replace(
        preset("llada-tiny"), layers=1, hidden=heads * dim, heads=heads, kv_heads=groups, head_dim=dim,
        rotary_dim=turned, qk_norm=norm,
    )  # fmt: skip
    model = Transformer(config, lively_weights(config, dtype, device=torch.device(device())))
    w, rows = model.weights.layers[0], 5
    x = torch.randn(rows, config.hidden).to(dtype)
    cos, sin = model.cos_sin(0, torch.arange(2, 2 + rows))
    with torch.inference_mode():
        turned_heads, values = model._project(x, 0, range(heads + 2 * groups), (cos, sin))
        k, v = (torch.full((9, groups, dim), torch.nan).to(dtype) for _ in range(2))
        slots = torch.tensor([4, 0, -1, 8, 2])
        q = kernels(config).place_heads(F.linear(x, w.qkv, w.qkv_bias), w, cos, sin, k, v, slots)
    close(q, turned_heads[:, :heads])
    close(k[[4, 0, 8, 2]], turned_heads[[0, 1, 3, 4], heads:])
    close(v[[4, 0, 8, 2]], values[[0, 1, 3, 4]])
    for kept in (k, v):
        assert kept[[1, 3, 5, 6, 7]].isnan().all()


@DTYPES
def test_gate(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 2 * 300) * 3).to(dtype)
    given = x.clone()
    gate, up = x.chunk(2, dim=-1)
    close(kernels(small_config("llada")).gate(x), F.silu(gate) * up)
    assert torch.equal(x, given)


def test_what_the_kernels_do_not_compute_is_computed_without_them() -> None:
    """A gate of GELU by its approximation; values that are keys."""
    config = replace(small_config("llada"), mlp="geglu_tanh")
    model = Transformer(config, lively_weights(config, torch.float32, device=torch.device(device())))
    x, w = torch.randn(3, config.hidden), model.weights.layers[0]
    plain = model._mlp(x, w, NO_ADAPTERS)
    model.kernels = Executor("triton", "").kernels(model)
    assert model.kernels is not None
    close(model._mlp(x, w, NO_ADAPTERS), plain)
    model.config = replace(config, tied_values=True)
    assert Executor("triton", "").kernels(model) is None


@DTYPES
def test_greedy(dtype: torch.dtype) -> None:
    from remask.sampling.kernels_triton import TritonVocabulary

    logits = (torch.randn(6, 9001) * 4).to(dtype)
    logits[0, 8999], logits[1, 3] = 50.0, 50.0  # the mask token is the largest of row 1
    logits[2, [5, 4500, 9000]] = 60.0  # of equal ones the first
    logits[3] = -torch.inf
    logits[3, 7000] = 1.0
    read = TritonVocabulary().greedy(logits, 3)
    torch.testing.assert_close(read, WHOLE.greedy(logits.clone(), 3), rtol=1e-5, atol=1e-6)
    assert read[0].tolist()[:4:2] == [8999, 5]
    assert read[0, 3] == 7000


@pytest.mark.few(5)
@pytest.mark.parametrize("family", ["llada", "dream", "gidd", "sdar", "modernbert"])
def test_the_same_tokens_as_by_pytorch(family: str) -> None:
    """With biases, norms of heads, capped scores, sinks and other MLPs, and an adapter for one of two requests."""
    config = replace(small_config(family) if family != "gidd" else preset("gidd-tiny"), layers=1, max_length=64)
    if config.sliding is not None:  # a layer of each kind, with windows that are shorter than the canvas
        config = replace(config, layers=2, sliding=replace(config.sliding, reach=1))
    weights = lively_adapters(lively_weights(config, torch.float32, device=torch.device(device())), ["one"])
    found = []
    for attention in ("torch", "triton"):
        settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 12, "page_size": 4, "attention": attention}
        engine = Engine(Transformer(config, weights), EngineConfig(**settings), "test")
        assert (engine.model.kernels is not None) == (attention == "triton")
        params = SamplingParams(max_tokens=2, block_length=2, ignore_eos=True, seed=5)
        for number in range(2):
            engine.add(Request(str(number), [7] * 3 + [9 + number], params, adapter="one" if number else None))
        events = [event for _ in range(20) for event in engine.step()]
        found.append({event.id: event.result.token_ids for event in events if event.result is not None})
    assert found[0] == found[1]
    assert len(found[0]) == 2

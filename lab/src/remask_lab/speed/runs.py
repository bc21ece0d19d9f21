"""Models and engines of the measurements, and the bare products of a pass."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from remask import LLM, EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask_lab.ops.clock import time_call


def open_random(args: argparse.Namespace, **limits: Any) -> LLM:
    """Open the preset `--model` with random weights; `limits` are settings of its `EngineConfig`."""
    return LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=EngineConfig(**limits))


def on_device(llm: LLM) -> Callable[[Callable[[], object]], float]:
    """A function that returns the seconds of a call until the model's device has done its work."""
    return lambda call: time_call(call, llm.model.device)


def engine_of(llm: LLM, requests: Sequence[Request]) -> Engine:
    """A new engine with `requests` added. Raises `ConfigError` where one cannot run."""
    engine = llm.session.new_engine()
    for request in requests:
        engine.add(request)
    return engine


def bare_pass(llm: LLM, rows: Sequence[int], predicted: int, keys: int, canvases: int = 1) -> Callable[[], None]:
    """A function that computes only the matrix products and attention of a pass, on random inputs.

    The pass has `rows[i]` rows in layer i and `predicted` rows in the head, of `canvases` canvases of `keys` positions;
    with 0 keys there is no attention. Raises `ConfigError` on a mixture of experts, whose products depend on how rows
    are routed.
    """
    if llm.loaded.config.mixture is not None:
        raise ConfigError(
            "bare matrix products are those of a dense model, and this one has experts; use another model"
        )
    config, weights = llm.loaded.config, llm.loaded.weights
    max_rows = max(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=llm.model.dtype, device=llm.model.device)

    x, intermediate = random(max_rows, config.hidden), random(max_rows, config.intermediate)
    attention_output = random(max_rows, config.heads * config.head_dim)
    head_input = random(predicted, config.hidden)
    q = random(canvases, config.heads, -(-max_rows // canvases), config.head_dim)
    kv = random(canvases, config.kv_heads, keys, config.head_dim)

    @torch.inference_mode()
    def run() -> None:
        """Compute the products layer by layer. Layers without rows are left out."""
        for count, layer in zip(rows, weights.layers, strict=True):
            if not count:
                continue
            F.linear(x[:count], layer.qkv, layer.qkv_bias)
            if keys:
                queries = q[:, :, : -(-count // canvases)]
                F.scaled_dot_product_attention(queries, kv, kv, enable_gqa=config.heads != config.kv_heads)
            F.linear(attention_output[:count], layer.out)
            F.linear(x[:count], layer.gate_up)
            F.linear(intermediate[:count], layer.down)
        F.linear(head_input, weights.head)

    return run

"""Models, requests and engines of the measurements, and a pass' bare products."""

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
    """Open the preset that `--model` names, with random weights; `limits` are those of its engine."""
    return LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=EngineConfig(**limits))


def on_device(llm: LLM) -> Callable[[Callable[[], object]], float]:
    """Measures the seconds of a call until the model's device is done."""
    return lambda call: time_call(call, llm.model.device)


def engine_of(llm: LLM, requests: Sequence[Request]) -> Engine:
    engine = llm.session.new_engine()
    for request in requests:
        engine.add(request)
    return engine


def bare_pass(llm: LLM, rows: Sequence[int], predicted: int, keys: int, canvases: int = 1) -> Callable[[], None]:
    """The products and attention of a pass over `rows[i]` rows in layer i, and `predicted` rows in the head.

    Inputs are random. The rows belong to `canvases` canvases with `keys` positions each; where it is 0, there is no
    attention. Raises `ConfigError` on a mixture of experts, whose products depend on how rows are routed.
    """
    if llm.loaded.config.mixture is not None:
        raise ConfigError(
            "bare matrix products are those of a dense model, and this one has experts; use another model"
        )
    c, weights, most = llm.loaded.config, llm.loaded.weights, max(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=llm.model.dtype, device=llm.model.device)

    x, wide, flat = (random(most, size) for size in (c.hidden, c.intermediate, c.heads * c.head_dim))
    head, q = random(predicted, c.hidden), random(canvases, c.heads, -(-most // canvases), c.head_dim)
    kv = random(canvases, c.kv_heads, keys, c.head_dim)

    @torch.inference_mode()
    def run() -> None:
        for count, layer in zip(rows, weights.layers, strict=True):
            if not count:
                continue
            F.linear(x[:count], layer.qkv, layer.qkv_bias)
            if keys:
                own = q[:, :, : -(-count // canvases)]
                F.scaled_dot_product_attention(own, kv, kv, enable_gqa=c.heads != c.kv_heads)
            F.linear(flat[:count], layer.out)
            F.linear(x[:count], layer.gate_up)
            F.linear(wide[:count], layer.down)
        F.linear(head, weights.head)

    return run

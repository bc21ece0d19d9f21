"""Beside the engine: a dense loop of PyTorch's own operations, and products of few bits beside dense ones."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.checks import Quantization
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.quantized import empty_matrix
from remask_lab.gpu.steady import Shape, synchronize
from remask_lab.ops.clock import time_call

PASSES = 6


@torch.inference_mode()
def plain_row(config: ModelConfig, shape: Shape, requests: int, device: torch.device) -> dict[str, object]:
    """Time a pass over whole canvases of a dense model as large as `config`, and what it comes to at 2 tokens a step.

    It has one product for Q, K and V, one for gate and up, fused attention, and logits of the response alone, which is
    more than such code usually does. All layers read the matrices of one, which are larger than a GPU's caches.
    """
    one = _Plain(config, shape, requests, device)
    one()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(PASSES):
        one()
    synchronize(device)
    seconds = (time.perf_counter() - start) / PASSES
    return {
        "cell": f"b={requests} plain PyTorch",
        "cache": "plain PyTorch",
        "attention": "torch",
        "settings": {},
        "requests": requests,
        "tokens_per_step": 2,
        "steps": PASSES,
        "tok_s": 2 * requests / seconds,
        "ms_per_step": 1e3 * seconds,
    }


class _Plain:
    def __init__(self, config: ModelConfig, shape: Shape, requests: int, device: torch.device) -> None:
        hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.config, self.response, dtype = config, shape.response, getattr(torch, shape.dtype)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=dtype) * 0.02

        self.qkv, self.out = drawn(queries + 2 * keys, hidden), drawn(hidden, queries)
        self.wide, self.down = drawn(2 * config.intermediate, hidden), drawn(hidden, config.intermediate)
        self.head, self.x = drawn(config.vocab, hidden), drawn(requests, shape.canvas, hidden)
        self.gain, self.angle = torch.ones(hidden, device=device, dtype=dtype), drawn(shape.canvas, config.head_dim)

    def __call__(self) -> Tensor:
        config, x = self.config, self.x
        several = config.heads != config.kv_heads
        for _ in range(config.layers):
            heads = F.linear(self._norm(x), self.qkv).view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            attended = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, enable_gqa=several)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), self.out)
            gate, up = F.linear(self._norm(x), self.wide).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, self.down)
        return F.linear(self._norm(x)[:, -self.response :], self.head).argmax(-1)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden,), self.gain)

    def _turned(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.angle + torch.cat([-right, left], dim=-1) * self.angle


ROWS = (8, 32, 256, 1024, 8192)
CALLS, TRIES = 10, 5


@torch.inference_mode()
def time_products(kind: Quantization, shape: Shape, rows: int, device: torch.device) -> dict[str, Any]:
    """The product for gate and up with as many rows: the error as a share of the result's size, and both times."""
    config, dtype = preset(shape.preset), getattr(torch, shape.dtype)
    size = (2 * config.intermediate, config.hidden)
    dense = torch.randn(size, device=device).mul_(config.hidden**-0.5).to(dtype)
    few = empty_matrix(kind, size, dtype, device, (size[0],))
    few.write(slice(0, size[0]), dense)
    x = torch.randn((rows, config.hidden), device=device).to(dtype)
    exact = F.linear(x.float(), dense.float())
    return {
        "rows": rows,
        "matrix": size,
        "error": float((F.linear(x, few).float() - exact).norm() / exact.norm()),
        "ms": _milliseconds(x, few),
        "dense_ms": _milliseconds(x, dense),
    }


def _milliseconds(x: Tensor, matrix: Tensor) -> float:
    """Of one product, where several are queued."""

    def calls() -> None:
        for _ in range(CALLS):
            F.linear(x, matrix)

    calls()
    return 1e3 / CALLS * min(time_call(calls, x.device) for _ in range(TRIES))

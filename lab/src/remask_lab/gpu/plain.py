"""Baselines of the engine: a dense loop of PyTorch's own operations, and dense products beside quantized ones."""

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

PASSES = 6  # that are timed together
TOKENS_PER_STEP = 2


@torch.inference_mode()
def plain_row(config: ModelConfig, shape: Shape, requests: int, device: torch.device) -> dict[str, object]:
    """Time passes over whole canvases of a dense model of the shape `config`. Returns a row of `measure_cell`'s form.

    The loop is better than such code usually is: one product for Q, K and V, one for gate and up, fused attention, and
    logits of the response alone. All layers share the matrices of one, which are larger than a GPU's caches.
    """
    loop = _PlainLoop(config, shape, requests, device)
    loop()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(PASSES):
        loop()
    synchronize(device)
    seconds = (time.perf_counter() - start) / PASSES
    return {
        "cell": f"b={requests} plain PyTorch",
        "cache": "plain PyTorch",
        "attention": "torch",
        "settings": {},
        "requests": requests,
        "tokens_per_step": TOKENS_PER_STEP,
        "steps": PASSES,
        "tok_s": TOKENS_PER_STEP * requests / seconds,
        "ms_per_step": 1e3 * seconds,
    }


class _PlainLoop:
    """A pass of a dense Llama with random weights over canvases of random hidden states."""

    def __init__(self, config: ModelConfig, shape: Shape, requests: int, device: torch.device) -> None:
        hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        dtype = getattr(torch, shape.dtype)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=dtype) * 0.02  # as large as weights usually are

        self.config = config
        self.response = shape.response
        self.qkv = random(queries + 2 * keys, hidden)
        self.out = random(hidden, queries)
        self.gate_up = random(2 * config.intermediate, hidden)
        self.down = random(hidden, config.intermediate)
        self.head = random(config.vocab, hidden)
        self.x = random(requests, shape.canvas, hidden)
        self.gain = torch.ones(hidden, device=device, dtype=dtype)
        self.angle = random(shape.canvas, config.head_dim)

    def __call__(self) -> Tensor:
        """Run the pass, and return a token id for each position of the responses."""
        config, x = self.config, self.x
        grouped = config.heads != config.kv_heads
        for _ in range(config.layers):
            heads = F.linear(self._norm(x), self.qkv).view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
            attended_values = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, enable_gqa=grouped)
            x = x + F.linear(attended_values.transpose(1, 2).flatten(2), self.out)
            gate, up = F.linear(self._norm(x), self.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, self.down)
        return F.linear(self._norm(x)[:, -self.response :], self.head).argmax(-1)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden,), self.gain)

    def _rotate(self, x: Tensor) -> Tensor:
        """The operations of RoPE on `x` [requests, heads, canvas, Dh], with random numbers as cosines and sines."""
        left, right = x.chunk(2, dim=-1)
        return x * self.angle + torch.cat([-right, left], dim=-1) * self.angle


ROWS = (8, 32, 256, 1024, 8192)
CALLS, TRIES = 10, 5  # calls that are queued together, and repetitions of them


@torch.inference_mode()
def time_products(kind: Quantization, shape: Shape, rows: int, device: torch.device) -> dict[str, Any]:
    """Time the product of `rows` rows with the quantized and the dense matrix for gate and up, in milliseconds.

    "error" is the norm of the quantized product's error over that of the exact product.
    """
    config, dtype = preset(shape.preset), getattr(torch, shape.dtype)
    size = (2 * config.intermediate, config.hidden)
    dense = torch.randn(size, device=device).mul_(config.hidden**-0.5).to(dtype)
    quantized = empty_matrix(kind, size, dtype, device, (size[0],))
    quantized.write(slice(0, size[0]), dense)
    x = torch.randn((rows, config.hidden), device=device).to(dtype)
    exact = F.linear(x.float(), dense.float())
    return {
        "rows": rows,
        "matrix": size,
        "error": float((F.linear(x, quantized).float() - exact).norm() / exact.norm()),
        "ms": _milliseconds(x, quantized),
        "dense_ms": _milliseconds(x, dense),
    }


def _milliseconds(x: Tensor, matrix: Tensor) -> float:
    """The milliseconds of one product: those of `CALLS` products divided by `CALLS`, the least of `TRIES` times."""

    def calls() -> None:
        for _ in range(CALLS):
            F.linear(x, matrix)

    calls()
    return 1e3 / CALLS * min(time_call(calls, x.device) for _ in range(TRIES))

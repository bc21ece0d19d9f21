"""The matrix products and attention of a pass and nothing else, with which the engine's time is compared."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from remask import LLM
from remask.errors import ConfigError


def bare_pass(llm: LLM, rows: Sequence[int], predicted: int, keys: int, canvases: int = 1) -> Callable[[], None]:
    """Returns a pass that computes `rows[i]` rows in layer i, and `predicted` rows in the head, on random inputs.

    The rows belong to `canvases` canvases with `keys` positions each; where it is 0, there is no attention. Raises
    `ConfigError` on a mixture of experts, whose products depend on how rows are routed.
    """
    if llm.loaded.config.mixture is not None:
        raise ConfigError(
            "bare matrix products are those of a dense model, and this one has experts; use another model"
        )
    c, weights, most = llm.loaded.config, llm.loaded.weights, max(rows)
    width = c.heads * c.head_dim
    x, wide, flat = (_random(llm, most, size) for size in (c.hidden, c.intermediate, width))
    head = _random(llm, predicted, c.hidden)
    q = _random(llm, canvases, c.heads, -(-most // canvases), c.head_dim)
    kv = _random(llm, canvases, c.kv_heads, keys, c.head_dim)

    @torch.inference_mode()
    def run() -> None:
        for count, layer in zip(rows, weights.layers, strict=True):
            if not count:
                continue
            F.linear(x[:count], layer.qkv, layer.qkv_bias)
            each = -(-count // canvases)
            if keys:
                F.scaled_dot_product_attention(q[:, :, :each], kv, kv, enable_gqa=c.heads != c.kv_heads)
            F.linear(flat[:count], layer.out)
            F.linear(x[:count], layer.gate_up)
            F.linear(wide[:count], layer.down)
        F.linear(head, weights.head)

    return run


def _random(llm: LLM, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=llm.model.dtype, device=llm.model.device)

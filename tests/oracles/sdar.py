"""Dense forward passes of Llama, Qwen2 and Qwen3 under any mask, everything computed in one pass.

SDAR, Fast-dLLM v2 and A2D are these under masks of their own; `experts`, `nemotron` and `sumi` build on them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.dense import KV


@dataclass(frozen=True)
class SdarPass:
    """One pass over a whole sequence: `states[l]` is the input of layer l, the last entry the last layer's output."""

    states: Tensor  # [layers + 1, positions, width], before the final norm
    kv: KV  # K after its norm and RoPE
    logits: Tensor  # [positions, vocabulary]; row i predicts position i


class SdarModel:
    """A checkpoint's weights and its forward pass. Norms of q and k, and biases, are those that it has tensors of."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
    ) -> None:
        self.config, self.dtype = config, dtype
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        weights = self.names(self.tensors, config)
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.block_length: int | None = config.get("block_size")
        self.turned = int(self.head_size * config.get("partial_rotary_factor", 1))
        self.mask_id: int = config.get("mask_token_id", -1)
        self.eps: float = config["rms_norm_eps"]
        self.embedding, self.last_norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.output = self.embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        self.weights = [
            {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
                for name, tensor in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            for layer in range(self.layers)
        ]
        pairs = torch.arange(0, self.turned, 2, dtype=torch.float32)
        self.frequencies = (
            1.0 / (config.get("rope_theta") or config["rope_parameters"]["rope_theta"]) ** (pairs / self.turned)
        ).to(dtype)

    def names(self, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:  # noqa: ARG002
        """The checkpoint's tensors under Qwen3's names."""
        return tensors

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, the weight applied after normalising."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def project(self, layer: int, name: str, x: Tensor) -> Tensor:
        """q, k or v of normed rows from position 0 on, [T, heads, head size]; q and k normed per head and rotated."""
        weights, own = self.weights[layer], f"self_attn.{name}"
        y = F.linear(x, weights[f"{own}_proj"], weights.get(f"{own}_proj.bias")).view(len(x), -1, self.head_size)
        if name == "v":
            return y
        y = self.norm(y, weights[f"{own}_norm"]) if f"{own}_norm" in weights else y
        angles = torch.arange(len(x)).to(self.dtype)[:, None, None] * self.frequencies
        first, second = y[..., : self.turned].chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, y[..., self.turned :]], -1)

    def weighed(self, scores: Tensor) -> Tensor:
        """The shares of the keys, of scores [heads, T, keys]."""
        return scores.softmax(-1)

    def attended(self, layer: int, x: Tensor) -> Tensor:
        """What attention adds: the projection of what the heads found, [T, heads * head size]."""
        return F.linear(x, self.weights[layer]["self_attn.o_proj"])

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """The gated MLP of normed rows."""
        gate, up, down = (self.weights[layer][f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def forward(self, tokens: Tensor, block_length: int) -> SdarPass:
        """All rows of the sequence `tokens` [T] from position 0, each seeing its own block and all earlier ones."""
        return self.under(block_causal(len(tokens), block_length), tokens)

    def under(self, seen: Tensor, tokens: Tensor) -> SdarPass:
        """All rows of the sequence `tokens` [T] from position 0, each seeing what `seen` [T, T] says."""
        x = self.embedding[tokens]
        states, keys, values = [x], [], []
        for layer, weights in enumerate(self.weights):
            normed = self.norm(x, weights["input_layernorm"])
            q, k, v = (self.project(layer, name, normed) for name in "qkv")
            keys.append(k)
            values.append(v)
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
            scores = torch.einsum("nhd,thd->hnt", q, k) / self.head_size**0.5
            weighed = self.weighed(scores.masked_fill(~seen, -torch.inf))
            x = x + self.attended(layer, torch.einsum("hnt,thd->nhd", weighed, v).flatten(1))
            normed = self.norm(x, weights["post_attention_layernorm"])
            x = x + self.feed_forward(layer, normed)
            states.append(x)
        logits = F.linear(self.norm(x, self.last_norm), self.output)
        return SdarPass(torch.stack(states), KV(torch.stack(keys), torch.stack(values)), logits)


def block_causal(length: int, block_length: int) -> Tensor:
    """What each row sees, [T, T]: blocks are cut at multiples of `block_length` from position 0."""
    block = torch.arange(length) // block_length
    return block[:, None] >= block[None, :]


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> SdarModel:
    """The model of a checkpoint folder; the same object for the same arguments."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return SdarModel(config, load_file(folder / "model.safetensors"), dtype)

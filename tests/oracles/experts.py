"""Dense forward passes of mixtures of experts: LLaDA-MoE, LLaDA2 (2.2 included) and SDAR-MoE.

Every expert computes every row, and a row's weights of the experts that it did not choose are zero. So nothing is
grouped, sorted or gathered. Attention is that of `dense` (bidirectional) and of `sdar` (block-causal).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.dense import DenseModel
from tests.oracles.sdar import SdarModel

LAYER = "model.layers.{}."


def unit(weights: Mapping[str, Tensor], stem: str, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x)) of the matrices whose names begin with `stem`."""
    gate, up, down = (weights[f"{stem}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def largest(scores: Tensor, count: int) -> Tensor:
    """Which of each row's scores are among its `count` largest, a bool of the same shape."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        for index in sorted(range(len(values)), key=lambda i: -values[i])[:count]:
            chosen[row, index] = True
    return chosen


def softmax_weights(logits: Tensor, active: int, *, normalise: bool) -> Tensor:
    """Weights [rows, experts] of Qwen3-MoE's router, and of LLaDA-MoE's, which never normalises."""
    p = logits.softmax(-1)
    p = p * largest(p, active)
    return p / p.sum(-1, keepdim=True) if normalise else p


def sigmoid_weights(logits: Tensor, bias: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Weights [rows, experts] of LLaDA2's router: the bias and the groups decide on the choice alone."""
    scores, groups = logits.sigmoid(), config["n_group"]
    ranked = scores + bias
    size = ranked.shape[1] // groups
    best = torch.stack([part.sort(-1).values[:, -2:].sum(-1) for part in torch.split(ranked, size, 1)], 1)
    allowed = largest(best, config["topk_group"]).repeat_interleave(size, 1)
    active = config["num_experts_per_tok"]
    weights = scores * largest(ranked.masked_fill(~allowed, -torch.inf), active)
    if active > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    scale: float = config["routed_scaling_factor"]
    return weights * scale


def pooled_weights(logits: Tensor, bias: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The same of LLaDA2.2: rows of a block choose from the experts that score best in any of them. No groups."""
    scores, size = logits.sigmoid(), config["block_size"]
    ranked, allowed = scores + bias, torch.zeros_like(scores, dtype=torch.bool)
    for start in range(0, len(ranked), size):
        pool = ranked[start : start + size].max(0, keepdim=True).values
        allowed[start : start + size] = largest(pool, config["expert_capacity"])
    weights = scores * largest(ranked.masked_fill(~allowed, -torch.inf), config["num_experts_per_tok"])
    scale: float = config["routed_scaling_factor"]
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale


def mixed(weights: Mapping[str, Tensor], routed: Tensor, layer: int, x: Tensor) -> Tensor:
    """The sum of all experts' outputs, weighted by `routed` [rows, experts]."""
    experts = (unit(weights, f"{LAYER.format(layer)}mlp.experts.{e}.", x) for e in range(routed.shape[1]))
    return sum((routed[:, e : e + 1] * out for e, out in enumerate(experts)), torch.zeros_like(x))


class LladaMoeModel(DenseModel):
    """LLaDA-MoE under bidirectional attention; the K of its passes are normed, and not yet rotated."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: Mapping[str, Any] = config
        self.tensors = {n: tensor.to(dtype) for n, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype, self.dream = dtype, False
        self.layers, self.heads, self.width = (
            config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        self.kv_heads: int = config["num_key_value_heads"] or self.heads
        self.mask_id, self.eps, self.head_size = (
            config["mask_token_id"], config["rms_norm_eps"], self.width // self.heads
        )  # fmt: skip
        ends = ("model.embed_tokens", "model.norm", "lm_head")
        self.embedding, self.last_norm, self.output = (self.tensors[f"{end}.weight"] for end in ends)
        names = {
            "attn_norm": "input_layernorm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "ffn_norm": "post_attention_layernorm",
        }
        self.weights = [
            {short: self.tensors[f"{LAYER.format(layer)}{name}.weight"] for short, name in names.items()}
            for layer in range(self.layers)
        ]
        self.turned = int(self.head_size * config["partial_rotary_factor"])
        pairs = torch.arange(0, self.turned, 2, dtype=torch.float32)
        self.frequencies = (1.0 / config["rope_theta"] ** (pairs / self.turned)).to(dtype)

    def project(self, layer: int, name: str, x: Tensor) -> Tensor:
        """As ever; q and k are normed per head."""
        heads = super().project(layer, name, x)
        return heads if name == "v" else self.norm(heads, self.weights[layer][f"{name}_norm"])

    def rotate(self, x: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
        """RoPE of the leading channels."""
        return torch.cat([super().rotate(x[..., : self.turned], positions, layer), x[..., self.turned :]], -1)

    def routing(self, layer: int, x: Tensor) -> Tensor:
        """The weights [rows, experts] of normed rows in a layer with experts."""
        logits = F.linear(x, self.tensors[f"{LAYER.format(layer)}mlp.gate.weight"])
        return softmax_weights(logits, self.config["num_experts_per_tok"], normalise=False)

    def feed_forward(self, layer: int, h: Tensor) -> Tensor:
        """The layer's MLP, or its experts, on its own norm of the residual stream."""
        x, stem = self.norm(h, self.weights[layer]["ffn_norm"]), LAYER.format(layer)
        if not self.config["moe_layer_freq"][layer]:
            return unit(self.tensors, f"{stem}mlp.", x)
        out = mixed(self.tensors, self.routing(layer, x), layer, x)
        if self.config["shared_expert_intermediate_size"]:
            out = out + unit(self.tensors, f"{stem}shared_expert.", x)
        return out


class SdarMoeModel(SdarModel):
    """SDAR-MoE: SDAR's attention, Qwen3-MoE's experts."""

    def dense(self, layer: int) -> bool:
        """Whether the layer has an MLP in place of experts."""
        return layer in self.config["mlp_only_layers"] or (layer + 1) % self.config["decoder_sparse_step"] != 0

    def routing(self, layer: int, x: Tensor) -> Tensor:
        """The weights [rows, experts] of normed rows in a layer with experts."""
        logits = F.linear(x, self.tensors[f"{LAYER.format(layer)}mlp.gate.weight"])
        return softmax_weights(logits, self.config["num_experts_per_tok"], normalise=self.config["norm_topk_prob"])

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """The layer's MLP, or its experts, of normed rows."""
        if self.dense(layer):
            return unit(self.tensors, f"{LAYER.format(layer)}mlp.", x)
        return mixed(self.tensors, self.routing(layer, x), layer, x)


class Llada2Model(SdarMoeModel):
    """LLaDA2: one tensor of q, k and v, RoPE of the leading channels, groups of experts and a shared one."""

    def names(self, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors under the names of SDAR's layer."""
        renamed = {
            "model.word_embeddings": "model.embed_tokens",
            "attention.dense": "self_attn.o_proj",
            "attention.query_layernorm": "self_attn.q_norm",
            "attention.key_layernorm": "self_attn.k_norm",
        }
        out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if "query_key_value" in name:
                heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
                parts = torch.split(tensor, [count * config["head_dim"] for count in (heads, kv, kv)])
                for part, letter in zip(parts, "qkv", strict=True):
                    out[name.replace("attention.query_key_value", f"self_attn.{letter}_proj")] = part
                continue
            for old, new in renamed.items():
                name = name.replace(old, new)
            out[name] = tensor
        return out

    def dense(self, layer: int) -> bool:
        """Whether the layer has an MLP in place of experts."""
        return bool(layer < self.config["first_k_dense_replace"])

    def routing(self, layer: int, x: Tensor) -> Tensor:
        """The weights [rows, experts] of normed rows in a layer with experts."""
        gate = f"{LAYER.format(layer)}mlp.gate"
        logits = F.linear(x, self.tensors[f"{gate}.weight"])
        weights = pooled_weights if self.config.get("expert_capacity") else sigmoid_weights
        return weights(logits, self.tensors[f"{gate}.expert_bias"], self.config)

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        """The layer's MLP, or its experts and the shared one, of normed rows."""
        out = super().feed_forward(layer, x)
        return out if self.dense(layer) else out + unit(self.tensors, f"{LAYER.format(layer)}mlp.shared_experts.", x)


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> LladaMoeModel | SdarMoeModel:
    """The model of a checkpoint folder; the same object for the same arguments."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (architecture,) = config["architectures"]
    if architecture == "LLaDAMoEModelLM":
        return LladaMoeModel(folder, dtype)
    kind = {"LLaDA2MoeModelLM": Llada2Model, "SDARMoeForCausalLM": SdarMoeModel}[architecture]
    return kind(config, load_file(folder / "model.safetensors"), dtype)


@contextmanager
def routed(model: LladaMoeModel | SdarMoeModel) -> Iterator[list[Tensor]]:
    """A list that gets the dense weights [T, E] of each layer that `model` routes, while the context lasts."""
    seen: list[Tensor] = []
    route = model.routing

    def watched(layer: int, x: Tensor) -> Tensor:
        seen.append(route(layer, x))
        return seen[-1]

    vars(model)["routing"] = watched
    try:
        yield seen
    finally:
        del vars(model)["routing"]

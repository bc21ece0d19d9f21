"""Dense GIDD forward passes on position-indexed arrays.

Every array is as long as the canvas and indexed by absolute position; what was not computed or not provided is NaN. K
is kept as a cache holds it: normed and rotated. The bias token's K/V are weights and stand in no cache here.
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
class GiddPass:
    """One forward pass: `states[l]` is the input of layer l, the last entry the last layer's output before the norm."""

    states: Tensor  # [layers + 1, positions, width], NaN in rows that were not computed
    kv: KV  # what was attended to: computed and given entries together
    logits: Tensor  # [positions, vocabulary], NaN in rows that were not computed
    attention: Tensor  # probabilities [layers, heads, computed rows, keys]; the bias token, if any, is key 0
    rows: list[int]  # computed rows per layer


class GiddModel:
    """Weights of one checkpoint folder and its forward pass."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype = dtype
        self.layers: int = config["num_hidden_layers"]
        self.width: int = config["hidden_size"]
        self.head_size: int = config["head_dim"]
        self.heads = self.width // self.head_size
        self.vocabulary: int = config["vocab_size"]
        self.canvas_length: int = config["max_position_embeddings"]
        self.mask_id: int = 3 if config.get("mask_token_id") is None else config["mask_token_id"]
        self.eos_id: int = config["eos_token_id"]
        self.noise_shift: float = config["noise_type"]
        self.log_snr_range: tuple[float, float] = (config["min_log_snr"], config["max_log_snr"])
        self.eps: float = config["rms_norm_eps"]
        self.cap: float = config["attn_soft_cap"]
        self.residual: float = config["resid_scale"] / self.layers
        self.structured: bool = config.get("structured_attention", True)
        self.has_sink: bool = config["attention_bias"]
        self.has_qk_norm: bool = config["use_qk_norm"]
        self.has_mlp_bias: bool = config["mlp_bias"]
        self.weight_scaling: float | str = config["weight_scaling"]
        self.embedding = weights["model.embed_tokens.weight"]
        tied: bool = config["tie_word_embeddings"]
        self.output = self.embedding if tied else weights["lm_head.weight"] * config["head_scaling"]
        self.last_norm = weights["model.norm.weight"]
        self.weights = [_below(weights, f"model.layers.{layer}.") for layer in range(self.layers)]
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float32)
        self.frequencies = (1.0 / config["rope_theta"] ** (pairs / self.head_size)).to(dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm whose gain is stored around zero."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + weight)

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        """A projection, its product scaled before the bias is added."""
        weight = self.weights[layer][f"{name}.weight"]
        scaling = self.weight_scaling
        if isinstance(scaling, str):
            scaling = weight.shape[{"fan_in": 1, "fan_out": 0}[scaling]] ** -0.5
        y = scaling * F.linear(x, weight)
        return y + self.weights[layer][f"{name}.bias"] if self.has_mlp_bias and name.startswith("mlp.") else y

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE in the half-split layout for [n, heads, head size] at the absolute `positions` [n]."""
        angles = positions.to(self.dtype)[:, None, None] * self.frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def project(self, layer: int, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """q, k or v of normed rows as attention takes them, [n, heads, head size]; q and k normed across the heads."""
        y = self.linear(layer, f"self_attn.{name}_proj", x)
        if self.has_qk_norm and name in "qk":
            y = self.norm(y, self.weights[layer][f"self_attn.{name}_norm.weight"])
        y = y.view(len(x), self.heads, self.head_size)
        return y if name == "v" else self.rotate(y, positions)

    def sink(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the bias token, [1, heads, head size], or none of them [0, ...]."""
        if not self.has_sink:
            none = torch.empty(0, self.heads, self.head_size, dtype=self.dtype)
            return none, none
        return self.weights[layer]["self_attn.k_bias"][None], self.weights[layer]["self_attn.v_bias"][None]

    def mix(self, layer: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Capped attention of `q` [n, ...] over the canvas' K/V [T, ...]: (mixed values [n, width], probabilities).

        `visible` [n, T] hides canvas positions after the cap; the bias token is seen by all. What is seen must exist.
        """
        absent = (k.isnan() | v.isnan()).flatten(1).any(-1)
        if visible[:, absent].any():
            raise ValueError(f"layer {layer} attends to K/V that nobody computed")
        sink_k, sink_v = self.sink(layer)
        k, v = torch.cat([sink_k, k.nan_to_num()]), torch.cat([sink_v, v.nan_to_num()])
        scores = torch.einsum("nhd,thd->hnt", q * self.head_size**-0.5, k)
        seen = F.pad(visible, (len(sink_k), 0), value=True)
        scores = (self.cap * (scores / self.cap).tanh()).where(seen, torch.finfo(self.dtype).min)
        weights = scores.softmax(-1)
        return torch.einsum("hnt,thd->nhd", weights, v).flatten(1), weights

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor | None = None,
        given: KV | None = None,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> GiddPass:
        """One pass over the canvas `tokens` [T] in which only `rows` (a mask [T], default all) are computed.

        The K/V of other positions come from `given`; computed rows replace theirs before anything is attended to.
        `visible` [T, T] says what a row (first index) sees, default everything. `positions` [T] default to 0..T-1.
        """
        length = len(tokens)
        live = torch.ones(length, dtype=torch.bool) if rows is None else rows
        seen = torch.ones(length, length, dtype=torch.bool) if visible is None else visible
        places = (torch.arange(length) if positions is None else positions)[live]
        kv = given or self.empty_kv(length)
        keys, values = kv.k.clone(), kv.v.clone()
        states = torch.full((self.layers + 1, length, self.width), torch.nan, dtype=self.dtype)
        x = self.embedding[tokens[live]]
        probabilities = []
        for layer, weights in enumerate(self.weights):
            states[layer, live] = x
            normed = self.norm(x, weights["attn_layernorm.weight"])
            q, keys[layer, live], values[layer, live] = (self.project(layer, name, normed, places) for name in "qkv")
            mixed, attention = self.mix(layer, q, keys[layer], values[layer], seen[live])
            probabilities.append(attention)
            x = x + self.residual * self.linear(layer, "self_attn.o_proj", mixed)
            up = self.linear(layer, "mlp.up_proj", self.norm(x, weights["mlp_layernorm.weight"]))
            x = x + self.residual * self.linear(layer, "mlp.down_proj", up.relu().square())
        states[self.layers, live] = x
        logits = F.linear(self.norm(states[-1], self.last_norm), self.output)
        return GiddPass(states, KV(keys, values), logits, torch.stack(probabilities), [int(live.sum())] * self.layers)

    def empty_kv(self, length: int) -> KV:
        """K/V of a canvas of `length` positions about which nothing is known."""
        absent = torch.full((self.layers, length, self.heads, self.head_size), torch.nan, dtype=self.dtype)
        return KV(absent, absent)


def structured(noisy: Tensor) -> Tensor:
    """What each row sees, [T, T]: clean rows see clean rows, noisy rows everything."""
    return noisy[:, None] | ~noisy[None, :]


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> GiddModel:
    """The model of a checkpoint folder; the same object for the same arguments."""
    return GiddModel(folder, dtype)


def _below(weights: Mapping[str, Tensor], stem: str) -> dict[str, Tensor]:
    return {name.removeprefix(stem): weight for name, weight in weights.items() if name.startswith(stem)}

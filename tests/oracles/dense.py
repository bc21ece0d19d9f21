"""Dense LLaDA, iLLaDA and Dream forward passes on position-indexed arrays (section 0 of the semantics).

Every array is as long as the canvas and indexed by absolute position. What was not computed or not provided is NaN, so
a decoder that reads something it never stored fails at once. K is kept before RoPE and rotated on use.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

_LLADA = {
    "attn_norm": "attn_norm.weight",
    "q": "q_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "o": "attn_out.weight",
    "ffn_norm": "ff_norm.weight",
    "gate": "ff_proj.weight",
    "up": "up_proj.weight",
    "down": "ff_out.weight",
}
_DREAM = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}
_ILLADA = {short: name for short, name in _DREAM.items() if not short.endswith("_bias")}
_ILLADA_MASK = 5


@dataclass(frozen=True)
class KV:
    """K before RoPE and V of all layers, [layers, positions, kv heads, head size]; NaN where absent."""

    k: Tensor
    v: Tensor

    def only(self, mask: Tensor) -> "KV":
        """The same with every position outside `mask` forgotten."""
        keep = mask[None, :, None, None]
        return KV(self.k.where(keep, torch.nan), self.v.where(keep, torch.nan))

    def over(self, other: "KV") -> "KV":
        """This one's entries, and `other`'s where this one has none."""
        return KV(self.k.where(~self.k.isnan(), other.k), self.v.where(~self.v.isnan(), other.v))

    def below(self, layer: int) -> "KV":
        """The same with layers `layer` and above forgotten."""
        keep = (torch.arange(len(self.k)) < layer)[:, None, None, None]
        return KV(self.k.where(keep, torch.nan), self.v.where(keep, torch.nan))

    def padded(self, length: int) -> "KV":
        """The same on a canvas of `length` positions, absent beyond its own."""
        missing = (0, 0, 0, 0, 0, length - self.k.shape[1])
        return KV(F.pad(self.k, missing, value=torch.nan), F.pad(self.v, missing, value=torch.nan))


@dataclass(frozen=True)
class Pass:
    """One forward pass: `states[l]` is the input of layer l, the last entry the last layer's output before the norm."""

    states: Tensor  # [layers + 1, positions, width], NaN where a layer's row was not computed
    kv: KV  # what was attended to: computed and given entries together
    logits: Tensor  # raw outputs [positions, vocabulary], NaN where the last layer did not compute the row
    rows: list[int]  # computed rows per layer


class DenseModel:
    """Weights of one checkpoint folder and the primitives of its layer; [n, ...] arguments hold n rows."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype = dtype
        self.dream = config["model_type"] == "Dream"
        if self.dream or config["model_type"] == "illada":
            self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
            self.kv_heads, self.width = config["num_key_value_heads"], config["hidden_size"]
            names, stem = _DREAM if self.dream else _ILLADA, "model.layers"
            head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
            ends = ("model.embed_tokens", "model.norm", head)
        else:
            self.layers, self.heads = config["n_layers"], config["n_heads"]
            self.kv_heads, self.width = config["n_kv_heads"], config["d_model"]
            names, stem = _LLADA, "model.transformer.blocks"
            ends = ("model.transformer.wte", "model.transformer.ln_f", "model.transformer.ff_out")
        self.mask_id: int = config.get("mask_token_id", _ILLADA_MASK)
        self.eps: float = config["rms_norm_eps"]
        self.head_size: int = self.width // self.heads
        self.embedding, self.last_norm, self.output = (weights[f"{end}.weight"] for end in ends)
        self.weights = [
            {short: weights[f"{stem}.{layer}.{name}"] for short, name in names.items()} for layer in range(self.layers)
        ]
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float32)
        self.frequencies: Tensor = (1.0 / config["rope_theta"] ** (pairs / self.head_size)).to(dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, the weight applied after normalising."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def project(self, layer: int, name: str, x: Tensor) -> Tensor:
        """The q, k or v projection of normed rows, split into heads: [n, heads, head size]."""
        weights = self.weights[layer]
        heads = self.heads if name == "q" else self.kv_heads
        return F.linear(x, weights[name], weights.get(f"{name}_bias")).view(len(x), heads, self.head_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """What enters the first layer."""
        return self.embedding[tokens]

    def entering(self, layer: int, h: Tensor) -> Tensor:
        """The normed rows of which a layer projects q, k and v."""
        return self.norm(h, self.weights[layer]["attn_norm"])

    def turns(self, layer: int) -> Tensor:  # noqa: ARG002
        """The frequencies of RoPE in a layer."""
        return self.frequencies

    def seen(self, layer: int, positions: Tensor, places: Tensor) -> Tensor:  # noqa: ARG002
        """Which of the keys at `places` rows at `positions` see, [n, m]."""
        return torch.ones(len(positions), len(places), dtype=torch.bool)

    def rotate(self, x: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
        """RoPE in the half-split layout for [n, heads, head size] at the absolute `positions` [n]."""
        angles = positions.to(self.dtype)[:, None, None] * self.turns(layer)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def attention(self, layer: int, x: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention, projected, of normed rows `x` at `positions` over the canvas' `k` (unrotated) and `v`."""
        if k.isnan().any() or v.isnan().any():
            raise ValueError(f"layer {layer} attends to K/V that nobody computed")
        shares = self.scores(layer, x, positions, k, torch.arange(len(k))).softmax(-1)
        mixed = torch.einsum("nht,thd->nhd", shares, v.repeat_interleave(self.heads // self.kv_heads, 1))
        return F.linear(mixed.flatten(1), self.weights[layer]["o"])

    def scores(self, layer: int, x: Tensor, positions: Tensor, k: Tensor, places: Tensor) -> Tensor:
        """Scores [n, heads, m] of normed rows `x` at `positions` over `k` [m] (unrotated) at `places`; unseen: -inf."""
        q = self.rotate(self.project(layer, "q", x), positions, layer)
        k = self.rotate(k, places, layer).repeat_interleave(self.heads // self.kv_heads, 1)
        scores: Tensor = torch.einsum("nhd,thd->nht", q, k) / self.head_size**0.5
        return scores.masked_fill(~self.seen(layer, positions, places)[:, None], -torch.inf)

    def feed_forward(self, layer: int, h: Tensor) -> Tensor:
        """The gated MLP on its own norm of the residual stream."""
        weights = self.weights[layer]
        x = self.norm(h, weights["ffn_norm"])
        return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])

    def head(self, h: Tensor) -> Tensor:
        """Raw logits of the last layer's output."""
        return F.linear(self.norm(h, self.last_norm), self.output)

    def predictions(self, raw: Tensor) -> Tensor:
        """Logits by the position they predict: Dream's row p-1 speaks for position p, position 0 for itself."""
        return torch.cat([raw[:1], raw[:-1]]) if self.dream else raw

    def forward(
        self,
        tokens: Tensor,
        rows: Tensor | Sequence[Tensor] | None = None,
        given: KV | None = None,
        restored: Mapping[int, Tensor] | None = None,
        frozen: Mapping[int, Tensor] | None = None,
    ) -> Pass:
        """One pass over the canvas `tokens` [T] in which only `rows` are computed.

        `rows`: a mask [T] for all layers, or one per layer; default everything. Every layer attends to all T positions:
        the K/V of rows it does not compute come from `given`. Rows which join at a layer start from `restored[layer]`
        [T, width]. Rows in `frozen[layer]` are computed, but `given` stays their K/V.
        """
        length = len(tokens)
        everything = torch.ones(length, dtype=torch.bool)
        per_layer = [everything if rows is None else rows] * self.layers if not isinstance(rows, Sequence) else rows
        kv = given or self.empty_kv(length)
        keys, values = kv.k.clone(), kv.v.clone()
        states = torch.full((self.layers + 1, length, self.width), torch.nan, dtype=self.dtype)
        states[0, per_layer[0]] = self.embed(tokens[per_layer[0]])
        for layer, live in enumerate(per_layer):
            h = states[layer]
            if restored and layer in restored:
                joining = live & h.isnan().any(-1)
                h[joining] = restored[layer][joining]
            x = self.entering(layer, h)
            written = live & ~frozen[layer] if frozen and layer in frozen else live
            keys[layer, written] = self.project(layer, "k", x[written])
            values[layer, written] = self.project(layer, "v", x[written])
            out = h[live] + self.attention(layer, x[live], live.nonzero()[:, 0], keys[layer], values[layer])
            states[layer + 1, live] = out + self.feed_forward(layer, out)
        return Pass(states, KV(keys, values), self.head(states[-1]), [int(live.sum()) for live in per_layer])

    def rotated_keys(self, kv: KV) -> Tensor:
        """The keys of `kv` after RoPE, [layers, positions, kv heads, head size]."""
        return torch.stack([self.rotate(k, torch.arange(len(k)), layer) for layer, k in enumerate(kv.k)])

    def empty_kv(self, length: int) -> KV:
        """K/V of a canvas of `length` positions about which nothing is known."""
        absent = torch.full((self.layers, length, self.kv_heads, self.head_size), torch.nan, dtype=self.dtype)
        return KV(absent, absent)


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> DenseModel:
    """The model of a checkpoint folder; the same object for the same arguments."""
    return DenseModel(folder, dtype)

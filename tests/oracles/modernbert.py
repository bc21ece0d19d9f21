"""Dense ModernBERT forward passes: windows, two bases of RoPE, LayerNorm, GeGLU, and a head with a matrix."""

import json
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.dense import DenseModel


class ModernBertModel(DenseModel):
    """A checkpoint with the keys and names of transformers 4."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        held = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.dtype, self.dream, self.held = dtype, False, held
        self.layers, self.heads, self.width = (
            config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        self.kv_heads, self.head_size = self.heads, self.width // self.heads
        self.mask_id, self.eps = config["mask_token_id"], config["norm_eps"]
        self.every, self.window = config["global_attn_every_n_layers"], config["local_attention"] // 2
        self.embedding = held["model.embeddings.tok_embeddings.weight"]
        self.weights = []
        for layer in range(self.layers):
            stem = f"model.layers.{layer}."
            q, k, v = held[f"{stem}attn.Wqkv.weight"].chunk(3)
            names = {"o": "attn.Wo", "ffn_norm": "mlp_norm", "in": "mlp.Wi", "down": "mlp.Wo"}
            own = {short: held[f"{stem}{name}.weight"] for short, name in names.items()}
            self.weights.append(own | {"q": q, "k": k, "v": v})
        pairs = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        self.bases = [(1.0 / config[f"{kind}_rope_theta"] ** pairs).to(dtype) for kind in ("global", "local")]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """LayerNorm without a bias."""
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding is normed."""
        return self.norm(self.embedding[tokens], self.held["model.embeddings.norm.weight"])

    def entering(self, layer: int, h: Tensor) -> Tensor:
        """The first layer has no norm of its own."""
        return self.norm(h, self.held[f"model.layers.{layer}.attn_norm.weight"]) if layer else h

    def turns(self, layer: int) -> Tensor:
        """Those of layers that see everything, or of those that do not."""
        base: Tensor = self.bases[layer % self.every > 0]
        return base

    def seen(self, layer: int, positions: Tensor, places: Tensor) -> Tensor:
        """Neighbours, but in every so many layers."""
        near = (positions[:, None] - places).abs() <= self.window
        return near if layer % self.every else torch.ones_like(near)

    def feed_forward(self, layer: int, h: Tensor) -> Tensor:
        """GeGLU on its own norm of the residual stream."""
        weights = self.weights[layer]
        gate, up = F.linear(self.norm(h, weights["ffn_norm"]), weights["in"]).chunk(2, -1)
        return F.linear(gate / 2 * (1 + torch.erf(gate / 2**0.5)) * up, weights["down"])

    def head(self, h: Tensor) -> Tensor:
        """Final norm, a matrix, GELU and a norm, and then the embedding with a bias."""
        h = F.linear(self.norm(h, self.held["model.final_norm.weight"]), self.held["head.dense.weight"])
        h = self.norm(h / 2 * (1 + torch.erf(h / 2**0.5)), self.held["head.norm.weight"])
        return F.linear(h, self.embedding, self.held["decoder.bias"])


@cache
def load(folder: Path, dtype: torch.dtype = torch.float64) -> ModernBertModel:
    """The model of a checkpoint folder; the same object for the same arguments."""
    return ModernBertModel(folder, dtype)

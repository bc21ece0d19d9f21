"""A dense GIDD in plain PyTorch, for training: what `remask.families.gidd` loads.

Parameter names are those of the published checkpoints without their `model.` prefix, so that export is a renaming.
Embeddings are tied, and linear layers have no scale of their own (`weight_scaling` 1).
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import LocalHeads, offset_vectors, rope_tables, rotate

FREQUENCIES: Final = 3
"""Rotations by which the heads of the first layer distinguish positions at initialisation."""


@dataclass(frozen=True, slots=True)
class GiddShape:
    """The sizes of a model; the defaults are those of the bundled one."""

    vocab_size: int
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int = 512
    max_position_embeddings: int = 128
    rope_theta: float = 1000.0
    rms_norm_eps: float = 1e-6
    attn_soft_cap: float = 30.0
    resid_scale: float = 4.0
    structured_attention: bool = True
    """Clean rows see clean rows alone, as GIDD's do. False: every row sees everything."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class GainNorm(nn.Module):
    """Root-mean-square norm in float32 whose gain is 1 + weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.eps)


class SelfAttention(nn.Module):
    """Soft-capped attention with a learned key and value that every row sees."""

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        width, heads = shape.hidden_size, shape.num_attention_heads
        self.shape = shape
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm = GainNorm(width, shape.rms_norm_eps)
        self.k_norm = GainNorm(width, shape.rms_norm_eps)
        self.k_bias = nn.Parameter(torch.zeros(heads, shape.head_dim))
        self.v_bias = nn.Parameter(torch.zeros(heads, shape.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        """`x` [batch, length, width]; `hidden` [batch, 1, length, 1 + length] is -inf where a key is not seen."""
        batch, length, width = x.shape
        heads = (batch, length, self.shape.num_attention_heads, self.shape.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q = rotate(self.q_norm(self.q_proj(x)).to(v.dtype).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x)).to(v.dtype).view(heads).transpose(1, 2), cos, sin)
        sink_k, sink_v = (
            sink.to(v.dtype)[None, :, None].expand(batch, -1, -1, -1) for sink in (self.k_bias, self.v_bias)
        )
        k, v = torch.cat([sink_k, k], dim=2), torch.cat([sink_v, v], dim=2)
        cap = self.shape.attn_soft_cap
        scores = cap * torch.tanh(q @ k.transpose(2, 3) / (cap * math.sqrt(self.shape.head_dim)))
        mixed = (scores + hidden).softmax(dim=-1).to(v.dtype) @ v
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Mlp(nn.Module):
    """Squared ReLU between two projections with biases."""

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.relu(self.up_proj(x)).square())
        return out


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.residual = shape.resid_scale / shape.num_hidden_layers
        self.attn_layernorm = GainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.mlp_layernorm = GainNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.residual * self.self_attn(self.attn_layernorm(x), cos, sin, hidden)
        out: Tensor = x + self.residual * self.mlp(self.mlp_layernorm(x))
        return out


class DenseGidd(nn.Module):
    """The whole model; `forward` gives the logits of the selected positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = GainNorm(shape.hidden_size, shape.rms_norm_eps)
        cos, sin = rope_tables(shape.head_dim, shape.rope_theta, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, noisy: Tensor, rows: Tensor) -> Tensor:
        """Returns logits [selected, vocab] of the positions at which the boolean mask `rows` [batch, length] is set.

        `noisy` [batch, length] makes the structured mask: a row sees a row that is clean, or if it is noisy itself.
        Without structured attention it has no effect.
        """
        x = self.embed_tokens(tokens)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        cos, sin = (table[: tokens.shape[1]].to(dtype) for table in (self.cos, self.sin))
        unseen = noisy[:, None, None, :] & ~noisy[:, None, :, None]
        if not self.shape.structured_attention:
            unseen = torch.zeros_like(unseen)
        hidden = torch.zeros(unseen.shape, dtype=dtype, device=x.device).masked_fill(unseen, -torch.inf)
        hidden = F.pad(hidden, (1, 0))
        for layer in self.layers:
            x = layer(x, cos, sin, hidden)
        return F.linear(self.norm(x[rows]), self.embed_tokens.weight)


@torch.no_grad()
def initialize(model: DenseGidd) -> None:
    """Fills the weights: unit variance through every projection, and a first layer that attends to fixed offsets.

    As in the masked model, embeddings share a common direction, which queries and keys of the first layer map to
    vectors whose product after RoPE peaks at one distance a head. The norm of queries and keys bounds that product, so
    only the fastest rotations take part, which distinguish neighbours best, and the gains begin at 1.5.
    """
    shape = model.shape
    common = F.normalize(torch.randn(shape.hidden_size), dim=0)
    nn.init.normal_(model.embed_tokens.weight, std=1 / math.sqrt(shape.hidden_size))
    model.embed_tokens.weight += common
    for name, weight in model.layers.named_parameters():
        if name.endswith("proj.weight"):
            small = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=small / math.sqrt(weight.shape[1]))
        elif name.endswith("proj.bias"):
            nn.init.zeros_(weight)
    first = model.layers[0]
    assert isinstance(first, Layer)
    attention = first.self_attn
    vectors = offset_vectors(shape.head_dim, shape.rope_theta, FREQUENCIES, LocalHeads().offsets)
    assert len(vectors) == shape.num_attention_heads, "one head of the first layer per offset"
    for gain, matrix, side in ((attention.q_norm, attention.q_proj, 0), (attention.k_norm, attention.k_proj, 1)):
        gain.weight.fill_(0.5)
        nn.init.normal_(matrix.weight, std=0.02)
        matrix.weight += torch.outer(torch.cat([pair[side] for pair in vectors]), common)

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
"""Rotations by which local heads distinguish positions at initialisation."""


@dataclass(frozen=True, slots=True)
class GiddShape:
    """The sizes of a model; the defaults are those of the bundled one."""

    vocab_size: int
    hidden_size: int = 96
    num_hidden_layers: int = 7
    num_attention_heads: int = 6
    intermediate_size: int = 384
    max_position_embeddings: int = 128
    rope_theta: float = 1000.0
    rms_norm_eps: float = 1e-6
    attn_soft_cap: float = 30.0
    resid_scale: float = 0.875
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
        scores = torch.tanh((q / (cap * math.sqrt(self.shape.head_dim))) @ k.transpose(2, 3))
        mixed = torch.add(hidden, scores, alpha=cap).softmax(dim=-1) @ v
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

    def states(self, tokens: Tensor, noisy: Tensor) -> list[Tensor]:
        """Returns the hidden states that enter each layer, and last those that leave the last one.

        Each is [batch, length, width]. `noisy` [batch, length] makes the structured mask: a row sees a row that is
        clean, or if it is noisy itself. Without structured attention it has no effect.
        """
        x = self.embed_tokens(tokens)
        cos, sin = (table[: tokens.shape[1]] for table in (self.cos, self.sin))
        unseen = noisy[:, None, None, :] & ~noisy[:, None, :, None]
        if not self.shape.structured_attention:
            unseen = torch.zeros_like(unseen)
        hidden = F.pad(torch.zeros(unseen.shape).masked_fill(unseen, -torch.inf), (1, 0))
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], cos, sin, hidden))
        return states

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits of hidden states [..., width]: [..., vocab]."""
        return F.linear(self.norm(x), self.embed_tokens.weight)


@torch.no_grad()
def initialize(model: DenseGidd, local: LocalHeads) -> None:
    """Fills the weights as `training.model.initialize` does, for a model that norms its queries and keys.

    Those of a local layer are vectors whose product after RoPE peaks at one distance a head. Their norm bounds that
    product, so only the fastest rotations take part, which distinguish neighbours best, and the gains begin at 2.5;
    those of the other layers begin at 1.25. `resid_scale` makes embeddings large beside what layers add.
    """
    shape = model.shape
    width = shape.hidden_size
    common = F.normalize(torch.randn(width), dim=0)
    nn.init.normal_(model.embed_tokens.weight, std=1 / math.sqrt(width))
    model.embed_tokens.weight += common
    vectors = offset_vectors(shape.head_dim, shape.rope_theta, FREQUENCIES, local.offsets)
    assert len(vectors) == shape.num_attention_heads, "one head of a local layer per offset"
    for number, module in enumerate(model.layers):
        assert isinstance(module, Layer)
        attention, mlp = module.self_attn, module.mlp
        if number < local.layers:
            for matrix, side in ((attention.q_proj, 0), (attention.k_proj, 1)):
                nn.init.normal_(matrix.weight, std=0.02)
                matrix.weight += torch.outer(torch.cat([pair[side] for pair in vectors]), common)
        else:
            nn.init.orthogonal_(attention.q_proj.weight)
            attention.k_proj.weight.copy_(attention.q_proj.weight)
        for gain in (attention.q_norm, attention.k_norm):
            gain.weight.fill_(1.5 if number < local.layers else 0.25)
        nn.init.orthogonal_(attention.v_proj.weight)
        gain_out = local.gain if number == 0 else None
        attention.o_proj.weight.copy_(
            attention.v_proj.weight.T * (gain_out or 1 / math.sqrt(2 * shape.num_hidden_layers))
        )
        nn.init.normal_(mlp.up_proj.weight, std=1 / math.sqrt(width))
        nn.init.normal_(mlp.down_proj.weight, std=1 / math.sqrt(2 * shape.num_hidden_layers * shape.intermediate_size))
        for biased in (mlp.up_proj, mlp.down_proj):
            nn.init.zeros_(biased.bias)

"""A masked model in plain PyTorch, for training: pre-norm RMSNorm, RoPE, SwiGLU or experts, bidirectional attention.

Parameter names are those of the published LLaDA checkpoints without their `model.transformer.` prefix, so that export
is a renaming. Embeddings are tied: the same matrix reads tokens and predicts them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.mixture import Expert, Experts, Mixture


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model; the defaults are those of the transit model."""

    vocab_size: int
    d_model: int = 128
    n_layers: int = 10
    n_heads: int = 4
    mlp_hidden_size: int = 352
    max_sequence_length: int = 1024
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    embedding_scale: float = 1.0
    """What embeddings are multiplied with where tokens are read, and not where they are predicted."""
    family: Literal["llada", "dream", "llada-moe"] = "llada"
    """The published architecture that it has."""
    experts: Experts | None = None
    """Of every layer, which has no MLP then; LLaDA-MoE's."""

    @property
    def shift(self) -> int:
        """A position is predicted this many rows before it."""
        return int(self.family == "dream")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, the weight applied after normalisation."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)


def rope_tables(head_dim: int, theta: float, length: int) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine for positions below `length`, each [length, head_dim], halves repeated (NeoX layout)."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), theta ** (-pairs / head_dim))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) of the last axis by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, hidden = shape.d_model, shape.mlp_hidden_size
        biased = shape.family == "dream"
        self.n_heads = shape.n_heads
        self.attn_norm = RMSNorm(width, shape.rms_norm_eps)
        self.q_proj = nn.Linear(width, width, bias=biased)
        self.k_proj = nn.Linear(width, width, bias=biased)
        self.v_proj = nn.Linear(width, width, bias=biased)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = RMSNorm(width, shape.rms_norm_eps)
        # Parts of an MLP stand in the block itself, as in the published names.
        if shape.experts is None:
            self.ff_proj = nn.Linear(width, hidden, bias=False)
            self.up_proj = nn.Linear(width, hidden, bias=False)
            self.ff_out = nn.Linear(hidden, width, bias=False)
        self.mixture = None if shape.experts is None else Mixture(width, shape.experts)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """`visible` [batch, 1, length, length] says which rows (third axis) attend to which; None: all to all."""
        batch, length, width = x.shape
        heads = (batch, length, self.n_heads, width // self.n_heads)
        y = self.attn_norm(x)
        q = rotate(self.q_proj(y).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(y).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(y).view(heads).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=visible)
        x = x + self.attn_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self._feed(self.ff_norm(x))

    def _feed(self, y: Tensor) -> Tensor:
        out: Tensor
        out = self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y)) if self.mixture is None else self.mixture(y)
        return out


@dataclass(frozen=True, slots=True)
class Boundary:
    """What BiCache does with R = 1 (boundary state stored), said as a mask.

    In the first `depths[i]` layers of canvas i the rows of the prefix attend to the prefix alone.
    """

    prefix: int
    depths: Tensor

    def visible(self, layer: int, length: int) -> Tensor | None:
        """Which rows attend to which in layer `layer`, counted from 0: [batch, 1, length, length]; None: all to all."""
        alone = self.depths > layer
        if not alone.any():
            return None
        prefix = torch.arange(length, device=self.depths.device) < self.prefix
        hidden = prefix[:, None] & ~prefix[None, :]
        return ~(alone[:, None, None, None] & hidden)


class MaskedModel(nn.Module):
    """The whole model of `shape`; `forward` gives the logits of all positions, or of the selected ones only."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.ln_f = RMSNorm(shape.d_model, shape.rms_norm_eps)
        cos, sin = rope_tables(shape.head_dim, shape.rope_theta, shape.max_sequence_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, rows: Tensor | None = None, boundary: Boundary | None = None) -> Tensor:
        """Returns logits [batch, length, vocab], or [selected, vocab] where the boolean mask `rows` is given."""
        x = self.states(tokens, boundary)[-1]
        return self.head(x if rows is None else x[rows])

    def states(self, tokens: Tensor, boundary: Boundary | None = None) -> list[Tensor]:
        """Returns the hidden states that enter each layer, and last those that leave the last one.

        Each is [batch, length, width]. `boundary` hides what follows the prefix from the prefix's rows in some layers.
        """
        x = self.wte(tokens) * self.shape.embedding_scale
        # Under autocast the rotation runs in the projections' dtype: float32 tables would lift q and k to float32.
        table_dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = (table[: tokens.shape[1]].to(table_dtype) for table in (self.cos, self.sin))
        states = [x]
        for number, block in enumerate(self.blocks):
            visible = None if boundary is None else boundary.visible(number, tokens.shape[1])
            states.append(block(states[-1], cos, sin, visible))
        return states

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits of hidden states [..., width]: [..., vocab]."""
        return F.linear(self.ln_f(x), self.wte.weight)

    def predicting(self, positions: Tensor) -> Tensor:
        """Which rows predict the `positions`, both bool [batch, length]. No row predicts the first `shift` ones."""
        return positions.roll(-self.shape.shift, dims=1)

    @property
    def imbalance(self) -> Tensor:
        """How unevenly experts were used in the last forward, mean over the layers that have some; see `Mixture`."""
        parts = [block.mixture.imbalance for block in self.blocks if isinstance(block.mixture, Mixture)]
        return torch.stack(parts).mean() if parts else torch.zeros(())


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """Which layers begin as readers of neighbours: head h of each of the first `layers` attends to `offsets[h]`.

    `gain` is the scale of the first layer's attention output at initialisation; None: that of all layers.
    """

    offsets: tuple[int, ...] = (-2, -1, 1, 2)
    layers: int = 1
    gain: float | None = None


@torch.no_grad()
def initialize(model: MaskedModel, local: LocalHeads | None = None) -> None:
    """Fills the weights so that in-context lookup is near at hand for gradient descent.

    - Embeddings share a common direction, which gives the heads of the first layers a constant to rotate: each of them
      starts out attending to one fixed offset (`LocalHeads`), as a "previous token" head does.
    - In the other layers queries and keys start equal, so that rows attend to rows like themselves.
    - Values pass through nearly unchanged ("mimetic"): attention output is a scaled transpose of the value projection.

    From the usual random start the lookup did not emerge within the minutes that a run on CPU has.
    """
    local = local or LocalHeads()
    shape = model.shape
    width, head_dim = shape.d_model, shape.head_dim
    common = F.normalize(torch.randn(width), dim=0)
    nn.init.normal_(model.wte.weight, std=1 / math.sqrt(width))
    model.wte.weight += common
    for number, module in enumerate(model.blocks):
        assert isinstance(module, Block)
        if number < local.layers:
            _offset_heads(module, shape, common, local.offsets)
        else:
            nn.init.orthogonal_(module.q_proj.weight)
            module.k_proj.weight.copy_(module.q_proj.weight)
        nn.init.orthogonal_(module.v_proj.weight)
        gain = local.gain if number == 0 else None
        module.attn_out.weight.copy_(module.v_proj.weight.T * (gain or 1 / math.sqrt(2 * shape.n_layers)))
        for biased in (module.q_proj, module.k_proj, module.v_proj):
            if biased.bias is not None:
                nn.init.zeros_(biased.bias)
        mlps: list[Block | Expert] = [module]
        if module.mixture is not None:
            nn.init.normal_(module.mixture.router.weight, std=1 / math.sqrt(width))
            mlps = [expert for expert in module.mixture.experts if isinstance(expert, Expert)]
        for mlp in mlps:
            nn.init.normal_(mlp.ff_proj.weight, std=1 / math.sqrt(width))
            nn.init.normal_(mlp.up_proj.weight, std=1 / math.sqrt(width))
            nn.init.normal_(mlp.ff_out.weight, std=1 / math.sqrt(2 * shape.n_layers * mlp.ff_out.in_features))
    assert len(local.offsets) * head_dim == width, "one head of a local layer per offset"


def _offset_heads(block: Block, shape: ModelShape, common: Tensor, offsets: Sequence[int]) -> None:
    """Makes head h of `block` attend to the position `offsets[h]` away.

    After the norm every token has about sqrt(d / 2) of the common direction. Queries map it to a fixed vector u and
    keys to u rotated back by the offset, so that their product after RoPE peaks exactly there. Only the faster half of
    the frequencies takes part: the slower ones hardly distinguish neighbours.
    """
    head_dim = shape.head_dim
    strength = 6.0 / math.sqrt(shape.d_model / 2)
    nn.init.normal_(block.q_proj.weight, std=0.02)
    nn.init.normal_(block.k_proj.weight, std=0.02)
    for head, (query, key) in enumerate(offset_vectors(head_dim, shape.rope_theta, head_dim // 4, offsets)):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        block.q_proj.weight[rows] += torch.outer(strength * query, common)
        block.k_proj.weight[rows] += torch.outer(strength * key, common)


def offset_vectors(
    head_dim: int, theta: float, frequencies: int, offsets: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """For each of `offsets` a query and a key, [head_dim] each, whose product after RoPE peaks at that distance.

    They are 1 at the fastest `frequencies` of the rotations, and 0 elsewhere.
    """
    cos, sin = rope_tables(head_dim, theta, max(abs(offset) for offset in offsets) + 1)
    query = torch.zeros(head_dim)
    query[:frequencies] = 1.0
    return [
        (query, rotate(query, cos[abs(offset)], sin[abs(offset)] * (-1 if offset > 0 else 1))) for offset in offsets
    ]

"""The weights of the transformer, in the layout that it computes with."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from remask.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix, so one product computes them.

    A family's constant factors (GIDD's 1 + w gains, its scales of residuals, linear layers and head) are multiplied in
    when the checkpoint is read. Shapes, with D hidden, F intermediate, Q = heads * head_dim, K = kv_heads * head_dim:
    """

    attn_norm: Tensor  # [D]
    qkv: Tensor  # [Q + 2K, D]: query rows, then key rows, then value rows
    qkv_bias: Tensor | None  # [Q + 2K]
    out: Tensor  # [D, Q]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows; [F, D] of an MLP without a gate
    down: Tensor  # [D, F]
    q_norm: Tensor | None = None  # [head_dim]; [Q] where one norm covers all heads
    k_norm: Tensor | None = None  # [head_dim], or [K]
    sink_k: Tensor | None = None  # [kv_heads, head_dim]
    sink_v: Tensor | None = None  # [kv_heads, head_dim]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [D]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, on one device and of one dtype. Where `head` and `embed` are tied they are one tensor."""

    embed: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]

    @property
    def nbytes(self) -> int:
        """Bytes in memory. A tied matrix counts once."""
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())

    def tensors(self) -> list[Tensor]:
        """Every tensor, layer by layer. Tied ones appear twice."""
        flat = [self.embed, self.norm, self.head]
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            flat += [value for value in values if value is not None]
        return flat


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialised weights of the right shapes. The caller must fill every element."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    normed = {"head": (config.head_dim, config.head_dim), "whole": (q, k), None: None}[config.qk_norm]
    sink = (config.kv_heads, config.head_dim) if config.sink else None
    layers = tuple(
        LayerWeights(
            attn_norm=new(config.hidden),
            qkv=new(q + 2 * k, config.hidden),
            qkv_bias=new(q + 2 * k) if config.qkv_bias else None,
            out=new(config.hidden, q),
            ffn_norm=new(config.hidden),
            gate_up=new(config.up_rows, config.hidden),
            down=new(config.hidden, config.intermediate),
            q_norm=new(normed[0]) if normed else None,
            k_norm=new(normed[1]) if normed else None,
            sink_k=new(*sink) if sink else None,
            sink_v=new(*sink) if sink else None,
            up_bias=new(config.intermediate) if config.mlp_bias else None,
            down_bias=new(config.hidden) if config.mlp_bias else None,
        )
        for _ in range(config.layers)
    )
    embed = new(config.vocab, config.hidden)
    head = embed if config.tied else new(config.vocab, config.hidden)
    return Weights(embed=embed, layers=layers, norm=new(config.hidden), head=head)

"""The weights of the one transformer, in the layout that it multiplies with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from remask.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are stored as one matrix, so that they are one product.

    Shapes, with D hidden, F intermediate, Q = heads * head_dim, K = kv_heads * head_dim:
    """

    attn_norm: Tensor  # [D]
    qkv: Tensor  # [Q + 2K, D]: query rows, then key rows, then value rows
    qkv_bias: Tensor | None  # [Q + 2K]
    out: Tensor  # [D, Q]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows
    down: Tensor  # [D, F]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model on one device and of one dtype. `head` is `embed` itself where the two are tied."""

    embed: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]

    @property
    def nbytes(self) -> int:
        """Bytes held, the tied matrix counted once."""
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())

    def tensors(self) -> list[Tensor]:
        """Every tensor, layer by layer; tied ones appear twice."""
        flat = [self.embed, self.norm, self.head]
        for layer in self.layers:
            flat += [layer.attn_norm, layer.qkv, layer.out, layer.ffn_norm, layer.gate_up, layer.down]
            if layer.qkv_bias is not None:
                flat.append(layer.qkv_bias)
        return flat


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialised weights of the right shapes; whoever asks for them fills every element."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=new(config.hidden),
            qkv=new(q + 2 * k, config.hidden),
            qkv_bias=new(q + 2 * k) if config.qkv_bias else None,
            out=new(config.hidden, q),
            ffn_norm=new(config.hidden),
            gate_up=new(2 * config.intermediate, config.hidden),
            down=new(config.hidden, config.intermediate),
        )
        for _ in range(config.layers)
    )
    embed = new(config.vocab, config.hidden)
    head = embed if config.tied else new(config.vocab, config.hidden)
    return Weights(embed=embed, layers=layers, norm=new(config.hidden), head=head)

"""The weights of the transformer, in the layout that it computes with.

Nothing imports PyTorch before weights are made, as their size is asked for without any (`weight_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING, Any

from remask.checks import Quantization
from remask.model.config import Mixture, ModelConfig
from remask.model.ranks import Shard
from remask.model.sizes import NumberFormat, matrix_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix [M, K] as the product of two thin ones."""

    down: Tensor  # [r, K]
    up: Tensor  # [M, r], with the adapter's scale

    def dense(self, part: Sequence[slice] | None = None) -> Tensor:
        """The matrix, or `part` of its rows, or of its rows and columns."""
        rows, columns = (*(part or ()), slice(None), slice(None))[:2]
        return self.up[rows] @ self.down[:, columns]


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The router and the routed experts of one layer, with E experts of width F.

    Each expert's matrices lie in one piece, so that a grouped product reads them in place.
    """

    router: Tensor  # [E, D]; float32 where the router computes in it
    bias: Tensor | None  # float32 [E]
    gate_up: Tensor  # [E, 2F, D]: gate rows, then up rows
    down: Tensor  # [E, D, F]
    # Of a mixture that is `normed`: gains of norms before router and experts, behind the experts' sum and the shared
    # expert, [D] each, and the factor of each expert's weight [E].
    router_norm: Tensor | None = None
    expert_norm: Tensor | None = None
    expert_post: Tensor | None = None
    shared_post: Tensor | None = None
    factors: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix, so one product computes them.

    A family's constant factors (GIDD's 1 + w gains, its scales of residuals, linear layers and head) are multiplied in
    when the checkpoint is read. Shapes, with D hidden, F intermediate, Q = heads * head_dim, K = kv_heads * head_dim:
    """

    attn_norm: Tensor | None  # [D]
    qkv: Tensor  # [Q + 2K, D]: query rows, then key rows, then value rows, if values have any of their own
    qkv_bias: Tensor | None  # [Q + 2K]
    out: Tensor  # [D, Q]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows; [F, D] of an MLP without a gate
    down: Tensor  # [D, F]. In a mixture both are the shared expert's, and have F = 0 where there is none
    q_norm: Tensor | None = None  # [head_dim]; [Q] where one norm covers all heads
    k_norm: Tensor | None = None  # [head_dim], or [K]
    sink_k: Tensor | None = None  # [kv_heads, head_dim]
    sink_v: Tensor | None = None  # [kv_heads, head_dim]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [D]
    attn_post: Tensor | None = None  # [D]
    ffn_post: Tensor | None = None  # [D]
    scale: Tensor | None = None  # [2]: of final rows, and of rows that are denoised
    mixture: MixtureWeights | None = None
    low_rank: Mapping[str, Mapping[str, LowRank]] = field(default_factory=dict)
    """What adapters add to the matrices: by field, then by adapter."""

    def named(self) -> dict[str, Tensor]:
        """Every tensor of the layer by its field, without adapters; those of a mixture are `mixture.router`, ..."""
        values = _values(self)
        if self.mixture is not None:
            values |= {f"mixture.{name}": value for name, value in _values(self.mixture).items()}
        apart = ("mixture", "low_rank")
        return {name: value for name, value in values.items() if value is not None and name not in apart}


def _values(weights: LayerWeights | MixtureWeights | SignalWeights) -> dict[str, Any]:
    return {field.name: getattr(weights, field.name) for field in fields(weights)}


@dataclass(frozen=True, slots=True)
class SignalWeights:
    """The MLP through which rows that are denoised take in what was predicted of them (self-conditioning)."""

    norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows
    down: Tensor  # [D, F]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, or of one rank's part of it, on one device and of one dtype.

    Where `head` and `embed` are tied, `head` is a view of `embed`.
    """

    embed: Tensor  # [V, D], on every rank
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]
    embed_norm: Tensor | None = None  # [D]
    head_dense: Tensor | None = None  # [D, D]
    head_norm: Tensor | None = None  # [D]
    head_bias: Tensor | None = None  # [V]
    signal: SignalWeights | None = None

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that rows may be computed with."""
        return frozenset(name for layer in self.layers for changes in layer.low_rank.values() for name in changes)

    @property
    def nbytes(self) -> int:
        """Bytes in memory. A tied matrix counts once."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor, in the order of `named`."""
        return [tensor for _, _, tensor in self.named()]

    def named(self) -> list[tuple[str, int | None, Tensor]]:
        """Every tensor with its field and the number of its layer, if it is of one. A tied matrix is `embed`."""
        tied = self.head is self.embed or self.head._is_view()
        names = ("embed", "norm", *(() if tied else ("head",)), "embed_norm", "head_dense", "head_norm", "head_bias")
        outer = {name: getattr(self, name) for name in names}
        if self.signal is not None:
            outer |= {f"signal.{name}": value for name, value in _values(self.signal).items()}
        flat: list[tuple[str, int | None, Tensor]] = []
        flat += [(name, None, tensor) for name, tensor in outer.items() if tensor is not None]
        for number, layer in enumerate(self.layers):
            flat += [(name, number, tensor) for name, tensor in layer.named().items()]
        return flat


WHOLE = Shard()
_MIXTURE_NORMS = ("router_norm", "expert_norm", "expert_post", "shared_post")


@dataclass(slots=True)
class _Maker:
    """Makes uninitialised tensors on a device."""

    dtype: Any
    device: torch.device | None
    quantization: Quantization | None

    def new(self, *shape: int, single: bool = False) -> Any:
        """A tensor in the model's dtype, or in float32 where `single`."""
        import torch

        return torch.empty(shape, dtype=torch.float32 if single else self.dtype, device=self.device)

    def matrix(self, *shape: int, pieces: tuple[int, ...]) -> Any:
        """A matrix that may be quantised; its rows are those of several, which are cut from one another."""
        return self.new(*shape) if self.quantization is None or 0 in shape else self.quantised(shape, pieces)

    def quantised(self, shape: tuple[int, ...], pieces: tuple[int, ...]) -> Any:
        from remask.model.quantised import empty_matrix

        assert self.quantization is not None
        assert self.device is not None
        return empty_matrix(self.quantization, shape, self.dtype, self.device, pieces)


@dataclass(slots=True)
class _Counter(_Maker):
    """Makes nothing, and counts the bytes that it would take."""

    total: int = 0

    def new(self, *shape: int, single: bool = False) -> None:
        self.total += prod(shape) * (4 if single else self.dtype.itemsize)

    def quantised(self, shape: tuple[int, ...], pieces: tuple[int, ...]) -> None:  # noqa: ARG002 - as above
        assert self.quantization is not None
        self.total += matrix_bytes(self.quantization, shape)


def empty_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
) -> Weights:
    """Uninitialised weights of the shapes that `shard` has. The caller must fill every element."""
    return _layout(config, shard, _Maker(dtype, device, quantization))


def weight_bytes(
    config: ModelConfig, dtype: NumberFormat, shard: Shard = WHOLE, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights that `shard` has. A tied matrix counts once; a router may be float32."""
    counter = _Counter(dtype, None, quantization)
    _layout(config, shard, counter)
    return counter.total


def _layout(config: ModelConfig, shard: Shard, make: _Maker) -> Weights:
    """What `make` makes of every tensor."""
    config, new, matrix = shard.part(config), make.new, make.matrix

    def experts(mixture: Mixture) -> MixtureWeights:
        count, local, wide = mixture.experts, len(shard.experts(mixture)), config.hidden
        return MixtureWeights(
            router=new(count, wide, single=mixture.router.float32),
            bias=new(count, single=True) if mixture.router.bias else None,
            gate_up=matrix(local, 2 * mixture.intermediate, wide, pieces=(mixture.intermediate,) * 2),
            down=matrix(local, wide, mixture.intermediate, pieces=(wide,)),
            **{name: new(wide) for name in _MIXTURE_NORMS if mixture.normed},
            factors=new(count) if mixture.normed else None,
        )

    def one(layer: int) -> LayerWeights:
        shape, feed, mixture = config.shape_of(layer), config.feed(layer), config.mixture_of(layer)
        q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        rows = (q, k) if shape.tied_values else (q, k, k)
        norms = {"head": (shape.head_dim, shape.head_dim), "whole": (q, k), None: None}[config.qk_norm]
        sink = (shape.kv_heads, shape.head_dim) if config.sink == "learned" else None
        return LayerWeights(
            attn_norm=None if config.embed_norm and layer == 0 else new(config.hidden),
            qkv=matrix(sum(rows), config.hidden, pieces=rows),
            qkv_bias=new(sum(rows)) if config.qkv_bias else None,
            out=matrix(config.hidden, q, pieces=(config.hidden,)),
            ffn_norm=new(config.hidden),
            gate_up=matrix(
                feed.up, config.hidden, pieces=(feed.intermediate,) * (feed.up // max(1, feed.intermediate))
            ),
            down=matrix(config.hidden, feed.intermediate, pieces=(config.hidden,)),
            q_norm=new(norms[0]) if norms else None,
            k_norm=new(norms[1]) if norms else None,
            sink_k=new(*sink) if sink else None,
            sink_v=new(*sink) if sink else None,
            up_bias=new(config.intermediate) if config.mlp_bias else None,
            down_bias=new(config.hidden) if config.mlp_bias else None,
            attn_post=new(config.hidden) if config.post_norms else None,
            ffn_post=new(config.hidden) if config.post_norms else None,
            scale=new(2) if config.layer_scales else None,
            mixture=None if mixture is None else experts(mixture),
        )

    layers, signal = tuple(map(one, range(config.layers))), None
    if config.self_conditioning:
        wide, inner = config.hidden, config.intermediate
        signal = SignalWeights(new(wide), new(2 * inner, wide), new(wide, inner))
    embed, tokens = new(config.vocab, config.hidden), shard.share(config.vocab)
    head = embed if config.tied else new(len(tokens), config.hidden)
    if config.tied and embed is not None and len(tokens) < config.vocab:
        head = embed[tokens.start : tokens.stop]
    return Weights(
        embed=embed,
        layers=layers,
        norm=new(config.hidden),
        head=head,
        embed_norm=new(config.hidden) if config.embed_norm else None,
        head_dense=new(config.hidden, config.hidden) if config.head_dense else None,
        head_norm=new(config.hidden) if config.head_dense else None,
        head_bias=new(len(tokens)) if config.head_bias else None,
        signal=signal,
    )

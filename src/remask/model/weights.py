"""The weights of the transformer, in the layout that it computes with.

PyTorch is imported only when weights are made, so that `weight_bytes` works without it.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    def dense(self) -> Tensor:
        """The matrix [M, K]."""
        return self.up @ self.down

    def cut(self, rows: slice = slice(None), columns: slice = slice(None)) -> LowRank:
        """The factors of these rows and columns of the matrix, as views."""
        return LowRank(self.down[:, columns], self.up[rows])


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The router and the routed experts of one layer, with E experts of width F.

    Each expert's matrices are contiguous, so that a grouped product reads them in place.
    """

    router: Tensor  # [E, D]; float32 if `Router.float32`
    bias: Tensor | None  # float32 [E]
    gate_up: Tensor  # [E, 2F, D]: gate rows, then up rows
    down: Tensor  # [E, D, F]
    # Of a mixture that is `normed`: gains [D] of the norms before router and experts, and after the experts' sum and
    # the shared expert; and the factor of each expert's weight [E]
    router_norm: Tensor | None = None
    expert_norm: Tensor | None = None
    expert_post: Tensor | None = None
    shared_post: Tensor | None = None
    factors: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections of the same input are one matrix, so one product computes them.

    The loader multiplies a family's constant factors into the weights (GIDD's 1 + w gains, its scales of residuals,
    linear layers and head). Shapes, with D hidden, F intermediate, Q = heads * head_dim, K = kv_heads * head_dim:
    """

    attn_norm: Tensor | None  # [D]
    qkv: Tensor  # [Q + 2K, D]: query rows, key rows, value rows; [Q + K, D] with `ModelConfig.tied_values`
    qkv_bias: Tensor | None  # [Q + 2K]
    out: Tensor  # [D, Q]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows; [F, D] of an MLP without a gate
    down: Tensor  # [D, F]. In a mixture both are the shared expert's; without one F = 0
    q_norm: Tensor | None = None  # [head_dim]; [Q] if one norm covers all heads
    k_norm: Tensor | None = None  # [head_dim]; [K] if one norm covers all heads
    sink_k: Tensor | None = None  # [kv_heads, head_dim]
    sink_v: Tensor | None = None  # [kv_heads, head_dim]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [D]
    attn_post: Tensor | None = None  # [D]
    ffn_post: Tensor | None = None  # [D]
    scale: Tensor | None = None  # [2]: of final rows, and of rows that are denoised
    mixture: MixtureWeights | None = None
    low_rank: Mapping[str, Mapping[str, LowRank]] = field(default_factory=dict)
    """The low-rank changes of the matrices: by field, then by adapter."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the layer by its field, without adapters. Those of a mixture are `mixture.router`, ..."""
        values = _field_values(self)
        del values["mixture"], values["low_rank"]
        if self.mixture is not None:
            values |= {f"mixture.{name}": value for name, value in _field_values(self.mixture).items()}
        return {name: value for name, value in values.items() if value is not None}


def _field_values(weights: LayerWeights | MixtureWeights | SignalWeights) -> dict[str, Any]:
    """The fields of `weights` by name. Unlike `asdict`, it copies no tensor."""
    return {field.name: getattr(weights, field.name) for field in fields(weights)}


@dataclass(frozen=True, slots=True)
class SignalWeights:
    """The MLP of self-conditioning, which `Transformer.self_condition` applies to rows that are denoised."""

    norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]: gate rows, then up rows
    down: Tensor  # [D, F]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model or a rank's part of it, on one device. A tied `head` is `embed` or a view of it."""

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
        """Every tensor, in the order of `named_tensors`."""
        return [tensor for _, _, tensor in self.named_tensors()]

    def named_tensors(self) -> list[tuple[str, int | None, Tensor]]:
        """Field, layer and tensor of every tensor; the layer is None outside of layers. A tied matrix is `embed`."""
        names = ["embed", "norm", "head", "embed_norm", "head_dense", "head_norm", "head_bias"]
        if self._is_tied:
            names.remove("head")
        outer = {name: getattr(self, name) for name in names}
        if self.signal is not None:
            outer |= {f"signal.{name}": value for name, value in _field_values(self.signal).items()}
        tensors: list[tuple[str, int | None, Tensor]] = []
        tensors += [(name, None, tensor) for name, tensor in outer.items() if tensor is not None]
        for index, layer in enumerate(self.layers):
            tensors += [(name, index, tensor) for name, tensor in layer.named_tensors().items()]
        return tensors

    @property
    def _is_tied(self) -> bool:
        """Whether the head is the embedding or a view of it."""
        if self.head is self.embed:
            return True
        address = self.head.untyped_storage().data_ptr()
        return address != 0 and address == self.embed.untyped_storage().data_ptr()  # 0: a meta tensor, or an empty one


WHOLE = Shard()
_MIXTURE_NORMS = ("router_norm", "expert_norm", "expert_post", "shared_post")


@dataclass(slots=True)
class _Maker:
    """Allocates uninitialised tensors on a device."""

    dtype: Any
    device: torch.device | None
    quantization: Quantization | None

    def new(self, *shape: int, float32: bool = False) -> Any:
        """A tensor in the model's dtype, or in float32."""
        import torch

        return torch.empty(shape, dtype=torch.float32 if float32 else self.dtype, device=self.device)

    def matrix(self, *shape: int, chunk_rows: tuple[int, ...]) -> Any:
        """A matrix that may be quantized. It will be cut only between chunks of `chunk_rows` rows."""
        return self.new(*shape) if self.quantization is None or 0 in shape else self.quantized(shape, chunk_rows)

    def quantized(self, shape: tuple[int, ...], chunk_rows: tuple[int, ...]) -> Any:
        """A quantized matrix, as `matrix` makes it."""
        from remask.model.quantized import empty_matrix

        assert self.quantization is not None
        assert self.device is not None
        return empty_matrix(self.quantization, shape, self.dtype, self.device, chunk_rows)


@dataclass(slots=True)
class _Counter(_Maker):
    """Allocates nothing, and counts the bytes that `_Maker` would allocate."""

    total: int = 0

    def new(self, *shape: int, float32: bool = False) -> None:
        self.total += prod(shape) * (4 if float32 else self.dtype.itemsize)

    def quantized(self, shape: tuple[int, ...], chunk_rows: tuple[int, ...]) -> None:  # noqa: ARG002 - as above
        assert self.quantization is not None
        self.total += matrix_bytes(self.quantization, shape)


def empty_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
) -> Weights:
    """Uninitialised weights of the part of a model that `shard` holds. The caller must fill every element."""
    return _layout(config, shard, _Maker(dtype, device, quantization))


def weight_bytes(
    config: ModelConfig, dtype: NumberFormat, shard: Shard = WHOLE, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights of the part of a model that `shard` holds. A tied matrix counts once."""
    counter = _Counter(dtype, None, quantization)
    _layout(config, shard, counter)
    return counter.total


def _layout(config: ModelConfig, shard: Shard, make: _Maker) -> Weights:
    """The weights of a rank's part of `config`, with all tensors made by `make`."""
    config = shard.part(config)
    hidden = config.hidden
    new, matrix = make.new, make.matrix

    def mixture_weights(mixture: Mixture) -> MixtureWeights:
        experts, local = mixture.experts, len(shard.experts(mixture))
        return MixtureWeights(
            router=new(experts, hidden, float32=mixture.router.float32),
            bias=new(experts, float32=True) if mixture.router.bias else None,
            gate_up=matrix(local, 2 * mixture.intermediate, hidden, chunk_rows=(mixture.intermediate,) * 2),
            down=matrix(local, hidden, mixture.intermediate, chunk_rows=(hidden,)),
            **{name: new(hidden) for name in _MIXTURE_NORMS if mixture.normed},
            factors=new(experts) if mixture.normed else None,
        )

    def layer_weights(layer: int) -> LayerWeights:
        """The weights of `layer`. A gate and its up matrix are chunks of their own, as are Q, K and V."""
        shape = config.shape_of(layer)
        feed = config.feed_forward(layer)
        mixture = config.mixture_of(layer)
        q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        rows = (q, k) if shape.tied_values else (q, k, k)
        norm_widths = {"head": (shape.head_dim, shape.head_dim), "whole": (q, k), None: None}[config.qk_norm]
        sink = (shape.kv_heads, shape.head_dim) if config.sink == "learned" else None
        return LayerWeights(
            attn_norm=None if config.embed_norm and layer == 0 else new(hidden),
            qkv=matrix(sum(rows), hidden, chunk_rows=rows),
            qkv_bias=new(sum(rows)) if config.qkv_bias else None,
            out=matrix(hidden, q, chunk_rows=(hidden,)),
            ffn_norm=new(hidden),
            gate_up=matrix(feed.up, hidden, chunk_rows=(feed.intermediate,) * (feed.up // max(1, feed.intermediate))),
            down=matrix(hidden, feed.intermediate, chunk_rows=(hidden,)),
            q_norm=new(norm_widths[0]) if norm_widths else None,
            k_norm=new(norm_widths[1]) if norm_widths else None,
            sink_k=new(*sink) if sink else None,
            sink_v=new(*sink) if sink else None,
            up_bias=new(config.intermediate) if config.mlp_bias else None,
            down_bias=new(hidden) if config.mlp_bias else None,
            attn_post=new(hidden) if config.post_norms else None,
            ffn_post=new(hidden) if config.post_norms else None,
            scale=new(2) if config.layer_scales else None,
            mixture=None if mixture is None else mixture_weights(mixture),
        )

    layers = tuple(map(layer_weights, range(config.layers)))
    signal = None
    if config.self_conditioning:
        width = config.intermediate
        signal = SignalWeights(norm=new(hidden), gate_up=new(2 * width, hidden), down=new(hidden, width))
    embed = new(config.vocab, hidden)
    tokens = shard.share(config.vocab)
    head = embed if config.tied else new(len(tokens), hidden)
    if config.tied and embed is not None and len(tokens) < config.vocab:
        head = embed[tokens.start : tokens.stop]
    return Weights(
        embed=embed,
        layers=layers,
        norm=new(hidden),
        head=head,
        embed_norm=new(hidden) if config.embed_norm else None,
        head_dense=new(hidden, hidden) if config.head_dense else None,
        head_norm=new(hidden) if config.head_dense else None,
        head_bias=new(len(tokens)) if config.head_bias else None,
        signal=signal,
    )

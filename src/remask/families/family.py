"""Model families: how the configuration is read, and the names of the tensors in checkpoints.

PyTorch is imported only when a tensor is filled, so that names and shapes are available without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from remask.model.config import Mixture, ModelConfig
from remask.model.ranks import Shard
from remask.model.weights import Weights

if TYPE_CHECKING:
    from torch import Tensor

    from remask.model.quantized import Codes, QuantizedMatrix

# Reads a family's own keys of the object in `generation_config.json`. Returns sampling parameters, and the keys that no
# parameter expresses.
GenerationReader: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of a checkpoint goes."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint, or of `part`
    field: str  # of `Weights` or of a layer's weights; a mixture's are `mixture.router`, ...
    layer: int | None = None  # None: the tensor is of no layer
    rows: tuple[int, int] | None = None  # first and end row of the field that it fills; None: all rows
    scale: float = 1.0  # the stored tensor x becomes (x + offset) * scale
    offset: float = 0.0
    expert: int | None = None  # index of the expert in the field; None: the tensor is of no single expert
    part: tuple[slice, ...] | None = None  # rows and columns of the stored tensor that are read; None: all

    def fill(self, weights: Weights, source: Tensor | Codes) -> None:
        """Copy `source`, the stored tensor or its `part`, into `weights`, times the family's constant factors.

        Numbers are quantized if the field is. `Codes` must be of the field's own quantization.
        """
        from remask.model.quantized import Codes, QuantizedMatrix, encode

        if isinstance(source, Codes) and source.values.dim() == 3:
            for expert, codes in enumerate(source.multiply(self.scale).experts()):
                self._matrix(weights).expert(expert).store(slice(None), codes)
            return
        if isinstance(source, Codes):
            self._quantize(self._matrix(weights), source.multiply(self.scale))
            return
        if self.offset or self.scale != 1:
            source = (source.float() + self.offset) * self.scale
        if not isinstance(self._field(weights), QuantizedMatrix):
            self.target(weights).copy_(source)
        elif source.dim() == 3:
            for expert, values in enumerate(source):
                self._matrix(weights).expert(expert).write(slice(None), values)
        else:
            self._quantize(self._matrix(weights), encode(self._matrix(weights).quantization, source))

    def _matrix(self, weights: Weights) -> QuantizedMatrix:
        return cast("QuantizedMatrix", self._field(weights))

    def _quantize(self, matrix: QuantizedMatrix, codes: Codes) -> None:
        """Store `codes` in the slot's rows of `matrix`, or of its expert's matrix."""
        target = matrix if self.expert is None else matrix.expert(self.expert)
        target.store(slice(None) if self.rows is None else slice(*self.rows), codes)

    def _field(self, weights: Weights) -> Tensor:
        owner = weights if self.layer is None else weights.layers[self.layer]
        tensor: Tensor = attrgetter(self.field)(owner)
        return tensor

    def parts(self, config: ModelConfig, shard: Shard) -> Iterator[Slot]:
        """Yield the slots of the parts of the tensor that the rank of `shard` holds; none if it holds no part."""
        if shard.size == 1:
            yield self
            return
        if self.expert is not None or self.field in ("mixture.gate_up", "mixture.down"):
            mixture = config.mixture_of(self.layer or 0)
            assert mixture is not None
            local = shard.experts(mixture)
            if self.expert is None:  # all experts are one tensor
                yield replace(self, shape=(len(local), *self.shape[1:]), part=(slice(local.start, local.stop),))
            elif self.expert in local:
                yield replace(self, expert=self.expert - local.start)
            return
        columns, rows = _shard_ranges(self, config, shard)
        if columns is not None:
            shape = (self.shape[0], len(columns))
            yield replace(self, shape=shape, part=(slice(None), slice(columns.start, columns.stop)))
        elif rows is None:
            # A bias after a sum over ranks is added on rank 0 alone.
            yield replace(self, scale=0.0) if self.field == "down_bias" and shard.rank else self
        else:
            yield from self._row_parts(rows)

    def _row_parts(self, ranges: Sequence[range]) -> Iterator[Slot]:
        """Yield the slots of the rows in `ranges` of the field, which follow one another in the rank's tensor."""
        first, end = self.rows or (0, self.shape[0])
        range_start = 0  # where the range begins in the rank's tensor
        for held in ranges:
            low, high = max(first, held.start), min(end, held.stop)
            if low < high:
                target = range_start + low - held.start
                rows = target, target + high - low
                shape = (high - low, *self.shape[1:])
                yield replace(self, shape=shape, part=(slice(low - first, high - first),), rows=rows)
            range_start += len(held)

    def in_rows(self, count: int) -> Iterator[Slot]:
        """Yield slots of at most `count` rows each, which together are this one."""
        first, _ = self.rows or (0, self.shape[0])
        first_stored = self.part[0].start or 0 if self.part else 0
        for start in range(0, self.shape[0], count):
            end = min(start + count, self.shape[0])
            shape = (end - start, *self.shape[1:])
            part = (slice(first_stored + start, first_stored + end),)
            yield replace(self, shape=shape, part=part, rows=(first + start, first + end))

    def target(self, weights: Weights) -> Tensor:
        """The view of `weights` that the tensor fills; it has the shape `shape`."""
        tensor = self._field(weights)
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def _shard_ranges(slot: Slot, config: ModelConfig, shard: Shard) -> tuple[range | None, Sequence[range] | None]:
    """Return the columns, or the ranges of rows, of the slot's field that a rank holds. Both are None if it holds all.

    Rows are counted in the whole field, in which matrices with the same input follow one another.
    """
    shape = config if slot.layer is None else config.shape_of(slot.layer)
    dim, heads, groups = shape.head_dim, shard.heads(shape), shard.kv_heads(shape)
    mixture = None if slot.layer is None else config.mixture_of(slot.layer)
    width = config.intermediate if mixture is None else mixture.shared
    columns = shard.share(width)
    queries, keys = (range(part.start * dim, part.stop * dim) for part in (heads, groups))
    match slot.field:
        case "out":
            return queries, None
        case "down" | "signal.down":
            return columns, None
        case "qkv" | "qkv_bias":
            first_key = shape.heads * dim
            values = () if shape.tied_values else (_shift(keys, first_key + shape.kv_heads * dim),)
            return None, (queries, _shift(keys, first_key), *values)
        case "q_norm" if config.qk_norm == "whole":
            return None, (queries,)
        case "k_norm" if config.qk_norm == "whole":
            return None, (keys,)
        case "sink_k" | "sink_v":
            return None, (groups,)
        case "gate_up" | "signal.gate_up":
            return None, (columns, _shift(columns, width)) if config.gated else (columns,)
        case "up_bias":
            return None, (columns,)
        case "head" | "head_bias":
            return None, (shard.share(config.vocab),)
    return None, None


def _shift(part: range, offset: int) -> range:
    return range(part.start + offset, part.stop + offset)


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Tensor names of a mixture of experts, without `.weight`. They follow the layer's prefix."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."  # prefix of the names of a routed expert, in which `{}` is its number
    bias: str | None = None  # full name of the numbers that are added to the experts' scores
    shared: str | None = None  # prefix of the names of the shared expert
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # Full names of the tensors of gate and up, and of down, of all experts; None: each expert has its own
    stacked: tuple[str, str] | None = None
    # Full names of the fields of `MixtureWeights`
    router_norm: str | None = None
    expert_norm: str | None = None
    expert_post: str | None = None
    shared_post: str | None = None
    factors: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names of a family, without `.weight` and `.bias`.

    A layer's names follow `layer`, in which `{}` is the layer's number. A name is None if no model of the family has
    the tensor. `q`, `k` and `v` may be one tensor `qkv`, with the rows in this order, and `gate` and `up` one
    `gate_up`. The two `scales` are full names, with the layer's number, of the factors of final and of other rows.
    `signal` is the prefix of the names of self-conditioning.
    """

    embed: str
    norm: str
    head: str
    layer: str
    attn_norm: str
    out: str
    ffn_norm: str
    down: str
    up: str | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    gate: str | None = None
    gate_up: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    embed_norm: str | None = None
    head_dense: str | None = None
    head_norm: str | None = None
    sink_k: str | None = None
    sink_v: str | None = None
    attn_post: str | None = None
    ffn_post: str | None = None
    scales: tuple[str, str] | None = None
    signal: str | None = None
    mixture: MixtureNames | None = None

    def projections(self, q: int, k: int, *, tied: bool = False) -> list[tuple[str | None, int, int]]:
        """Name, first and end row of each projection's tensor, for `q` query and `k` key rows; `tied`: without V."""
        if self.qkv is not None:
            return [(self.qkv, 0, q + 2 * k)]
        tensors: list[tuple[str | None, int, int]] = [(self.q, 0, q), (self.k, q, q + k), (self.v, q + k, q + 2 * k)]
        return tensors[:2] if tied else tensors


@dataclass(frozen=True, slots=True)
class Factors:
    """A family's constant factors. They are multiplied into the weights when these are read."""

    # Scale of every projection of a layer: a number, or the number of its inputs or outputs to the power of -0.5
    linear: float | Literal["fan_in", "fan_out"] = 1.0
    residual: float = 1.0  # scale of the outputs of attention and MLP
    head: float = 1.0  # scale of the logits
    gain: float = 0.0  # number added to the stored gain of every norm, except those before and in a mixture
    # Scores are not divided by the root of a head's width; the norm of queries is multiplied by it instead
    unscaled: bool = False

    def of(self, shape: tuple[int, ...]) -> float:
        """Scale of a projection of shape [out, in]."""
        if self.linear == "fan_in":
            return float(shape[1] ** -0.5)
        return float(shape[0] ** -0.5) if self.linear == "fan_out" else self.linear


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data."""

    name: str  # also the `ModelConfig.family` of its configurations
    model_types: tuple[str, ...]  # values of `model_type` in `config.json` that it claims, in any case
    architectures: tuple[str, ...]  # values in `architectures` that it claims if a file has no `model_type`
    names: TensorNames
    # Makes a `ModelConfig` of the object in `config.json`. Raises `CheckpointError`, naming the key, if the transformer
    # cannot execute a value.
    config: Callable[[Mapping[str, Any]], ModelConfig]
    # Reads the constant factors from the same object
    factors: Callable[[Mapping[str, Any]], Factors] = lambda _raw: Factors()
    # Whether a `config.json` is of this family although its `model_type` is another family's
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _raw: False
    # A warning about a folder of this name and shape, or None
    remark: Callable[[str, ModelConfig], str | None] = lambda _name, _config: None
    unread: str = ""  # pattern of names of tensors that checkpoints may have and that are not read
    presets: Mapping[str, ModelConfig] = field(default_factory=dict)  # shapes by name, for `--load-format dummy`
    chat_template: str | None = None  # Jinja, for checkpoints whose tokenizer has no template
    stop: tuple[str, ...] = ()  # texts that end an answer, each if the template in use has it
    read_generation: GenerationReader | None = None  # None: `generation_config.json` has no keys of the family's own
    # Keys of `config.json` that are not read because they do not change what models compute, in addition to those of
    # `remask.families.harmless`; any other key is refused. None: unknown keys are ignored.
    harmless: frozenset[str] | None = None

    @property
    def head(self) -> str:
        """Name of the output matrix. A checkpoint with tied embeddings may have a copy of it."""
        return f"{self.names.head}.weight"

    def tensors(self, config: ModelConfig, factors: Factors | None = None) -> list[Slot]:
        """Every tensor that a checkpoint of this shape has. Together the slots fill each element of `Weights` once."""
        names, hidden, factors = self.names, config.hidden, factors or Factors()
        slots = [
            Slot(f"{names.embed}.weight", (config.vocab, hidden), "embed"),
            Slot(f"{names.norm}.weight", (hidden,), "norm", offset=factors.gain),
        ]
        if not config.tied:
            slots.append(Slot(self.head, (config.vocab, hidden), "head", scale=factors.head))
        if config.embed_norm:
            slots.append(Slot(f"{names.embed_norm}.weight", (hidden,), "embed_norm", offset=factors.gain))
        if config.head_dense:
            slots.append(Slot(f"{names.head_dense}.weight", (hidden, hidden), "head_dense"))
            slots.append(Slot(f"{names.head_norm}.weight", (hidden,), "head_norm", offset=factors.gain))
        if config.head_bias:
            slots.append(Slot(f"{names.head}.bias", (config.vocab,), "head_bias", scale=factors.head))
        if config.self_conditioning:
            slots.append(Slot(f"{names.signal}pre_norm.weight", (hidden,), "signal.norm", offset=factors.gain))
            slots += _swiglu(f"{names.signal}", MixtureNames(), (config.intermediate, hidden), "signal.")
        for layer in range(config.layers):
            slots += self._attention(config, layer, factors)
            mixture = config.mixture_of(layer)
            slots += self._mlp(config, layer, factors) if mixture is None else self._mixture(config, layer, mixture)
            slots += self._post_norms(config, layer, factors)
        return slots

    def _post_norms(self, config: ModelConfig, layer: int, factors: Factors) -> list[Slot]:
        """The norms after attention and feed-forward, and the two factors of a layer's output."""
        names, slots = self.names, list[Slot]()
        if config.post_norms:
            for target in ("attn_post", "ffn_post"):
                name = f"{names.layer.format(layer)}{getattr(names, target)}.weight"
                slots.append(Slot(name, (config.hidden,), target, layer, offset=factors.gain))
        if config.layer_scales and names.scales is not None:
            for row, name in enumerate(names.scales):
                slots.append(Slot(name.format(layer), (1,), "scale", layer, rows=(row, row + 1)))
        return slots

    def _attention(self, config: ModelConfig, layer: int, factors: Factors) -> list[Slot]:
        """The tensors of attention in `layer`: projections, their biases, norms and the sink."""
        names, hidden, sizes = self.names, config.hidden, config.shape_of(layer)
        prefix = names.layer.format(layer)
        q, k = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        scale = factors.of((hidden, q)) * factors.residual
        slots = [Slot(f"{prefix}{names.out}.weight", (hidden, q), "out", layer, scale=scale)]
        if layer or not config.embed_norm:
            slots.append(Slot(f"{prefix}{names.attn_norm}.weight", (hidden,), "attn_norm", layer, offset=factors.gain))
        for name, first, end in names.projections(q, k, tied=sizes.tied_values):
            rows, shape = (first, end), (end - first, hidden)
            slots.append(Slot(f"{prefix}{name}.weight", shape, "qkv", layer, rows=rows, scale=factors.of(shape)))
            if config.qkv_bias:
                slots.append(Slot(f"{prefix}{name}.bias", (end - first,), "qkv_bias", layer, rows=rows))
        if config.qk_norm is not None:
            root = sizes.head_dim**0.5 if factors.unscaled else 1.0
            for target, row_count, norm_scale in (("q_norm", q, root), ("k_norm", k, 1.0)):
                name = f"{prefix}{getattr(names, target)}.weight"
                width = sizes.head_dim if config.qk_norm == "head" else row_count
                slots.append(Slot(name, (width,), target, layer, scale=norm_scale, offset=factors.gain))
        if config.sink == "learned":
            for target in ("sink_k", "sink_v"):
                shape = (sizes.kv_heads, sizes.head_dim)
                slots.append(Slot(f"{prefix}{getattr(names, target)}", shape, target, layer))
        return slots

    def _mlp(self, config: ModelConfig, layer: int, factors: Factors) -> list[Slot]:
        """The tensors of the MLP of a dense `layer`, with the norm before it. Gate and up may be one tensor."""
        names, hidden, inner = self.names, config.hidden, config.intermediate
        prefix = names.layer.format(layer)
        up_scale = factors.of((inner, hidden))
        down_scale = factors.of((hidden, inner)) * factors.residual
        slots = [
            Slot(f"{prefix}{names.ffn_norm}.weight", (hidden,), "ffn_norm", layer, offset=factors.gain),
            Slot(f"{prefix}{names.down}.weight", (hidden, inner), "down", layer, scale=down_scale),
        ]
        row_ranges = [(names.up, 0, inner)]
        if names.gate_up is not None:
            row_ranges = [(names.gate_up, 0, 2 * inner)]
        elif names.gate is not None:
            row_ranges = [(names.gate, 0, inner), (names.up, inner, 2 * inner)]
        for name, first, end in row_ranges:
            shape = (end - first, hidden)
            slots.append(Slot(f"{prefix}{name}.weight", shape, "gate_up", layer, rows=(first, end), scale=up_scale))
        if config.mlp_bias:
            slots.append(Slot(f"{prefix}{names.up}.bias", (inner,), "up_bias", layer))
            slots.append(Slot(f"{prefix}{names.down}.bias", (hidden,), "down_bias", layer, scale=factors.residual))
        return slots

    def _mixture(self, config: ModelConfig, layer: int, mixture: Mixture) -> list[Slot]:
        """The tensors of the `mixture` in `layer`, with the norm before it. `Factors` do not apply to them."""
        names, hidden = self.names.mixture, config.hidden
        assert names is not None
        prefix = self.names.layer.format(layer)
        slots = [
            Slot(f"{prefix}{self.names.ffn_norm}.weight", (hidden,), "ffn_norm", layer),
            Slot(f"{prefix}{names.router}.weight", (mixture.experts, hidden), "mixture.router", layer),
        ]
        if mixture.router.bias:
            slots.append(Slot(f"{prefix}{names.bias}", (mixture.experts,), "mixture.bias", layer))
        if mixture.shared:
            slots += _swiglu(f"{prefix}{names.shared}", names, (mixture.shared, hidden), "", layer)
        if mixture.normed:
            # The router's norm is followed by a division by the root of the width.
            norms = {"router_norm": hidden**-0.5, "expert_norm": 1.0, "expert_post": 1.0, "shared_post": 1.0}
            for target, scale in norms.items():
                slots.append(
                    Slot(f"{prefix}{getattr(names, target)}", (hidden,), f"mixture.{target}", layer, scale=scale)
                )
            slots.append(Slot(f"{prefix}{names.factors}", (mixture.experts,), "mixture.factors", layer))
        if names.stacked is not None:
            inner = mixture.intermediate
            gate_up, down = names.stacked
            slots.append(Slot(f"{prefix}{gate_up}", (mixture.experts, 2 * inner, hidden), "mixture.gate_up", layer))
            slots.append(Slot(f"{prefix}{down}", (mixture.experts, hidden, inner), "mixture.down", layer))
            return slots
        for expert in range(mixture.experts):
            stem = prefix + names.expert.format(expert)
            slots += _swiglu(stem, names, (mixture.intermediate, hidden), "mixture.", layer, expert)
        return slots


def _swiglu(
    stem: str,
    names: MixtureNames,
    shape: tuple[int, int],
    owner: str,
    layer: int | None = None,
    expert: int | None = None,
) -> list[Slot]:
    """The three matrices of an MLP: names begin with `stem`, fields with `owner`; `shape` [F, D] is that of gate."""
    inner, hidden = shape
    slots = [
        Slot(f"{stem}{name}.weight", shape, f"{owner}gate_up", layer, rows=rows, expert=expert)
        for name, rows in ((names.gate, (0, inner)), (names.up, (inner, 2 * inner)))
    ]
    return [*slots, Slot(f"{stem}{names.down}.weight", (hidden, inner), f"{owner}down", layer, expert=expert)]

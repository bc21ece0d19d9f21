"""What a model family is: how its configuration is read, and what its checkpoints call each tensor.

Nothing imports PyTorch before a tensor is filled, as names and shapes are asked for without any.
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

    from remask.model.quantised import Codes, QuantisedMatrix

# What the object in `generation_config.json` says in the words of one family: sampling parameters, and the keys of the
# object, if any, that no parameter expresses.
OwnWords: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of a checkpoint goes."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # there; that of `part` where only that is read
    field: str  # of `Weights`, or of a layer's weights, that it fills; a mixture's are `mixture.router`, ...
    layer: int | None = None  # None: the tensor is of no layer
    rows: tuple[int, int] | None = None  # first and end row that it fills; None: all of them
    scale: float = 1.0  # the stored tensor x becomes (x + offset) * scale
    offset: float = 0.0
    expert: int | None = None  # its number, for a field that holds the matrices of all experts
    part: tuple[slice, ...] | None = None  # what is read of the stored tensor, rows and columns; None: all

    def fill(self, weights: Weights, stored: Tensor | Codes) -> None:
        """Copy a tensor of the checkpoint into its place, with the family's constant factors."""
        from remask.model.quantised import Codes, QuantisedMatrix, encode

        if isinstance(stored, Codes) and stored.values.dim() == 3:
            for number, codes in enumerate(stored.multiply(self.scale).experts()):
                self._matrix(weights).expert(number).store(slice(None), codes)
            return
        if isinstance(stored, Codes):
            self._quantise(self._matrix(weights), stored.multiply(self.scale))
            return
        if self.offset or self.scale != 1:
            stored = (stored.float() + self.offset) * self.scale
        if not isinstance(self._field(weights), QuantisedMatrix):
            self.target(weights).copy_(stored)
        elif stored.dim() == 3:
            for number, values in enumerate(stored):
                self._matrix(weights).expert(number).write(slice(None), values)
        else:
            self._quantise(self._matrix(weights), encode(self._matrix(weights).kind, stored))

    def _matrix(self, weights: Weights) -> QuantisedMatrix:
        return cast("QuantisedMatrix", self._field(weights))

    def _quantise(self, matrix: QuantisedMatrix, codes: Codes) -> None:
        """Put codes into some rows of a matrix, or of one expert's."""
        matrix = matrix if self.expert is None else matrix.expert(self.expert)
        matrix.store(slice(None) if self.rows is None else slice(*self.rows), codes)

    def _field(self, weights: Weights) -> Tensor:
        owner = weights if self.layer is None else weights.layers[self.layer]
        tensor: Tensor = attrgetter(self.field)(owner)
        return tensor

    def pieces(self, config: ModelConfig, shard: Shard) -> Iterator[Slot]:
        """The pieces of the tensor that a rank holds, and where they go among its weights; none where it holds none."""
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
        columns, rows = _cut(self, config, shard)
        if columns is not None:
            shape = (self.shape[0], len(columns))
            yield replace(self, shape=shape, part=(slice(None), slice(columns.start, columns.stop)))
        elif rows is None:
            # A bias that follows a sum over ranks is added by one of them.
            yield replace(self, scale=0.0) if self.field == "down_bias" and shard.rank else self
        else:
            yield from self._rows_in(rows)

    def _rows_in(self, ranges: Sequence[range]) -> Iterator[Slot]:
        """The pieces of rows in `ranges`, which lie one after the other in a rank's tensor."""
        first, end = self.rows or (0, self.shape[0])
        at = 0
        for part in ranges:
            low, high = max(first, part.start), min(end, part.stop)
            if low < high:
                to = at + low - part.start
                shape = (high - low, *self.shape[1:])
                yield replace(self, shape=shape, part=(slice(low - first, high - first),), rows=(to, to + high - low))
            at += len(part)

    def in_rows(self, count: int) -> Iterator[Slot]:
        """The slot in parts of up to `count` rows, one after the other."""
        first, _ = self.rows or (0, self.shape[0])
        read = self.part[0].start or 0 if self.part else 0
        for at in range(0, self.shape[0], count):
            end = min(at + count, self.shape[0])
            shape, part = (end - at, *self.shape[1:]), (slice(read + at, read + end),)
            yield replace(self, shape=shape, part=part, rows=(first + at, first + end))

    def target(self, weights: Weights) -> Tensor:
        """The view of `weights` that the tensor fills, of shape `shape`."""
        tensor = self._field(weights)
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def _cut(slot: Slot, config: ModelConfig, shard: Shard) -> tuple[range | None, Sequence[range] | None]:
    """The columns, or the ranges of rows, that a rank holds of the field of `slot`; neither: it holds all of it.

    Rows are counted in the whole field, where matrices that read the same input follow one another.
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
            after = shape.heads * dim
            values = () if shape.tied_values else (_moved(keys, after + shape.kv_heads * dim),)
            return None, (queries, _moved(keys, after), *values)
        case "q_norm" if config.qk_norm == "whole":
            return None, (queries,)
        case "k_norm" if config.qk_norm == "whole":
            return None, (keys,)
        case "sink_k" | "sink_v":
            return None, (groups,)
        case "gate_up" | "signal.gate_up":
            return None, (columns, _moved(columns, width)) if config.gated else (columns,)
        case "up_bias":
            return None, (columns,)
        case "head" | "head_bias":
            return None, (shard.share(config.vocab),)
    return None, None


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Tensor names of a mixture of experts, without `.weight`. They are appended to the layer's."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."  # beginning of the names of one routed expert, in which `{}` is its number
    bias: str | None = None  # numbers that are added to the experts' scores, a name in full
    shared: str | None = None  # beginning of the names of the shared expert
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # Tensors of gate and up, and of down, of all experts; names in full. None: each expert has its own.
    stacked: tuple[str, str] | None = None
    # As of `MixtureWeights`, names in full.
    router_norm: str | None = None
    expert_norm: str | None = None
    expert_post: str | None = None
    shared_post: str | None = None
    factors: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names of a family, without `.weight` and `.bias`.

    A layer's names are appended to `layer`, in which `{}` is the layer's number. A name may be None where no model of
    the family has the tensor. `q`, `k` and `v` may be one tensor, `qkv`, with the rows in this order, and `gate` and
    `up` one, `gate_up`. Both `scales` are names in full, with the layer's number, of the factor of final rows and of
    that of others. `signal` begins the names of self-conditioning.
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
        """The name of each tensor of the projections of `q` query and `k` key rows, with its first and end row.

        `tied`: values have none of their own.
        """
        if self.qkv is not None:
            return [(self.qkv, 0, q + 2 * k)]
        every: list[tuple[str | None, int, int]] = [(self.q, 0, q), (self.k, q, q + k), (self.v, q + k, q + 2 * k)]
        return every[:2] if tied else every


@dataclass(frozen=True, slots=True)
class Factors:
    """Constants that a family multiplies with. They are multiplied into the weights when these are read."""

    # Scale of every projection of a layer: a number, or fan ** -0.5 of its inputs or outputs
    linear: float | Literal["fan_in", "fan_out"] = 1.0
    residual: float = 1.0  # scale of what attention and MLP add to the residual stream
    head: float = 1.0  # scale of the logits
    gain: float = 0.0  # number added to the stored gain of every norm
    # Scores are not divided by the root of a head's width, by which the norm of queries is multiplied
    unscaled: bool = False

    def of(self, shape: tuple[int, ...]) -> float:
        """Scale of a projection of shape [out, in]."""
        if self.linear == "fan_in":
            return float(shape[1] ** -0.5)
        return float(shape[0] ** -0.5) if self.linear == "fan_out" else self.linear


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data."""

    name: str  # which its configurations carry as `ModelConfig.family`
    model_types: tuple[str, ...]  # values of `model_type` in `config.json` that the family claims. Case does not count.
    architectures: tuple[str, ...]  # values in `architectures` that it claims where a file has no `model_type`
    names: TensorNames
    # Makes a `ModelConfig` of the object in `config.json`. It raises `CheckpointError`, naming the key, on what the
    # transformer cannot execute.
    config: Callable[[Mapping[str, Any]], ModelConfig]
    # Reads the constants that the family multiplies with from the same object
    factors: Callable[[Mapping[str, Any]], Factors] = lambda _raw: Factors()
    # Tells that a `config.json` is of this family although its `model_type` is another family's
    recognises: Callable[[Mapping[str, Any]], bool] = lambda _raw: False
    # What to warn of, if anything, whoever loads a folder of this name and shape
    remark: Callable[[str, ModelConfig], str | None] = lambda _name, _config: None
    unread: str = ""  # a pattern of names of tensors that its checkpoints may hold and its code does not read
    presets: Mapping[str, ModelConfig] = field(default_factory=dict)  # shapes by name, for `--load-format dummy`
    chat_template: str | None = None  # renders conversations (Jinja) where a checkpoint's tokenizer has no template
    stop: tuple[str, ...] = ()  # texts that end an answer, where the template in use has them
    words: OwnWords | None = None  # of a family that has keys of its own in `generation_config.json`
    # Keys of `config.json` that the family does not read because they change nothing of what its models compute, beside
    # those of `remask.families.harmless`; any other key is refused. None: all are passed over.
    harmless: frozenset[str] | None = None

    @property
    def head(self) -> str:
        """Name of the output matrix. A checkpoint with tied embeddings may hold it as a copy."""
        return f"{self.names.head}.weight"

    def tensors(self, config: ModelConfig, factors: Factors | None = None) -> list[Slot]:
        """Every tensor that a checkpoint of this shape holds. Together the slots fill `Weights` exactly once."""
        names, wide, factors = self.names, config.hidden, factors or Factors()
        slots = [
            Slot(f"{names.embed}.weight", (config.vocab, wide), "embed"),
            Slot(f"{names.norm}.weight", (wide,), "norm", offset=factors.gain),
        ]
        if not config.tied:
            slots.append(Slot(self.head, (config.vocab, wide), "head", scale=factors.head))
        if config.embed_norm:
            slots.append(Slot(f"{names.embed_norm}.weight", (wide,), "embed_norm", offset=factors.gain))
        if config.head_dense:
            slots.append(Slot(f"{names.head_dense}.weight", (wide, wide), "head_dense"))
            slots.append(Slot(f"{names.head_norm}.weight", (wide,), "head_norm", offset=factors.gain))
        if config.head_bias:
            slots.append(Slot(f"{names.head}.bias", (config.vocab,), "head_bias", scale=factors.head))
        if config.self_conditioning:
            slots.append(Slot(f"{names.signal}pre_norm.weight", (wide,), "signal.norm"))
            slots += _swiglu(f"{names.signal}", MixtureNames(), (config.intermediate, wide), "signal.")
        for layer in range(config.layers):
            slots += self._attention(config, layer, factors)
            mixture = config.mixture_of(layer)
            slots += self._mlp(config, layer, factors) if mixture is None else self._mixture(config, layer, mixture)
            slots += self._behind(config, layer)
        return slots

    def _behind(self, config: ModelConfig, layer: int) -> list[Slot]:
        """Norms behind attention and feed-forward, and the factors of a layer."""
        names, slots = self.names, list[Slot]()
        if config.post_norms:
            for field in ("attn_post", "ffn_post"):
                name = f"{names.layer.format(layer)}{getattr(names, field)}.weight"
                slots.append(Slot(name, (config.hidden,), field, layer))
        if config.layer_scales and names.scales is not None:
            for row, name in enumerate(names.scales):
                slots.append(Slot(name.format(layer), (1,), "scale", layer, (row, row + 1)))
        return slots

    def _attention(self, config: ModelConfig, layer: int, factors: Factors) -> list[Slot]:
        names, wide, sizes = self.names, config.hidden, config.shape_of(layer)
        prefix = names.layer.format(layer)
        q, k = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        scale = factors.of((wide, q)) * factors.residual
        slots = [Slot(f"{prefix}{names.out}.weight", (wide, q), "out", layer, scale=scale)]
        if layer or not config.embed_norm:
            slots.append(Slot(f"{prefix}{names.attn_norm}.weight", (wide,), "attn_norm", layer, offset=factors.gain))
        for name, first, end in names.projections(q, k, tied=sizes.tied_values):
            shape = (end - first, wide)
            slots.append(Slot(f"{prefix}{name}.weight", shape, "qkv", layer, (first, end), factors.of(shape)))
            if config.qkv_bias:
                slots.append(Slot(f"{prefix}{name}.bias", (end - first,), "qkv_bias", layer, (first, end)))
        if config.qk_norm is not None:
            root = sizes.head_dim**0.5 if factors.unscaled else 1.0
            for field, whole, by in (("q_norm", q, root), ("k_norm", k, 1.0)):
                width, norm = sizes.head_dim if config.qk_norm == "head" else whole, getattr(names, field)
                slots.append(Slot(f"{prefix}{norm}.weight", (width,), field, layer, scale=by, offset=factors.gain))
        if config.sink == "learned":
            for field in ("sink_k", "sink_v"):
                shape = (sizes.kv_heads, sizes.head_dim)
                slots.append(Slot(f"{prefix}{getattr(names, field)}", shape, field, layer))
        return slots

    def _mlp(self, config: ModelConfig, layer: int, factors: Factors) -> list[Slot]:
        names, wide, inner = self.names, config.hidden, config.intermediate
        prefix = names.layer.format(layer)
        into, back = factors.of((inner, wide)), factors.of((wide, inner)) * factors.residual
        slots = [
            Slot(f"{prefix}{names.ffn_norm}.weight", (wide,), "ffn_norm", layer, offset=factors.gain),
            Slot(f"{prefix}{names.down}.weight", (wide, inner), "down", layer, scale=back),
        ]
        rows = [(names.up, (0, inner))]
        if names.gate_up is not None:
            rows = [(names.gate_up, (0, 2 * inner))]
        elif names.gate is not None:
            rows = [(names.gate, (0, inner)), (names.up, (inner, 2 * inner))]
        for name, part in rows:
            shape = (part[1] - part[0], wide)
            slots.append(Slot(f"{prefix}{name}.weight", shape, "gate_up", layer, part, into))
        if config.mlp_bias:
            slots.append(Slot(f"{prefix}{names.up}.bias", (inner,), "up_bias", layer))
            slots.append(Slot(f"{prefix}{names.down}.bias", (wide,), "down_bias", layer, scale=factors.residual))
        return slots

    def _mixture(self, config: ModelConfig, layer: int, mixture: Mixture) -> list[Slot]:
        names, wide = self.names.mixture, config.hidden
        assert names is not None
        prefix = self.names.layer.format(layer)
        slots = [
            Slot(f"{prefix}{self.names.ffn_norm}.weight", (wide,), "ffn_norm", layer),
            Slot(f"{prefix}{names.router}.weight", (mixture.experts, wide), "mixture.router", layer),
        ]
        if mixture.router.bias:
            slots.append(Slot(f"{prefix}{names.bias}", (mixture.experts,), "mixture.bias", layer))
        if mixture.shared:
            slots += _swiglu(f"{prefix}{names.shared}", names, (mixture.shared, wide), "", layer)
        if mixture.normed:
            # The router's norm is followed by a division by the root of the width.
            norms = {"router_norm": wide**-0.5, "expert_norm": 1.0, "expert_post": 1.0, "shared_post": 1.0}
            for field, by in norms.items():
                slots.append(Slot(f"{prefix}{getattr(names, field)}", (wide,), f"mixture.{field}", layer, scale=by))
            slots.append(Slot(f"{prefix}{names.factors}", (mixture.experts,), "mixture.factors", layer))
        if names.stacked is not None:
            inner, (into, back) = mixture.intermediate, names.stacked
            slots.append(Slot(f"{prefix}{into}", (mixture.experts, 2 * inner, wide), "mixture.gate_up", layer))
            slots.append(Slot(f"{prefix}{back}", (mixture.experts, wide, inner), "mixture.down", layer))
            return slots
        for expert in range(mixture.experts):
            stem = prefix + names.expert.format(expert)
            slots += _swiglu(stem, names, (mixture.intermediate, wide), "mixture.", layer, expert)
        return slots


def _swiglu(
    stem: str,
    names: MixtureNames,
    shape: tuple[int, int],
    owner: str,
    layer: int | None = None,
    expert: int | None = None,
) -> list[Slot]:
    """The three matrices of one MLP, whose names begin with `stem`; `shape` [F, D] is that of gate and up."""
    inner, wide = shape
    rows = ((names.gate, (0, inner)), (names.up, (inner, 2 * inner)))
    into = [Slot(f"{stem}{name}.weight", shape, f"{owner}gate_up", layer, part, expert=expert) for name, part in rows]
    return [*into, Slot(f"{stem}{names.down}.weight", (wide, inner), f"{owner}down", layer, expert=expert)]


def tiny(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` as small as tests take it: two layers, 64 wide, of 256 tokens; with `changes`."""
    small: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 160}
    small |= {"vocab": 256, "max_length": 512, "mask_id": 255, "stop_ids": (250,)}
    return replace(config, **small | changes)

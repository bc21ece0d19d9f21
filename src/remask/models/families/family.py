"""What sets one model family apart: how its configuration is read and what its checkpoints call each tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from remask.models.config import ModelConfig
from remask.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor of a checkpoint goes: a field of `Weights` or of one layer, whole or a range of its rows."""

    name: str
    shape: tuple[int, ...]
    field: str
    layer: int | None = None
    rows: tuple[int, int] | None = None

    def target(self, weights: Weights) -> Tensor:
        """The view of `weights` that the tensor fills, of shape `shape`."""
        owner = weights if self.layer is None else weights.layers[self.layer]
        tensor: Tensor = getattr(owner, self.field)
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


@dataclass(frozen=True, slots=True)
class Names:
    """Tensor names of a family, without `.weight` and `.bias`.

    Those of a layer follow `layer`, in which `{}` is the layer's number.
    """

    embed: str
    norm: str
    head: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    out: str
    ffn_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Family:
    """A model family as data.

    `model_types` and `architectures` are the values of these keys of `config.json` that it claims. `config` maps that
    file to a `ModelConfig` and raises `CheckpointError`, naming the key, for what the transformer cannot do.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    names: Names
    config: Callable[[Mapping[str, Any]], ModelConfig]

    @property
    def head(self) -> str:
        """Name of the output matrix, which a checkpoint with tied embeddings may hold as a copy."""
        return f"{self.names.head}.weight"

    def tensors(self, config: ModelConfig) -> list[Slot]:
        """Every tensor that a checkpoint of this shape holds; together the slots fill `Weights` exactly once."""
        names, wide = self.names, config.hidden
        slots = [
            Slot(f"{names.embed}.weight", (config.vocab, wide), "embed"),
            Slot(f"{names.norm}.weight", (wide,), "norm"),
        ]
        if not config.tied:
            slots.append(Slot(self.head, (config.vocab, wide), "head"))
        for layer in range(config.layers):
            slots += self._layer(config, layer)
        return slots

    def _layer(self, config: ModelConfig, layer: int) -> list[Slot]:
        names, wide, inner = self.names, config.hidden, config.intermediate
        prefix = names.layer.format(layer)
        q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
        slots = [
            Slot(f"{prefix}{names.attn_norm}.weight", (wide,), "attn_norm", layer),
            Slot(f"{prefix}{names.out}.weight", (wide, q), "out", layer),
            Slot(f"{prefix}{names.ffn_norm}.weight", (wide,), "ffn_norm", layer),
            Slot(f"{prefix}{names.gate}.weight", (inner, wide), "gate_up", layer, (0, inner)),
            Slot(f"{prefix}{names.up}.weight", (inner, wide), "gate_up", layer, (inner, 2 * inner)),
            Slot(f"{prefix}{names.down}.weight", (wide, inner), "down", layer),
        ]
        for name, first, end in ((names.q, 0, q), (names.k, q, q + k), (names.v, q + k, q + 2 * k)):
            slots.append(Slot(f"{prefix}{name}.weight", (end - first, wide), "qkv", layer, (first, end)))
            if config.qkv_bias:
                slots.append(Slot(f"{prefix}{name}.bias", (end - first,), "qkv_bias", layer, (first, end)))
        return slots

"""What `remask inspect model` reports. It comes from `config.json` and the headers of the weight files alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from remask.config import DTYPES
from remask.core.kinds import ModelKind, in_words
from remask.models.config import Mixture, ModelConfig
from remask.models.load import check_tensors, read_config
from remask.models.presets import presets
from remask.models.source import resolve
from remask.models.weights import empty_weights
from remask.policies import names_for


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model, before any weight is read.

    Attributes:
        name: the path or preset.
        family: its family.
        kind: how it is denoised.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_length, block_length: as in `ModelConfig`.
        mixture: the experts, where layers have them.
        parameters: weights that are resident.
        active_parameters: weights that one row is computed with.
        stored: parameters in the files by the type that they are stored in; empty for a preset.
        weight_bytes: memory of the weights by the dtype that they are loaded as.
        kv_bytes: memory of one token's K and V in all layers, by dtype.
        policies: names of the cache policies that fit the model's attention.
    """

    name: str
    family: str
    kind: ModelKind
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_length: int
    block_length: int | None
    mixture: Mixture | None
    parameters: int
    active_parameters: int
    stored: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]
    policies: tuple[str, ...]

    def text(self) -> str:
        """The report as lines of text."""
        block = "" if self.block_length is None else f", blocks of {self.block_length}"
        lines = [
            f"{self.name}: {self.family}, {in_words((self.kind,))}{block}",
            f"  {self.layers} layers of {self.hidden}, {self.heads} heads of {self.head_dim} "
            f"({self.kv_heads} for K/V), vocabulary {self.vocab}, up to {self.max_length} positions",
            f"  feed-forward: {self._feed_forward()}",
            f"  {self.parameters:,} parameters, of which {self.active_parameters:,} compute a row",
        ]
        if self.stored:
            held = ", ".join(f"{count:,} {dtype}" for dtype, count in self.stored.items())
            lines.append(f"  in the files: {held}")
        lines += [
            f"  as {dtype}: weights {size / 1e9:.2f} GB, K/V {self.kv_bytes[dtype] / 1e3:.1f} kB a token"
            for dtype, size in self.weight_bytes.items()
        ]
        return "\n".join([*lines, f"  cache policies: {', '.join(self.policies)}"])

    def _feed_forward(self) -> str:
        mixture = self.mixture
        if mixture is None:
            return f"{self.intermediate} wide"
        shared = f", a shared one of {mixture.shared}" if mixture.shared else ""
        dense = mixture.dense_layers
        apart = f"; {len(dense)} of {self.layers} layers dense, {self.intermediate} wide" if dense else ""
        router = f"{mixture.router.score} router"
        if mixture.router.kept_groups < mixture.router.groups:
            router += f" over {mixture.router.kept_groups} of {mixture.router.groups} groups"
        experts = f"{mixture.active} of {mixture.experts} experts of {mixture.intermediate}"
        return f"{experts}{shared}, {router}{apart}"


def inspect_model(name: str) -> ModelReport:
    """What the model `name` is: a folder or hub id, or a preset. No weight is read or allocated.

    Raises `CheckpointError` where its files do not fit its configuration or cannot be used, `UnknownNameError` where no
    family claims it, and `PluginError` where another package provides it and cannot be used.
    """
    shapes = presets()
    if name in shapes:
        return _report(name, shapes[name], {})
    folder = resolve(name)
    family, config = read_config(folder)
    _, located = check_tensors(folder, family, config, torch.bfloat16)
    stored = Counter[str]()
    for place in located.values():
        stored[place.dtype] += prod(place.shape)
    return _report(name, config, stored)


def _report(name: str, c: ModelConfig, stored: Mapping[str, int]) -> ModelReport:
    kv = 2 * c.layers * c.kv_heads * c.head_dim
    return ModelReport(
        name=name,
        family=c.family,
        kind=c.kind,
        layers=c.layers,
        hidden=c.hidden,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate=c.intermediate,
        vocab=c.vocab,
        max_length=c.max_length,
        block_length=c.block_length,
        mixture=c.mixture,
        parameters=c.parameters,
        active_parameters=c.active_parameters,
        stored=dict(stored),
        weight_bytes={dtype: _weight_bytes(c, kind) for dtype, kind in DTYPES.items()},
        kv_bytes={dtype: kv * kind.itemsize for dtype, kind in DTYPES.items()},
        policies=names_for(c.kind),
    )


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights as `dtype`; a tied matrix counts once, and a router may be float32."""
    weights = empty_weights(config, dtype, torch.device("meta"))
    return sum({id(tensor): tensor.nbytes for tensor in weights.tensors()}.values())

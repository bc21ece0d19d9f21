"""Low-rank adapters in the layout of PEFT: `adapter_config.json` beside `adapter_model.safetensors`.

What they are called there follows from the family's names, as PEFT names a matrix's two factors after its module.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from remask.checkpoint.files import CONVERTED, opened, read_json
from remask.checkpoint.fingerprint import digest, file_content
from remask.checkpoint.peft_config import PeftConfig, few
from remask.checkpoint.source import ADAPTER_CONFIG as CONFIG
from remask.checkpoint.source import resolve_adapter
from remask.errors import CheckpointError
from remask.families import REGISTRY, Slot
from remask.families.family import Factors
from remask.model.config import ModelConfig
from remask.model.ranks import Shard
from remask.model.weights import LowRank, Weights

WEIGHTS = "adapter_model.safetensors"
Place: TypeAlias = tuple[str, int | None, tuple[int, int] | None]
"""Of a matrix among the weights, whatever a checkpoint calls it: the field, layer and rows of its `Slot`."""

_FIELDS = ("qkv", "out", "gate_up", "down", "head")  # of matrices that an adapter may change
_WRAPPED = "base_model.model."  # ahead of every name in a file of PEFT
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_BASE = (".base_layer.weight", ".base_layer.bias")
"""What PEFT saves of an output matrix or an embedding that has factors: the model's own, which it does not train."""
_RANK_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Pair:
    """The factors of one matrix: what their names in the file begin with, their rank, their product's scale."""

    stem: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter is, for people."""

    name: str  # as it was asked for: a folder or a hub id
    rank: int  # the largest
    alpha: float
    targets: tuple[str, ...]  # last parts of the names of the modules that it changes, sorted
    matrices: int  # how many it changes
    parameters: int  # numbers in its factors

    def __str__(self) -> str:
        return (
            f"{self.name}: rank {self.rank}, alpha {self.alpha:g}, {self.parameters:,} parameters for "
            f"{self.matrices} matrices ({', '.join(self.targets)})"
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a model. Its numbers are read when they are asked for."""

    facts: AdapterFacts
    file: Path  # the file of its factors
    fingerprint: str  # sixteen hexadecimal digits that identify it
    pairs: Mapping[Place, _Pair]  # what it has for which matrix

    @property
    def name(self) -> str:
        """As it was asked for."""
        return self.facts.name

    @property
    def files(self) -> tuple[Path, Path]:
        """Its configuration, and its factors."""
        return self.file.with_name(CONFIG), self.file

    def changes(self, slot: Slot) -> bool:
        """Whether it has factors for the matrix of `slot`."""
        return _place(slot) in self.pairs

    def read(self, slot: Slot) -> LowRank:
        """The factors for the matrix of `slot`, float32 on the CPU.

        Raises `CheckpointError` on a damaged file, and on numbers that are not finite.
        """
        pair = self.pairs[_place(slot)]
        try:
            with opened(self.file) as file:
                names = [f"{pair.stem}.lora_{factor}.weight" for factor in "AB"]
                down, up = (_finite(self.file, name, file.get_tensor(name).float()) for name in names)
        except CheckpointError as error:
            raise _unusable(self.name, error) from error
        return LowRank(down, up * pair.scale)


def _place(slot: Slot) -> Place:
    return slot.field, slot.layer, slot.rows


def read_adapter(name: str, config: ModelConfig, *, apart: bool = False, most: int | None = None) -> Adapter:
    """Check the adapter `name`, a folder or a hub id, against the shape of a model.

    `apart` says that it is to stand beside the weights, where `most` is the largest rank that is allowed. Raises
    `CheckpointError` where a file cannot be read, a key has a value that is not supported, a matrix is not in the model
    or not of its shape, or, of one `apart`, a number is not finite: what is to be merged says so when it is read.
    """
    folder = resolve_adapter(name)
    try:
        adapter = _read(name, folder, config)
        if apart:
            with opened(adapter.file) as file:
                for key in file.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                    _finite(adapter.file, key, file.get_tensor(key))
        if apart and ("head", None, None) in adapter.pairs:
            raise CheckpointError(
                "It changes the output matrix, which is read for all requests together: merge it with --adapter "
                "(adapter=...), or train it on the other matrices."
            )
        rank = adapter.facts.rank
        if most is not None and rank > most:
            raise CheckpointError(f"Its rank is {rank}; allowed: {most} (--max-lora-rank, max_lora_rank).")
        return adapter
    except CheckpointError as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"The adapter {name!r} cannot be used. {error}")


def with_adapters(
    weights: Weights, adapters: Mapping[str, Adapter], config: ModelConfig, factors: Factors, shard: Shard
) -> Weights:
    """`weights`, the part of a model that `shard` holds, with `adapters` by name beside their matrices.

    They are of the dtype and on the device of the weights, and no matrix is changed. Raises `CheckpointError` as
    `Adapter.read`.
    """
    if not adapters:
        return weights
    slots = [slot for slot in REGISTRY.get(config.family).tensors(config, factors) if slot.field in _FIELDS]
    layers = [dict[str, dict[str, LowRank]]() for _ in weights.layers]
    for name, adapter in adapters.items():
        by_matrix: dict[tuple[int, str], list[tuple[Slot, LowRank]]] = {}
        for slot in slots:
            if adapter.changes(slot) and slot.layer is not None:
                whole = adapter.read(slot)
                for piece in slot.pieces(config, shard):
                    rows, columns = (*(piece.part or ()), slice(None), slice(None))[:2]
                    part = LowRank(whole.down[:, columns], whole.up[rows] * piece.scale)
                    by_matrix.setdefault((slot.layer, slot.field), []).append((piece, part))
        for (layer, field), parts in by_matrix.items():
            matrix: Tensor = getattr(weights.layers[layer], field)
            layers[layer].setdefault(field, {})[name] = _side_by_side(parts, matrix, weights.embed)
    pairs = zip(weights.layers, layers, strict=True)
    return replace(weights, layers=tuple(replace(layer, low_rank=changes) for layer, changes in pairs))


def _side_by_side(parts: Sequence[tuple[Slot, LowRank]], matrix: Tensor, like: Tensor) -> LowRank:
    """The factors for a `matrix` whose rows are those of several: A one below the other, B each in its rows.

    The rank is filled up with zeros: some kernels give odd sizes other bits in other rows.
    """
    rank = sum(len(part.down) for _, part in parts)
    rank, at = -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE, 0
    down, up = torch.zeros(rank, matrix.shape[1]), torch.zeros(matrix.shape[0], rank)
    for slot, part in parts:
        rows, ranks = slice(None) if slot.rows is None else slice(*slot.rows), slice(at, at + len(part.down))
        down[ranks], up[rows, ranks] = part.down, part.up
        at = ranks.stop
    return LowRank(down.to(like), up.to(like))


def _read(name: str, folder: Path, config: ModelConfig) -> Adapter:
    raw, file = read_json(folder / CONFIG), folder / WEIGHTS
    if config.self_conditioning:
        raise CheckpointError(
            f"Adapters are not supported on {config.family} models: what is final and what is denoised pass the same "
            "matrices here, and an adapter may change them for one of the two."
        )
    peft = PeftConfig.of(raw)
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist. Only safetensors load: save it with safe_serialization=True.")
    stems, shapes = _shapes(file)
    matrices = (slot for slot in REGISTRY.get(config.family).tensors(config) if len(slot.shape) == 2)
    slots = {slot.name.removesuffix(".weight"): slot for slot in matrices if slot.name.endswith(".weight")}
    ahead = _ahead(shapes, slots)
    base = raw.get("base_model_name_or_path") or "another model"
    modules = {module.removeprefix(ahead): slot for module, slot in slots.items() if module.startswith(ahead)}
    unknown = [module for module in shapes if module not in modules]
    if unknown:
        raise CheckpointError(
            f"{file} has factors for {few(unknown)}, which this {config.family} model does not have as a matrix; it "
            f"was made for {base}."
        )
    peft.check(modules)
    pairs: dict[Place, _Pair] = {}
    for module in filter(peft.matches, modules):
        slot, factors = modules[module], shapes.get(module)
        reason = _unfit(slot)
        if factors is None and peft.all_linear and (reason or slot.field == "head"):
            continue  # PEFT leaves the output matrix out, and what is no linear layer
        if reason:
            raise CheckpointError(
                f"It changes {module!r}, {reason}; supported: matrices of attention and of dense MLPs."
            )
        if factors is None:
            raise CheckpointError(
                f"{file} lacks factors for {module!r}, which 'target_modules' in {CONFIG} names: the file is "
                "incomplete, or belongs to another configuration."
            )
        rank, scale = peft.rank(module), peft.scale(module)
        wanted = ((rank, slot.shape[1]), (slot.shape[0], rank))
        if factors != wanted:
            a, b = map(list, factors)
            raise CheckpointError(
                f"The factors A and B of {module!r} in {file} are {a} and {b}, and a matrix "
                f"{list(slot.shape)} of this {config.family} model with rank {rank} takes {list(wanted[0])} and "
                f"{list(wanted[1])}: the adapter was made for {base}, or its files do not belong together."
            )
        pairs[_place(slot)] = _Pair(stems[module], rank, scale)
    if beyond := [module for module in shapes if not peft.matches(module)]:
        raise CheckpointError(
            f"{file} has factors for {few(beyond)}, which 'target_modules' and what limits it in {CONFIG} leave out."
        )
    facts = AdapterFacts(
        name=name,
        rank=max(pair.rank for pair in pairs.values()),
        alpha=peft.alpha,
        targets=tuple(sorted({pair.stem.rpartition(".")[2] for pair in pairs.values()})),
        matrices=len(pairs),
        parameters=sum(prod(a) + prod(b) for a, b in shapes.values()),
    )
    return Adapter(facts, file, digest([(folder / CONFIG).read_bytes(), *file_content(file)]), pairs)


def _unfit(slot: Slot) -> str:
    """Why no adapter may change a matrix; empty where one may."""
    if slot.expert is not None:
        return "a matrix of an expert"
    others = {"embed": "the embedding", "mixture.router": "the router"}
    return "" if slot.field in _FIELDS else f"{others.get(slot.field, 'self-conditioning')} of the model"


def _shapes(file: Path) -> tuple[dict[str, str], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """What the names of each module's factors begin with, and the shapes of A and B.

    Raises `CheckpointError` on what else the file holds.
    """
    shapes, stems = dict[str, dict[str, tuple[int, ...]]](), dict[str, str]()
    with opened(file) as content:
        for name in content.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
            if name.endswith(_BASE):
                continue
            piece, factor = content.get_slice(name), _FACTOR.fullmatch(name.removeprefix(_WRAPPED))
            if factor is None:
                raise CheckpointError(f"{file} holds {name!r}; supported: NAME.lora_A.weight and NAME.lora_B.weight.")
            if piece.get_dtype() not in CONVERTED:
                raise CheckpointError(f"{name!r} in {file} is {piece.get_dtype()}; supported: {', '.join(CONVERTED)}.")
            stems[factor[1]] = name.partition(".lora_")[0]
            shapes.setdefault(factor[1], {})[factor[2]] = tuple(piece.get_shape())
    if not shapes:
        raise CheckpointError(f"{file} holds no tensor.")
    if single := [module for module, factors in shapes.items() if len(factors) < 2]:
        raise CheckpointError(f"{file} has only one of the factors A and B of {few(single)}.")
    return stems, {module: (factors["A"], factors["B"]) for module, factors in shapes.items()}


def _ahead(shapes: Mapping[str, object], slots: Mapping[str, Slot]) -> str:
    """What the names of the file's modules leave out: an adapter of a model without its output matrix does."""
    first = next(iter(shapes))
    whole = [name for name in slots if name == first or name.endswith(f".{first}")]
    return whole[0].removesuffix(first) if len(whole) == 1 else ""


def _finite(file: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor. Raises `CheckpointError` where a number of it is not finite."""
    low, high = tensor.aminmax()  # both are NaN where one number is
    if not math.isfinite(low) or not math.isfinite(high):
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{name!r} in {file} holds {count} values of {tensor.numel()} that are NaN or infinite: the file is "
            "damaged, or its training diverged."
        )
    return tensor

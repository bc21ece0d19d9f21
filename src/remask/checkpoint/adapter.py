"""Low-rank adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT names a matrix' two factors after its module, so their names follow from the family's.
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

from remask.checkpoint.files import FLOATS, open_weight_file, read_json
from remask.checkpoint.fingerprint import digest, file_content
from remask.checkpoint.peft_config import PeftConfig, list_few
from remask.checkpoint.source import ADAPTER_CONFIG as CONFIG
from remask.checkpoint.source import resolve_adapter
from remask.errors import CheckpointError
from remask.families import REGISTRY, Slot
from remask.families.family import Factors
from remask.model.config import ModelConfig
from remask.model.ranks import Shard
from remask.model.weights import LowRank, Weights

WEIGHTS = "adapter_model.safetensors"
MatrixKey: TypeAlias = tuple[str, int | None, tuple[int, int] | None]
"""Identifies a matrix of the weights by the field, layer and rows of its `Slot`."""

_FIELDS = ("qkv", "out", "gate_up", "down", "head")  # of matrices that an adapter may change
_PEFT_PREFIX = "base_model.model."  # prefix of every name in a file of PEFT
_FACTOR = re.compile(r"(?P<stem>.+)\.lora_(?P<factor>[AB])\.weight")
_BASE_ENDINGS = (".base_layer.weight", ".base_layer.bias")
"""Endings of the model's own output matrix or embedding, which PEFT saves untrained if it has factors."""
_RANK_MULTIPLE = 16  # of the padded rank: some kernels for odd sizes round rows differently


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two factors of one matrix."""

    stem: str  # prefix of their names in the file
    rank: int
    scale: float  # of their product


@dataclass(frozen=True, slots=True)
class _FactorShapes:
    """The shapes of the two factors of one module in a file."""

    stem: str  # prefix of their names in the file
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The properties of an adapter that are shown to users."""

    name: str  # the folder or hub id
    rank: int  # the largest one
    alpha: float
    targets: tuple[str, ...]  # last parts of the names of the modules that it changes, sorted
    matrices: int  # number of matrices that it changes
    parameters: int  # numbers in its factors

    def __str__(self) -> str:
        return (
            f"{self.name}: rank {self.rank}, alpha {self.alpha:g}, {self.parameters:,} parameters for "
            f"{self.matrices} matrices ({', '.join(self.targets)})"
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a model. Its numbers are read by `read`."""

    facts: AdapterFacts
    file: Path  # of the factors
    fingerprint: str  # sixteen hexadecimal digits
    pairs: Mapping[MatrixKey, _Pair]

    @property
    def name(self) -> str:
        """The folder or hub id."""
        return self.facts.name

    @property
    def files(self) -> tuple[Path, Path]:
        """The files of its configuration and of its factors."""
        return self.file.with_name(CONFIG), self.file

    def changes(self, slot: Slot) -> bool:
        """Whether it has factors for the matrix of `slot`."""
        return _matrix_key(slot) in self.pairs

    def read(self, slot: Slot) -> LowRank:
        """The factors for the matrix of `slot`, float32 on the CPU. Raises `CheckpointError` if one is not finite."""
        pair = self.pairs[_matrix_key(slot)]
        try:
            with open_weight_file(self.file) as file:
                names = [f"{pair.stem}.lora_{factor}.weight" for factor in "AB"]
                down, up = (_check_finite(self.file, name, file.get_tensor(name).float()) for name in names)
        except CheckpointError as error:
            raise _unusable_error(self.name, error) from error
        return LowRank(down, up * pair.scale)


def _matrix_key(slot: Slot) -> MatrixKey:
    return slot.field, slot.layer, slot.rows


def read_adapter(name: str, config: ModelConfig, *, merge: bool = True, max_rank: int | None = None) -> Adapter:
    """Check the adapter `name`, a folder or a hub id, against the shape of a model.

    With `merge` it is for merging into the weights. Otherwise requests may name it: it cannot change the output matrix,
    has at most the rank `max_rank`, and all of its numbers are checked here. Raises `CheckpointError` if a file cannot
    be read, a value is not supported, a matrix is not in the model or has another shape, or a number is not finite.
    """
    folder = resolve_adapter(name)
    try:
        adapter = _read_adapter(name, folder, config)
        if not merge:
            with open_weight_file(adapter.file) as file:
                for key in file.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                    if not key.endswith(_BASE_ENDINGS):  # they are not read, and may be of any dtype or empty
                        _check_finite(adapter.file, key, file.get_tensor(key))
        if not merge and ("head", None, None) in adapter.pairs:
            raise CheckpointError(
                "It changes the output matrix, which is read for all requests together: merge it with --adapter "
                "(adapter=...), or train it on the other matrices."
            )
        rank = adapter.facts.rank
        if max_rank is not None and rank > max_rank:
            raise CheckpointError(f"Its rank is {rank}; allowed: {max_rank} (--max-lora-rank, max_lora_rank).")
        return adapter
    except CheckpointError as error:
        raise _unusable_error(name, error) from error


def _unusable_error(name: str, error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"The adapter {name!r} cannot be used. {error}")


def with_adapters(
    weights: Weights, adapters: Mapping[str, Adapter], config: ModelConfig, factors: Factors, shard: Shard
) -> Weights:
    """`weights`, the part of a model that `shard` holds, with `adapters` by name as low-rank changes of their matrices.

    The changes have the dtype and the device of `weights.embed`, and no matrix is changed. None is of the output
    matrix, as `read_adapter` refuses that. `factors` are the family's constants, which its weights are multiplied by.
    Raises `CheckpointError` if the factors of an adapter cannot be read.
    """
    if not adapters:
        return weights
    slots = [slot for slot in REGISTRY.get(config.family).tensors(config, factors) if slot.field in _FIELDS]
    changes_by_layer = [dict[str, dict[str, LowRank]]() for _ in weights.layers]  # each: by field, then by adapter
    for name, adapter in adapters.items():
        parts_by_matrix: dict[tuple[int, str], list[tuple[Slot, LowRank]]] = {}
        for slot in slots:
            if slot.layer is not None and adapter.changes(slot):
                parts = _local_factors(adapter.read(slot), slot, config, shard)
                parts_by_matrix.setdefault((slot.layer, slot.field), []).extend(parts)
        for (layer, field), parts in parts_by_matrix.items():
            matrix: Tensor = getattr(weights.layers[layer], field)
            changes_by_layer[layer].setdefault(field, {})[name] = _combine_factors(parts, matrix, weights.embed)
    changed_layers = zip(weights.layers, changes_by_layer, strict=True)
    return replace(weights, layers=tuple(replace(layer, low_rank=changes) for layer, changes in changed_layers))


def _local_factors(change: LowRank, slot: Slot, config: ModelConfig, shard: Shard) -> list[tuple[Slot, LowRank]]:
    """The factors of the parts of the matrix of `slot` that `shard` holds, with the slot of each part."""
    parts = list[tuple[Slot, LowRank]]()
    for local_slot in slot.parts(config, shard):
        cut = change.cut(*(local_slot.part or ()))
        # The change must have the scale of the weights, which a family multiplies into them. One factor brings it.
        parts.append((local_slot, replace(cut, up=cut.up * local_slot.scale)))
    return parts


def _combine_factors(parts: Sequence[tuple[Slot, LowRank]], matrix: Tensor, reference: Tensor) -> LowRank:
    """One pair of factors for `matrix`, from those of the matrices that its rows consist of.

    Factors A are stacked, and each B is in the rows of its matrix. The rank is padded with zeros to a multiple of
    `_RANK_MULTIPLE`. The result has the dtype and the device of `reference`.
    """
    rank = -(-sum(len(part.down) for _, part in parts) // _RANK_MULTIPLE) * _RANK_MULTIPLE
    down, up = torch.zeros(rank, matrix.shape[1]), torch.zeros(matrix.shape[0], rank)
    start = 0
    for slot, part in parts:
        rows = slice(None) if slot.rows is None else slice(*slot.rows)
        rank_slice = slice(start, start + len(part.down))
        down[rank_slice] = part.down
        up[rows, rank_slice] = part.up
        start = rank_slice.stop
    return LowRank(down.to(reference), up.to(reference))


def _read_adapter(name: str, folder: Path, config: ModelConfig) -> Adapter:
    """The adapter in `folder`, checked by keys and headers. Raises `CheckpointError` if it does not fit the model."""
    raw = read_json(folder / CONFIG)
    file = folder / WEIGHTS
    if config.self_conditioning:
        raise CheckpointError(
            f"Adapters are not supported on {config.family} models: final rows and denoised rows pass the same "
            "matrices here, and an adapter may change them for one of the two."
        )
    peft = PeftConfig.of(raw)
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist. Only safetensors load: save it with safe_serialization=True.")
    shapes = _read_shapes(file)
    matrices = (slot for slot in REGISTRY.get(config.family).tensors(config) if len(slot.shape) == 2)
    slots = {slot.name.removesuffix(".weight"): slot for slot in matrices if slot.name.endswith(".weight")}
    prefix = _missing_prefix(shapes, slots)
    base = raw.get("base_model_name_or_path") or "another model"
    modules = {module.removeprefix(prefix): slot for module, slot in slots.items() if module.startswith(prefix)}
    unknown = [module for module in shapes if module not in modules]
    if unknown:
        raise CheckpointError(
            f"{file} has factors for {list_few(unknown)}, which this {config.family} model does not have as a matrix; "
            f"it was made for {base}."
        )
    peft.check(modules)
    pairs: dict[MatrixKey, _Pair] = {}
    for module in filter(peft.matches, modules):
        slot = modules[module]
        factors = shapes.get(module)
        reason = _reason_unsupported(slot)
        if factors is None and peft.all_linear and (reason or slot.field == "head"):
            continue  # "all-linear" leaves out the output matrix, and modules that are not linear layers
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
        expected_a, expected_b = (rank, slot.shape[1]), (slot.shape[0], rank)
        if (factors.a, factors.b) != (expected_a, expected_b):
            raise CheckpointError(
                f"The factors A and B of {module!r} in {file} are {list(factors.a)} and {list(factors.b)}, and a "
                f"matrix {list(slot.shape)} of this {config.family} model with rank {rank} takes {list(expected_a)} "
                f"and {list(expected_b)}: the adapter was made for {base}, or its files do not belong together."
            )
        pairs[_matrix_key(slot)] = _Pair(factors.stem, rank, scale)
    if unmatched := [module for module in shapes if not peft.matches(module)]:
        raise CheckpointError(
            f"{file} has factors for {list_few(unmatched)}, which 'target_modules' and the keys that limit it in "
            f"{CONFIG} leave out."
        )
    facts = AdapterFacts(
        name=name,
        rank=max(pair.rank for pair in pairs.values()),
        alpha=peft.alpha,
        targets=tuple(sorted({pair.stem.rpartition(".")[2] for pair in pairs.values()})),
        matrices=len(pairs),
        parameters=sum(prod(factors.a) + prod(factors.b) for factors in shapes.values()),
    )
    return Adapter(facts, file, digest([(folder / CONFIG).read_bytes(), *file_content(file)]), pairs)


def _reason_unsupported(slot: Slot) -> str:
    """What the matrix of `slot` is, in words, if no adapter may change it; empty if an adapter may."""
    if slot.expert is not None:
        return "a matrix of an expert"
    nouns = {"embed": "the embedding", "mixture.router": "the router"}
    return "" if slot.field in _FIELDS else f"{nouns.get(slot.field, 'self-conditioning')} of the model"


def _read_shapes(file: Path) -> dict[str, _FactorShapes]:
    """The shapes of the factors in `file`, by module; only the header is read.

    Raises `CheckpointError` if the file has no factors, a tensor that is not a factor, a dtype that does not convert, a
    factor without the other one, or a module both with PEFT's prefix and without it.
    """
    shapes, stems = dict[str, dict[str, tuple[int, ...]]](), dict[str, str]()
    with open_weight_file(file) as content:
        for name in content.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
            if name.endswith(_BASE_ENDINGS):
                continue
            header = content.get_slice(name)
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise CheckpointError(f"{file} holds {name!r}; supported: NAME.lora_A.weight and NAME.lora_B.weight.")
            if header.get_dtype() not in FLOATS:
                raise CheckpointError(f"{name!r} in {file} is {header.get_dtype()}; supported: {', '.join(FLOATS)}.")
            module = match["stem"].removeprefix(_PEFT_PREFIX)
            stem = stems.setdefault(module, match["stem"])
            if stem != match["stem"]:
                raise CheckpointError(
                    f"{file} holds factors of one module under two names, {stem!r} and {match['stem']!r}: keep "
                    "those of one name."
                )
            shapes.setdefault(module, {})[match["factor"]] = tuple(header.get_shape())
    if not shapes:
        raise CheckpointError(f"{file} holds no factors.")
    if incomplete := [module for module, factors in shapes.items() if len(factors) < 2]:
        raise CheckpointError(f"{file} has only one of the factors A and B of {list_few(incomplete)}.")
    return {module: _FactorShapes(stems[module], factors["A"], factors["B"]) for module, factors in shapes.items()}


def _missing_prefix(shapes: Mapping[str, object], slots: Mapping[str, Slot]) -> str:
    """The prefix of the model's modules that the file's names lack; an adapter of the inner model has shorter names."""
    module = next(iter(shapes))
    matches = [name for name in slots if name == module or name.endswith(f".{module}")]
    return matches[0].removesuffix(module) if len(matches) == 1 else ""


def _check_finite(file: Path, name: str, tensor: Tensor) -> Tensor:
    """Return `tensor`. Raises `CheckpointError` if a number in it is not finite."""
    low, high = tensor.aminmax()  # both are NaN if a number is
    if not math.isfinite(low) or not math.isfinite(high):
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{name!r} in {file} holds {count} values of {tensor.numel()} that are NaN or infinite: the file is "
            "damaged, or its training diverged."
        )
    return tensor

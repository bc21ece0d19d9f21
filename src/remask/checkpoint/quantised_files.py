"""Checkpoints of quantized weights: how they are written, and what their tensors are called.

A matrix `NAME` stands there as its codes, under its own name, beside `NAME_scale` and, of int4, `NAME_zero`; two codes
of int4 share a byte, the first in the lower half. So do the matrices of all experts where they are one tensor. All
other tensors, and all other files, are those of the checkpoint that was quantised. `config.json` says which kind it is.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from remask.checkpoint.files import (
    INDEX,
    OWN,
    TensorLocation,
    listed,
    raw_config,
    read_json,
    tensor_locations,
    weight_files,
)
from remask.checkpoint.gguf_header import is_gguf
from remask.checkpoint.scaled_files import KEY, convention, read_numbers, refuse_foreign, with_scales
from remask.checks import QUANTIZATIONS, Quantization
from remask.errors import CheckpointError, ConfigError
from remask.families.family import Family
from remask.model.config import ModelConfig
from remask.model.cpu_kernels import GROUP
from remask.model.quantised import Codes, encode

METHOD = "remask"
SCALE, ZERO = "_scale", "_zero"
SHARD = 4 * 2**30  # bytes of a weight file
MATRICES = ("qkv", "out", "gate_up", "down", "mixture.gate_up", "mixture.down")
_BYTES = {"int8": "I8", "int4": "U8", "fp8": "F8_E4M3"}


def stored_kind(folder: Path) -> Quantization | None:
    """How the matrices of the checkpoint in `folder` are kept; None: as numbers, or as fp8 that becomes numbers.

    Raises `CheckpointError` where another program has quantised it in a way that is not read here.
    """
    asked = raw_config(folder).get(KEY)
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise CheckpointError(f"{folder / 'config.json'}: {KEY!r} is {json.dumps(asked)[:200]}; supported: an object.")
    kind = asked.get("kind")
    if asked.get("quant_method") != METHOD:
        convention(folder, asked)
        return None
    if kind not in QUANTIZATIONS:
        raise CheckpointError(
            f"{folder / 'config.json'}: {KEY!r} is {json.dumps(asked)[:200]}; supported as 'kind': "
            f"{', '.join(QUANTIZATIONS)}. Write the model again with 'remask quantize'."
        )
    return kind  # type: ignore[no-any-return]


def check_kind(folder: Path, asked: Quantization | None) -> None:
    """Raise `ConfigError` where the checkpoint in `folder` is quantised, and not as `asked`."""
    kind = stored_kind(folder)
    if kind is not None and kind != asked:
        raise ConfigError(f"the model in {folder} is quantised as {kind!r}, and quantization={asked!r}: leave that out")


def unfolded(folder: Path, found: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The tensors of a checkpoint, with codes, scales and zeros of each quantised matrix as one.

    Raises `CheckpointError` where scales or zeros are missing or misshapen, or another program's codes are found.
    """
    kind, asked = stored_kind(folder), raw_config(folder).get(KEY)
    if kind is None:
        refuse_foreign(folder, found)
        return dict(found) if asked is None else with_scales(folder, convention(folder, asked), found)
    scales = {name.removesuffix(SCALE) for name in found if name.endswith(SCALE)} & found.keys()
    others = {name + end for name in scales for end in (SCALE, ZERO)}
    whole = {name: place for name, place in found.items() if name not in others}
    faults = []
    for name in sorted(scales):
        place, half = found[name], kind == "int4"
        rows, columns = place.shape[:-1], place.shape[-1] * (2 if half else 1)
        shape = (*rows, columns // GROUP) if half else rows
        beside = [found.get(name + end) for end in ((SCALE, ZERO) if half else (SCALE,))]
        if any(own is None or (own.shape, own.file) != (shape, place.file) for own in beside):
            faults.append(f"{name}{SCALE} {list(shape)}" + (f" or {name}{ZERO}" if half else ""))
        if place.dtype != _BYTES[kind]:
            faults.append(f"{name} as {_BYTES[kind]}")
        whole[name] = replace(place, shape=(*rows, columns), dtype="F32", kind=kind)
    if faults:
        raise CheckpointError(
            f"The {kind} model in {folder} lacks {listed(faults)}. Write it again with 'remask quantize'."
        )
    return whole


def read_codes(file: Any, name: str, kind: Quantization, part: tuple[slice, ...]) -> Codes:
    """The codes of some rows and columns of a quantised matrix, or of some experts', in an open file.

    No other is read.
    """
    rows, columns = part[0], part[1] if len(part) == 2 else slice(None)
    values, scales = file.get_slice(name), file.get_slice(name + SCALE)
    between = (slice(None),) * (len(values.get_shape()) - 2)  # rows of experts
    if kind != "int4":
        return Codes(values[rows, *between, columns], scales[rows])
    groups, packed = groups_of(name, columns), values[rows, *between, _divided(columns, 2)]
    places = rows, *between, groups
    return Codes(_unpacked(packed), scales[places], file.get_slice(name + ZERO)[places])


def groups_of(name: str, columns: slice) -> slice:
    """The groups of int4 that `columns` of a matrix are. Raises `CheckpointError` where one would be cut."""
    if any(place is not None and place % GROUP for place in (columns.start, columns.stop)):
        raise CheckpointError(f"{name} cannot be cut within a group of {GROUP} columns; use fewer processes")
    return _divided(columns, GROUP)


def save_quantised(
    folder: Path,
    family: Family,
    config: ModelConfig,
    kind: Quantization,
    target: Path,
    progress: bool = True,
    *,
    overrides: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> int:
    """Write the checkpoint in `folder` into the new folder `target`, its matrices as `kind`. Returns bytes of weights.

    One tensor at a time is read, and the tensors of one file are held. Keys of `overrides` are laid over those of
    `config.json`, and `own` is written as `remask.json`: what the model is loaded with by another name than the path of
    its folder. None: that file is copied, if there is one.

    Raises:
        ConfigError: `target` exists and is no empty folder, or the checkpoint is quantised already or a GGUF file.
        CheckpointError: a file cannot be read.
    """
    if is_gguf(folder):
        raise ConfigError(
            f"the model {str(folder)!r} is a GGUF file, and 'remask quantize' takes a folder of safetensors: load the "
            "file itself with --quantization"
        )
    if stored_kind(folder) is not None:
        raise ConfigError(f"the model in {folder} is quantised already")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output: {str(target)!r} exists and is no empty folder; name another one")
    target.mkdir(parents=True, exist_ok=True)
    matrices = {slot.name for slot in family.tensors(config) if slot.field in MATRICES}
    found = unfolded(folder, tensor_locations(folder))
    total = sum(prod(place.shape) for place in found.values())
    placed, size, held, number = dict[str, str](), 0, dict[str, Tensor](), 0
    with tqdm(total=total, desc="Quantising", unit="weight", unit_scale=True, disable=not progress) as bar:
        for name, tensor in _every(folder, found):
            for each, content in _written(name, tensor, kind if name in matrices else None):
                held[each] = content
            bar.update(tensor.numel())
            if sum(content.nbytes for content in held.values()) > SHARD:
                size, number = size + _shard(target, held, placed, number), number + 1
                held = {}
    size += _shard(target, held, placed, number)
    (target / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": placed}), encoding="utf-8")
    raw = read_json(folder / "config.json") | dict(overrides or {}) | {KEY: {"quant_method": METHOD, "kind": kind}}
    (target / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    rewritten = {*(file.name for file in weight_files(folder)), INDEX, "config.json"}
    for file in folder.iterdir():
        if file.is_file() and file.name not in rewritten and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, target / file.name)
    if own is not None:
        (target / OWN).write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")
    return size


def _every(folder: Path, found: Mapping[str, TensorLocation]) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name, place in found.items():
                if place.file == path:
                    yield name, read_numbers(file, name, place)


def _written(name: str, tensor: Tensor, kind: Quantization | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for one: a matrix [M, K], or one of each expert [E, M, K]."""
    if kind is None:
        yield name, tensor
        return
    codes, rows = encode(kind, tensor.flatten(0, -2)), tensor.shape[:-1]
    held = {"": _packed(codes.values) if kind == "int4" else codes.values, SCALE: codes.scales, ZERO: codes.zeros}
    for end, content in held.items():
        if content is not None:
            yield name + end, content.view(*rows, *content.shape[1:])


def _shard(target: Path, held: dict[str, Tensor], placed: dict[str, str], number: int) -> int:
    """Write one file; note its tensors in `placed`. Returns its bytes of weights."""
    file = f"model-{number + 1:05d}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, target / file)
    placed |= dict.fromkeys(held, file)
    return sum(tensor.nbytes for tensor in held.values())


def _packed(codes: Tensor) -> Tensor:
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _divided(part: slice, by: int) -> slice:
    return slice(*(None if place is None else place // by for place in (part.start, part.stop)))

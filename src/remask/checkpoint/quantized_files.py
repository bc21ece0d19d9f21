"""Checkpoints of quantized weights: our own, and those in fp8 that other programs wrote.

In our own, a matrix `NAME` is stored as codes under its own name, with `NAME_scale` and, for int4, `NAME_zero`; two
codes of int4 share a byte, the first in the lower half. The same holds for matrices of all experts in one tensor. All
other tensors, and all other files, are those of the original checkpoint. `config.json` has the kind.

For others, `quantization_config` in `config.json` has the format, as vLLM reads it: `fp8` (DeepSeek, transformers; a
scale for each tensor, or each block of `weight_block_size`) or `compressed-tensors` (`float-quantized`; a scale for
each tensor, row or block). A number is its code (e4m3) times its scale, even if that is called `_scale_inv`. Scales of
activations and of K/V are not read: both have the model's dtype.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from remask.checkpoint.files import (
    CONFIG,
    DEFAULTS_FILE,
    FLOATS,
    INDEX,
    VERSION,
    Scales,
    TensorLocation,
    check_version,
    list_faults,
    open_weight_file,
    raw_config,
    read_json,
    tensor_locations,
    weight_files,
)
from remask.checkpoint.gguf_header import is_gguf
from remask.checks import QUANTIZATIONS, Quantization
from remask.checks.values import is_whole
from remask.errors import CheckpointError, ConfigError
from remask.families.family import Family
from remask.families.fields import Fields
from remask.machine.progress import Progress
from remask.model.config import ModelConfig
from remask.model.quantized import Codes, encode
from remask.model.sizes import GROUP

KEY = "quantization_config"
_CODES = "F8_E4M3"  # dtype of codes of other programs
_SCALES = (*FLOATS, "F8_E8M0")  # dtypes of their scales
_OTHER_SCALES = re.compile(r".*\.(input|output|activation|[qkv]|kv_cache)_scale(_inv)?")
# Other programs by their `quant_method`, and by endings of names of tensors that only their files have.
_TOOLS = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "gptqmodel": "GPTQ", "auto-round": "AutoRound"}
_TOOL_ENDINGS = {".g_idx": "GPTQ", ".qweight": "GPTQ or AWQ", ".SCB": "bitsandbytes", ".quant_map": "bitsandbytes"}

METHOD = "remask"
SCALE, ZERO = "_scale", "_zero"
SHARD_BYTES = 4 * 2**30  # bytes of a weight file
MATRICES = ("qkv", "out", "gate_up", "down", "mixture.gate_up", "mixture.down")
_CODE_TYPES = {"int8": "I8", "int4": "U8", "fp8": _CODES}


def stored_quantization(folder: Path) -> Quantization | None:
    """The quantization of a checkpoint that is our own. Returns None for others; their fp8 is read as numbers.

    Raises `CheckpointError` if another program has quantized it in a format that is not supported.
    """
    settings = raw_config(folder).get(KEY)
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG}: {KEY!r} is {json.dumps(settings)[:200]}; supported: an object.")
    if settings.get("quant_method") != METHOD:
        _scale_convention(folder, settings)
        return None
    check_version(settings.get(VERSION, 1), f"{KEY!r} in {folder / CONFIG}")
    quantization = settings.get("kind")
    if quantization not in QUANTIZATIONS:
        raise CheckpointError(
            f"{folder / CONFIG}: {KEY!r} is {json.dumps(settings)[:200]}; supported as 'kind': "
            f"{', '.join(QUANTIZATIONS)}. Write the model again with 'remask quantize'."
        )
    return quantization  # type: ignore[no-any-return]


def check_stored_quantization(folder: Path, quantization: Quantization | None) -> None:
    """Raise `ConfigError` if the checkpoint in `folder` is quantized, but not as `quantization`."""
    stored = stored_quantization(folder)
    if stored is not None and stored != quantization:
        raise ConfigError(
            f"the model in {folder} is quantized as {stored!r}, and quantization={quantization!r}: leave that out"
        )


def join_codes(folder: Path, locations: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The tensors of a checkpoint, with codes, scales and zeros of each quantized matrix as one tensor.

    Raises `CheckpointError` if scales or zeros are missing or have a wrong shape, or another program has quantized it.
    """
    quantization = stored_quantization(folder)
    settings = raw_config(folder).get(KEY)
    if quantization is None:
        for name in locations:
            for ending, program in _TOOL_ENDINGS.items():
                if name.endswith(ending):
                    raise _foreign_error(folder, program, name)
        if settings is None:
            return dict(locations)
        endings, block = _scale_convention(folder, settings)
        return _join_scales(folder, endings, block, locations)
    return _join_own_codes(folder, quantization, locations)


def _join_own_codes(
    folder: Path, quantization: Quantization, locations: Mapping[str, TensorLocation]
) -> dict[str, TensorLocation]:
    """The tensors of our own checkpoint, each quantized matrix as one tensor of the shape of its numbers.

    Raises `CheckpointError` with all matrices whose codes, scales or zeros are missing or wrong.
    """
    matrices = {name.removesuffix(SCALE) for name in locations if name.endswith(SCALE)} & locations.keys()
    constants = {name + end for name in matrices for end in (SCALE, ZERO)}
    tensors = {name: location for name, location in locations.items() if name not in constants}
    is_int4 = quantization == "int4"
    faults = []
    for name in sorted(matrices):
        location = locations[name]
        if not location.shape:
            faults.append(f"{name} as a matrix")
            continue
        rows, columns = location.shape[:-1], location.shape[-1] * (2 if is_int4 else 1)
        shape = (*rows, columns // GROUP) if is_int4 else rows
        for constant in (locations.get(name + end) for end in ((SCALE, ZERO) if is_int4 else (SCALE,))):
            if constant is None or (constant.shape, constant.file) != (shape, location.file):
                faults.append(f"{name}{SCALE} {list(shape)}" + (f" or {name}{ZERO}" if is_int4 else ""))
                break
        if location.dtype != _CODE_TYPES[quantization]:
            faults.append(f"{name} as {_CODE_TYPES[quantization]}")
        tensors[name] = replace(location, shape=(*rows, columns), dtype="F32", quantization=quantization)
    if faults:
        raise CheckpointError(
            f"The {quantization} model in {folder} lacks {list_faults(faults)}. Write it again with 'remask quantize'."
        )
    return tensors


def read_codes(file: Any, name: str, quantization: Quantization, part: tuple[slice, ...]) -> Codes:
    """The codes of `part`, rows and columns of a quantized matrix or of some experts', in an open file.

    Nothing else of the tensor is read. Raises `CheckpointError` if a group of int4 would be cut.
    """
    rows, columns = part[0], part[1] if len(part) == 2 else slice(None)
    values, scales = file.get_slice(name), file.get_slice(name + SCALE)
    inner = (slice(None),) * (len(values.get_shape()) - 2)  # all rows of each expert, if `rows` are experts
    if quantization != "int4":
        return Codes(values[rows, *inner, columns], scales[rows])
    groups = rows, *inner, groups_of(name, columns)
    packed = values[rows, *inner, _divide_slice(columns, 2)]
    return Codes(_unpack_int4(packed), scales[groups], file.get_slice(name + ZERO)[groups])


def groups_of(name: str, columns: slice) -> slice:
    """The groups of int4 in `columns` of a matrix. Raises `CheckpointError` if one would be cut."""
    if any(bound is not None and bound % GROUP for bound in (columns.start, columns.stop)):
        raise CheckpointError(f"{name} cannot be cut within a group of {GROUP} columns; use fewer processes")
    return _divide_slice(columns, GROUP)


Block: TypeAlias = tuple[int | None, int | None]
"""The numbers of rows and columns that share a scale; None: all of them."""


def _scale_convention(folder: Path, settings: Mapping[str, Any]) -> tuple[tuple[str, ...], Block]:
    """The possible endings of the names of scales, and the block of each scale, from `quantization_config`.

    Raises `CheckpointError` if the format is not fp8 or is not supported; the message names the program that quantized
    the model, and the way out.
    """
    fields = Fields(f"{KEY!r} in {folder / CONFIG}", settings)
    method = fields.get("quant_method")
    if method == "fp8":
        fields.only("fmt", "e4m3", optional=True)
        has_blocks = fields.get("weight_block_size") is not None
        block = _block_shape(fields, "weight_block_size") if has_blocks else (None, None)
        return ("_scale_inv",) if has_blocks else ("_scale_inv", "_scale"), block
    if method == "compressed-tensors":
        return ("_scale",), _compressed_block(fields)
    name = "a program that it does not name" if method is None else str(method)
    raise _foreign_error(folder, _TOOLS.get(name.casefold(), name), settings)


def _foreign_error(folder: Path, program: str, sign: object) -> CheckpointError:
    """The error for a model that another program has quantized, with the `sign` of it."""
    return CheckpointError(
        f"The model in {folder} is quantized by {program} ({json.dumps(sign)[:200]}), and its files cannot be read "
        "here. Load the model that it was made of, with --quantization int4 or int8 on a CPU, or a GGUF file or an fp8 "
        "folder of it."
    )


def _compressed_block(fields: Fields) -> Block:
    """The block of scales of compressed-tensors. Raises `CheckpointError` if groups of layers have different ones."""
    for key in ("sparsity_config", "transform_config"):  # they change nothing if they are empty
        if fields.get(key):
            raise fields.unfit(key, "null or {}")
    groups = fields.get("config_groups")
    if not (isinstance(groups, Mapping) and groups and all(isinstance(group, Mapping) for group in groups.values())):
        raise fields.unfit("config_groups", "an object of groups of layers")
    blocks = set[Block]()
    for name, group in groups.items():
        if (group.get("format") or fields.get("format")) not in ("float-quantized", "naive-quantized"):
            raise fields.unfit("format", '"float-quantized", which is fp8')
        weights = group.get("weights")
        blocks.add(_group_block(Fields(f"{name}, 'weights'", weights if isinstance(weights, Mapping) else {})))
    if len(blocks) > 1:
        raise fields.unfit("config_groups", "groups of layers whose weights have one strategy")
    return blocks.pop()


def _group_block(weights: Fields) -> Block:
    """The block of scales of one group of layers. Raises `CheckpointError` if its weights are not fp8."""
    weights.only("num_bits", 8)
    weights.only("type", "float")
    weights.only("symmetric", True, optional=True)
    weights.only("dynamic", False, optional=True)
    match weights.get("strategy"):
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "block":
            return _block_shape(weights, "block_structure")
        case _:
            raise weights.unfit("strategy", '"tensor", "channel" or "block"')


def _block_shape(fields: Fields, key: str) -> tuple[int, int]:
    """The rows and columns of a block. Raises `CheckpointError` if `key` does not hold them."""
    block = fields.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(is_whole(size, 1) for size in block):
        raise fields.unfit(key, "two positive integers, rows and columns of a block")
    return block[0], block[1]


def _join_scales(
    folder: Path, endings: tuple[str, ...], block: Block, locations: Mapping[str, TensorLocation]
) -> dict[str, TensorLocation]:
    """The tensors of a checkpoint without their scales, which become `TensorLocation.scales`.

    Raises `CheckpointError` with all tensors of codes whose scale is missing or wrong.
    """
    tensors = dict[str, TensorLocation]()
    faults = list[str]()
    all_scales = set[str]()
    for name, location in locations.items():
        names = [name + end for end in endings if name + end in locations]
        all_scales.update(names)
        if location.dtype != _CODES:
            tensors[name] = location
            faults += [f"{scale} is the scale of {name}, which is {location.dtype}" for scale in names]
            continue
        if len(names) != 1 or len(location.shape) != 2:
            allowed = " or ".join(name + end for end in endings)
            faults.append(f"{name} {list(location.shape)} has {len(names) or 'no'} scales; supported: one, {allowed}")
            continue
        scale = locations[names[0]]
        block_shape = block[0] or location.shape[0], block[1] or location.shape[1]
        grid = _grid(location.shape, block_shape)
        if [size for size in scale.shape if size > 1] != [size for size in grid if size > 1]:
            faults.append(f"{names[0]} is {list(scale.shape)}, {KEY} asks for {list(grid)}")
        if scale.dtype not in _SCALES:
            faults.append(f"{names[0]} is {scale.dtype}; supported: {', '.join(_SCALES)}")
        tensors[name] = replace(location, number_bytes=1.0, scales=Scales(names[0], scale.file, block_shape))
    if faults:
        raise CheckpointError(
            f"The fp8 tensors in {folder} are not scaled as {KEY} in its config.json says: "
            f"{list_faults(faults)}. Use the config.json that belongs to these weights, or download them again."
        )
    all_scales.update(filter(_OTHER_SCALES.fullmatch, tensors))
    return {name: location for name, location in tensors.items() if name not in all_scales}


def _grid(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, int]:
    """The number of blocks along the rows and along the columns of a matrix; the last ones may be smaller."""
    return -(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1])


def read_numbers(file: Any, name: str, location: TensorLocation, part: tuple[slice, ...] | None = None) -> Tensor:
    """`part` of a tensor in an open safetensors file. If it has scales, it is multiplied by them, in float32."""
    codes: Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
    if location.scales is None:
        return codes
    if location.scales.file == location.file:
        stored_scales = file.get_tensor(location.scales.name)
    else:
        with open_weight_file(location.scales.file) as scales_file:
            stored_scales = scales_file.get_tensor(location.scales.name)
    height, width = location.scales.block_shape
    scales = stored_scales.float().reshape(_grid(location.shape, location.scales.block_shape))
    cuts = (*(part or ()), slice(None), slice(None))
    rows, columns = (range(size)[cut] for size, cut in zip(location.shape, cuts, strict=False))
    if scales.shape[1] > 1:
        scales = scales[:, torch.arange(columns.start, columns.stop) // width]
    numbers = codes.float()
    if height == 1:
        return numbers.mul_(scales[rows.start : rows.stop])
    # One row of blocks at a time, so that scales are not expanded to one for each number.
    for block in range(rows.start // height, -(-rows.stop // height)):
        numbers[max(0, block * height - rows.start) : (block + 1) * height - rows.start].mul_(scales[block])
    return numbers


def save_quantized(
    folder: Path,
    family: Family,
    config: ModelConfig,
    quantization: Quantization,
    target: Path,
    progress: bool = True,
    *,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Write the checkpoint in `folder` to the new folder `target`, with quantized matrices. Returns bytes of weights.

    One tensor is read at a time, and the tensors of one output file are in memory. Keys of `overrides` replace those of
    `config.json`, and `defaults` are written as `remask.json`; None: an existing one is copied. Raises `ConfigError` if
    `target` exists and is not an empty folder, or the checkpoint is quantized or a GGUF file, `CheckpointError` if a
    file cannot be read, and `OSError` if one cannot be written.
    """
    if is_gguf(folder):
        raise ConfigError(
            f"the model {str(folder)!r} is a GGUF file, and 'remask quantize' takes a folder of safetensors: load the "
            "file itself with --quantization"
        )
    if stored_quantization(folder) is not None:
        raise ConfigError(f"the model in {folder} is quantized already")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output: {str(target)!r} exists and is not an empty folder; name another one")
    target.mkdir(parents=True, exist_ok=True)
    matrices = {slot.name for slot in family.tensors(config) if slot.field in MATRICES}
    weight_bytes = _write_weights(folder, target, quantization, matrices, progress=progress)
    settings = {"quant_method": METHOD, VERSION: 1, "kind": quantization}
    raw = read_json(folder / CONFIG) | dict(overrides or {}) | {KEY: settings}
    (target / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    new_names = {*(file.name for file in weight_files(folder)), INDEX, CONFIG}
    for file in folder.iterdir():
        if file.is_file() and file.name not in new_names and file.suffix in (".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, target / file.name)
    if config.drafter is not None and (folder / config.drafter).is_dir():
        shutil.copytree(folder / config.drafter, target / config.drafter)
    if defaults is not None:
        (target / DEFAULTS_FILE).write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    return weight_bytes


def _write_weights(
    folder: Path, target: Path, quantization: Quantization, matrices: Collection[str], *, progress: bool
) -> int:
    """Write the tensors of `folder`, those named in `matrices` quantized, and their index. Returns their bytes."""
    locations = join_codes(folder, tensor_locations(folder))
    total = sum(prod(location.shape) for location in locations.values())
    index = dict[str, str]()
    shard = dict[str, Tensor]()
    weight_bytes = shard_number = 0
    with Progress("quantizing", total, "weight", enabled=progress, scale=True) as bar:
        for name, tensor in _read_tensors(folder, locations):
            shard.update(_encoded_tensors(name, tensor, quantization if name in matrices else None))
            bar.update(tensor.numel())
            if sum(content.nbytes for content in shard.values()) > SHARD_BYTES:
                weight_bytes += _write_shard(target, shard, index, shard_number)
                shard_number += 1
                shard = {}
    weight_bytes += _write_shard(target, shard, index, shard_number)
    metadata = {"total_size": weight_bytes}
    (target / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": index}), encoding="utf-8")
    return weight_bytes


def _read_tensors(folder: Path, locations: Mapping[str, TensorLocation]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and numbers of all tensors, file by file. Raises `CheckpointError` while it is iterated."""
    for path in weight_files(folder):
        with open_weight_file(path) as file:
            for name, location in locations.items():
                if location.file == path:
                    yield name, read_numbers(file, name, location)


def _encoded_tensors(name: str, tensor: Tensor, quantization: Quantization | None) -> dict[str, Tensor]:
    """The tensors to store for `tensor`, a matrix [M, K], or one of each expert [E, M, K], by name."""
    if quantization is None:
        return {name: tensor}
    codes = encode(quantization, tensor.flatten(0, -2))
    rows = tensor.shape[:-1]
    values = codes.values
    packed = values[:, ::2] | (values[:, 1::2] << 4) if quantization == "int4" else values
    parts = {"": packed, SCALE: codes.scales, ZERO: codes.zeros}
    return {name + end: part.view(*rows, *part.shape[1:]) for end, part in parts.items() if part is not None}


def _write_shard(target: Path, shard: dict[str, Tensor], index: dict[str, str], number: int) -> int:
    """Write a weight file, and enter its tensors into `index`. Returns its bytes of weights. Raises `OSError`."""
    file = f"model-{number + 1:05d}.safetensors"
    try:
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, target / file)
    except SafetensorError as error:  # such as on a full disk
        raise OSError(f"{target / file}: {error}") from error
    index |= dict.fromkeys(shard, file)
    return sum(tensor.nbytes for tensor in shard.values())


def _unpack_int4(packed: Tensor) -> Tensor:
    """Codes of int4 from bytes [..., K / 2]: [..., K], the lower half of each byte first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _divide_slice(columns: slice, divisor: int) -> slice:
    return slice(*(None if bound is None else bound // divisor for bound in (columns.start, columns.stop)))

"""Checkpoints in fp8 that other programs wrote: which scale belongs to which numbers, and the numbers they stand for.

`quantization_config` in `config.json` says how they are written, as vLLM reads it: `fp8` (DeepSeek, transformers; a
scale for each tensor, or each block of `weight_block_size`) and `compressed-tensors` (`float-quantized`; a scale for
each tensor, row or block). A number is its code (e4m3) times its scale, also where that is called `_scale_inv`. Scales
of activations and of K/V are not read: both stay in the model's dtype.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from remask.checkpoint.files import CONVERTED, Scales, TensorLocation, listed
from remask.checks.values import is_whole
from remask.errors import CheckpointError
from remask.families.fields import Fields

KEY = "quantization_config"
CODES = "F8_E4M3"
_SCALES = (*CONVERTED, "F8_E8M0")
_UNREAD = re.compile(r".*\.(input|output|activation|[qkv]|kv_cache)_scale(_inv)?")
# What others call themselves in `quant_method`, and names of tensors that only their files hold.
_OTHERS = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "gptqmodel": "GPTQ", "auto-round": "AutoRound"}
_SIGNS = {".g_idx": "GPTQ", ".qweight": "GPTQ or AWQ", ".SCB": "bitsandbytes", ".quant_map": "bitsandbytes"}


@dataclass(frozen=True, slots=True)
class Convention:
    """How the scales of fp8 tensors are written.

    Attributes:
        endings: what follows the tensor's name in that of its scale.
        block: rows and columns that have a scale of their own; None: all of them have one.
    """

    endings: tuple[str, ...]
    block: tuple[int | None, int | None]


def convention(folder: Path, asked: Mapping[str, Any]) -> Convention:
    """How the scales in `folder` are written, by the object `quantization_config`.

    Raises `CheckpointError` where this is no fp8, or fp8 in a way that is not known here; the message names the program
    that quantised it, and the way out.
    """
    fields = Fields(f"{KEY!r} in {folder / 'config.json'}", asked)
    method = fields.get("quant_method")
    if method == "fp8":
        fields.only("fmt", "e4m3", optional=True)
        blocks = fields.get("weight_block_size") is not None
        block = _block(fields, "weight_block_size") if blocks else (None, None)
        return Convention(("_scale_inv",) if blocks else ("_scale_inv", "_scale"), block)
    if method == "compressed-tensors":
        return Convention(("_scale",), _compressed(fields))
    named = "a program that it does not name" if method is None else str(method)
    raise foreign(folder, _OTHERS.get(named.casefold(), named), asked)


def foreign(folder: Path, program: str, found: object) -> CheckpointError:
    """The error for a model that another program has quantised. `found` is what says so."""
    return CheckpointError(
        f"The model in {folder} is quantised by {program} ({json.dumps(found)[:200]}), and its files cannot be read "
        "here. Load the model that it was made of, with --quantization int4 or int8 on a CPU, or a GGUF file or an fp8 "
        "folder of it."
    )


def refuse_foreign(folder: Path, names: Mapping[str, TensorLocation]) -> None:
    """Raise `CheckpointError` on tensors that only another program's quantised files hold."""
    for ending, program in _SIGNS.items():
        named = next((name for name in names if name.endswith(ending)), None)
        if named is not None:
            raise foreign(folder, program, named)


def _compressed(fields: Fields) -> tuple[int | None, int | None]:
    """The block of compressed-tensors' weights, which all groups of layers have in common."""
    for key in ("sparsity_config", "transform_config"):  # neither changes anything where it is empty
        if fields.get(key):
            raise fields.unfit(key, "null or {}")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.unfit("config_groups", "an object of groups of layers")
    found = set[tuple[int | None, int | None]]()
    for name, group in groups.items():
        kind = group.get("format") if isinstance(group, Mapping) else None
        if (kind or fields.get("format")) not in ("float-quantized", "naive-quantized"):
            raise fields.unfit("format", '"float-quantized", which is fp8')
        own = group.get("weights")
        weights = Fields(f"{name}, 'weights'", own if isinstance(own, Mapping) else {})
        for key, value in {"num_bits": 8, "type": "float"}.items():
            weights.only(key, value)
        weights.only("symmetric", True, optional=True)
        weights.only("dynamic", False, optional=True)
        match weights.get("strategy"):
            case "tensor":
                found.add((None, None))
            case "channel":
                found.add((1, None))
            case "block":
                found.add(_block(weights, "block_structure"))
            case _:
                raise weights.unfit("strategy", '"tensor", "channel" or "block"')
    if len(found) > 1:
        raise fields.unfit("config_groups", "groups of layers whose weights have one strategy")
    return found.pop()


def _block(fields: Fields, key: str) -> tuple[int, int]:
    block = fields.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(is_whole(each, 1) for each in block):
        raise fields.unfit(key, "two positive integers, rows and columns of a block")
    return block[0], block[1]


def with_scales(folder: Path, how: Convention, found: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The tensors of a checkpoint, each with its scales, which are no tensors of their own then.

    Raises `CheckpointError`, listing them, where a tensor of codes has no scale, or one that is not as `how` says.
    """
    whole, faults, used = dict[str, TensorLocation](), list[str](), set[str]()
    for name, place in found.items():
        beside = [name + end for end in how.endings if name + end in found]
        used.update(beside)
        if place.dtype != CODES:
            whole[name] = place
            faults += [f"{each} is the scale of {name}, which is {place.dtype}" for each in beside]
            continue
        if len(beside) != 1 or len(place.shape) != 2:
            among = " or ".join(name + end for end in how.endings)
            faults.append(f"{name} {list(place.shape)} has {len(beside) or 'no'} scales; supported: one, {among}")
            continue
        scale = found[beside[0]]
        block = how.block[0] or place.shape[0], how.block[1] or place.shape[1]
        grid = _grid(place.shape, block)
        if [size for size in scale.shape if size > 1] != [size for size in grid if size > 1]:
            faults.append(f"{beside[0]} is {list(scale.shape)}, {KEY} asks for {list(grid)}")
        if scale.dtype not in _SCALES:
            faults.append(f"{beside[0]} is {scale.dtype}; supported: {', '.join(_SCALES)}")
        whole[name] = replace(place, packed=1.0, scales=Scales(beside[0], scale.file, block))
    if faults:
        raise CheckpointError(
            f"The fp8 tensors in {folder} are not scaled as {KEY} in its config.json says: "
            f"{listed(faults)}. Use the config.json that belongs to these weights, or download them "
            "again."
        )
    return {name: place for name, place in whole.items() if name not in used and not _UNREAD.fullmatch(name)}


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def read_numbers(file: Any, name: str, place: TensorLocation, part: tuple[slice, ...] | None = None) -> Tensor:
    """What `part` takes of a tensor in an open safetensors file, times its scales, in float32, where it has some."""
    codes: Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
    if place.scales is None:
        return codes
    if place.scales.file == place.file:
        scales = file.get_tensor(place.scales.name)
    else:
        with safe_open(place.scales.file, framework="pt") as other:
            scales = other.get_tensor(place.scales.name)
    height, width = place.scales.block
    scales = scales.float().reshape(_grid(place.shape, place.scales.block))
    every = part or ()
    rows, columns = (
        range(size)[every[axis] if axis < len(every) else slice(None)] for axis, size in enumerate(place.shape)
    )
    if scales.shape[1] > 1:
        scales = scales[:, torch.arange(columns.start, columns.stop) // width]
    numbers = codes.float()
    if height == 1:
        return numbers.mul_(scales[rows.start : rows.stop])
    # A row of blocks at a time, so that no scale stands in memory once for each number.
    for block in range(rows.start // height, -(-rows.stop // height)):
        numbers[max(0, block * height - rows.start) : (block + 1) * height - rows.start].mul_(scales[block])
    return numbers

"""Tensors of a GGUF file, read and unpacked a few rows at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from torch import Tensor

from remask.checkpoint.files import TensorLocation
from remask.checkpoint.gguf_header import MAX_TENSORS, Header, StoredTensor, read_header
from remask.checkpoint.gguf_model import EXPERT, factors_tensor, interleaved_heads
from remask.checkpoint.quantized_files import groups_of
from remask.checks import Quantization
from remask.errors import CheckpointError
from remask.families.fields import EXPERTS
from remask.model.quantized import Codes
from remask.model.sizes import GROUP

_UNPACKED_AT_ONCE = 2**22  # numbers; unpacking takes several times their memory
_STACKED = "_exps.weight"
# Types whose numbers PyTorch has.
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types whose blocks of four bits are those of our int4: a step and an offset for each 32 columns.
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")


@dataclass(frozen=True, slots=True)
class _View:
    """The tensor of one of our names: some rows of a tensor in a file."""

    stored: StoredTensor
    shape: tuple[int, ...]
    first_row: int = 0  # of `stored`


def locate(path: Path) -> dict[str, TensorLocation]:
    """Every weight of a GGUF file, each expert's by its own name. Raises `CheckpointError` if it cannot be read."""
    header = read_header(path)
    scaling = factors_tensor(header)
    locations = dict[str, TensorLocation]()
    for name, view in _views(header).items():
        if view.stored is not scaling:
            ggml_type = view.stored.ggml_type
            block_length, block_bytes = GGML_QUANT_SIZES[ggml_type]
            number_bytes = block_bytes / block_length if _can_unpack(ggml_type) else None
            locations[name] = TensorLocation(path, view.shape, ggml_type.name, number_bytes=number_bytes)
    return locations


@cache
def _can_unpack(ggml_type: GGMLQuantizationType) -> bool:
    """Whether numbers of `ggml_type` can be read: the `gguf` package has types that it cannot unpack."""
    try:
        if ggml_type.name not in _PLAIN:
            _unpack(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _views(header: Header) -> dict[str, _View]:
    """The tensors of a file by our names. Raises `CheckpointError` if there are more than `MAX_TENSORS`."""
    views: dict[str, _View] = {}
    for name, stored in header.tensors.items():
        if name.endswith(_STACKED) and len(stored.shape) == 3 and stored.shape[0] <= EXPERTS:
            if len(views) + stored.shape[0] > MAX_TENSORS:  # a short header may describe any number of them
                raise CheckpointError(
                    f"{header.file} has {name!r} {list(stored.shape)}, with which it holds more than {MAX_TENSORS} "
                    "tensors (each expert has its own); supported: at most so many."
                )
            prefix, _, projection = name.removesuffix(".weight").rpartition(".")
            for expert in range(stored.shape[0]):
                matrix = f"{prefix}.{EXPERT.format(expert)}{projection}.weight"
                views[matrix] = _View(stored, stored.shape[1:], expert * stored.shape[1])
        else:
            views[name] = _View(stored, stored.shape)
    return views


class OpenGGUF:
    """An open GGUF file, as the loader reads tensors from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = read_header(path)
        self._views: Mapping[str, _View] = _views(self._header)

    def __enter__(self) -> "OpenGGUF":
        self._file = self._path.open("rb", buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def read(self, name: str, part: tuple[slice, ...] | None, kind: Quantization | None) -> Tensor | Codes:
        """`part` of a tensor: its codes if matrices of `kind` can store them, otherwise its numbers.

        Rows of Q and K are in the half-split order of the transformer. Raises `CheckpointError` if the file has become
        shorter, or a group of codes would be cut.
        """
        view = self._views[name]
        cut = part or (slice(None),)
        heads = interleaved_heads(self._header, name)
        if len(view.shape) == 1:
            values = self._plain(view, self._bytes(view, slice(0, 1)), 1).flatten()
            return (values if heads is None else values.view(heads, -1, 2).mT.flatten())[cut[0]]
        columns = cut[1] if len(cut) == 2 else slice(None)
        start, stop, _ = cut[0].indices(view.shape[0])
        if heads is None:
            raw = self._bytes(view, slice(start, stop))
        else:
            # Rows are reordered as bytes, before they are unpacked.
            matrix = self._bytes(view, slice(0, view.shape[0]))
            raw = matrix.reshape(heads, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)[start:stop]
        type_name = view.stored.ggml_type.name
        if kind == "int4" and type_name in _FOUR_BITS:
            codes, groups = _codes(raw, type_name), groups_of(name, columns)
            assert codes.zeros is not None
            return Codes(codes.values[:, columns], codes.scales[:, groups], codes.zeros[:, groups])
        return self._plain(view, raw, stop - start)[:, columns]

    def _bytes(self, view: _View, rows: slice) -> NDArray[np.uint8]:
        """The bytes of some rows of a tensor [rows, bytes of a row]; a vector is one row."""
        tensor = view.stored
        width = tensor.nbytes // (prod(tensor.shape) // tensor.shape[-1])
        count = rows.stop - rows.start
        self._file.seek(tensor.offset + (view.first_row + rows.start) * width)
        raw = np.fromfile(self._file, np.uint8, count * width)
        if len(raw) != count * width:
            raise CheckpointError(f"{self._path} cannot be read: it has become shorter while it was. Copy it again.")
        return raw.reshape(count, width)

    def _plain(self, view: _View, raw: NDArray[np.uint8], row_count: int) -> Tensor:
        """The numbers of the `raw` bytes of `row_count` rows."""
        ggml_type = view.stored.ggml_type
        columns = view.shape[-1]
        if ggml_type.name in _PLAIN:
            return torch.from_numpy(np.ascontiguousarray(raw)).view(_PLAIN[ggml_type.name]).view(row_count, columns)
        out = torch.empty((row_count, columns))
        batch = max(1, _UNPACKED_AT_ONCE // columns)  # rows
        for first in range(0, row_count, batch):
            out[first : first + batch] = _unpack(raw[first : first + batch], ggml_type)
        return out


def _unpack(raw: NDArray[np.uint8], ggml_type: GGMLQuantizationType) -> Tensor:
    """The numbers of rows of bytes, float32. Raises `NotImplementedError` if the package cannot unpack the type."""
    # Scales may be any bits; the check of weights finds numbers that are not finite.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(np.ascontiguousarray(raw), ggml_type))


def _codes(raw: NDArray[np.uint8], type_name: str) -> Codes:
    """The codes of rows of Q4_0, d (q - 8), of Q4_1, d q + m, or of Q4_K (see `_q4_k_codes`)."""
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    blocks = torch.from_numpy(np.ascontiguousarray(raw)).view(len(raw), -1, block_bytes)
    least: Tensor | None = None
    if type_name == "Q4_K":
        values, steps, least = _q4_k_codes(blocks)
    else:
        first_code = block_bytes - GROUP // 2
        constants = blocks[..., :first_code].contiguous().view(torch.float16).float()
        packed = blocks[..., first_code:]
        values = torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)
        steps = constants[..., 0]
        if type_name == "Q4_1":
            least = constants[..., 1]
    return Codes(values, steps, torch.zeros_like(steps) if least is None else least + 8 * steps)


def _q4_k_codes(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of Q4_K, and step and least number of each 32 columns, from `blocks` [rows, blocks, bytes].

    A block of 256 columns has two units: its eight steps are multiples of the first, its eight least numbers multiples
    of the second. The multiples have six bits each, in twelve bytes: bytes 0-3 hold the first four steps, bytes 4-7 the
    first four least numbers, bytes 8-11 the low four bits of the other steps and, above them, of the other least
    numbers. The high two bits of the others are those of bytes 0-3 and 4-7.
    """
    units = blocks[..., :4].contiguous().view(torch.float16).float()
    first_steps, first_least, low_bits = torch.split(blocks[..., 4:16], 4, dim=-1)
    steps = torch.cat((first_steps & 63, (low_bits & 15) | ((first_steps >> 2) & 48)), dim=-1)
    least = torch.cat((first_least & 63, (low_bits >> 4) | ((first_least >> 2) & 48)), dim=-1)
    # Each 32 bytes hold 32 columns in their low bits, and the next 32 in their high ones.
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], 4, GROUP)
    values = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(1)
    return values, (units[..., :1] * steps).flatten(1), (-units[..., 1:] * least).flatten(1)

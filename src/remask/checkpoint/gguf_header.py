"""The header of a GGUF file: its keys, and where each tensor is. Every count is checked before it is used.

The `gguf` package's own reader checks nothing: it makes an array of each item of a vocabulary, which takes seconds and
hundreds of megabytes, and raises any of NumPy's errors on hostile files. Types of tensors are the package's, which is
imported only when a file is read.

The layout is that of the GGUF specification, versions 2 and 3, in little-endian order: magic, version, number of
tensors, number of keys, the keys with their values, the tensors' descriptions, padding, the tensors' bytes.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from remask.checks.values import shown
from remask.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
# Far above what any published file has.
MAX_KEYS, MAX_TENSORS, MAX_NAME, MAX_DIMENSIONS = 2**12, 2**17, 2**8, 4
MAX_ITEMS = 2**21  # of one array, such as tokens and merges
MAX_HEADER = 2**26  # bytes; its texts are kept
MAX_ALIGNMENT = 2**20

_MIN_HEADER = 24  # bytes of magic, version and two counts
_DEFAULT_ALIGNMENT = 32  # bytes, by the specification

_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL, _FLOAT = 8, 9, 7, 6
# Formats of `struct` by the number of a value's type, except for arrays and texts.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class List:
    """An array in a file, which `Header.items` reads."""

    item_type: int  # number of the type of its items
    count: int  # number of items
    offset: int  # of the first item


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]  # the outermost dimension first (the file has them in reverse order)
    ggml_type: "GGMLQuantizationType"
    offset: int  # of its first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The part of a file before its tensors."""

    file: Path
    values: Mapping[str, Any]  # values by key: a number, a text, true or false, or a `List`
    tensors: Mapping[str, StoredTensor]
    start: int  # offset of the first byte of tensors

    def items(self, key: str) -> list[Any] | None:
        """The items of the array `key`; None if it is absent. Raises `CheckpointError` if it is not an array."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, List):
            raise CheckpointError(f"{self.file}: {key!r} is {shown(value)}; supported: an array.")
        try:
            with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(self.file, data, value.offset)
                if value.item_type == _STRING:
                    return reader.texts(value.count, key)
                content = reader.take(value.count * _width(value.item_type), key)
                return list(struct.unpack(f"<{value.count}{_SCALARS[value.item_type]}", content))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}.") from error


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file by its name, as a damaged file has no other sign."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_header(path: Path) -> Header:
    """The header of the GGUF file `path`, cached until the file changes.

    Raises `CheckpointError` if it is not a supported GGUF file, is truncated, or has impossible values.
    """
    try:
        state = os.stat(path)
        return _read_header(path, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


@lru_cache(maxsize=4)  # it is read many times, and skipping a vocabulary takes 0.05 seconds
def _read_header(path: Path, size: int, _modified_ns: int) -> Header:
    if size < _MIN_HEADER:
        reason = f"it has {size} bytes, and the shortest header has {_MIN_HEADER}"
        raise CheckpointError(f"{path} is not a GGUF file: {reason}.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse_header(_Reader(path, data, 0))


class _Description(NamedTuple):
    """What a header says of a tensor, unchecked."""

    shape: tuple[int, ...]
    type_number: int
    offset: int  # from the first byte of tensors


class _Reader:
    """Reads a file from byte `position` on. Methods raise `CheckpointError` at its end; the message names `subject`."""

    def __init__(self, path: Path, data: mmap.mmap, position: int) -> None:
        self.path = path
        self.data = data
        self.position = position

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path} cannot be read as GGUF: {reason}. Download it again, or convert it again.")

    def take(self, count: int, subject: str) -> bytes:
        self.skip(count, subject)
        return self.data[self.position - count : self.position]

    def skip(self, count: int, subject: str) -> None:
        remaining = len(self.data) - self.position
        if count > remaining:
            self.fail(
                f"{subject} needs {count} bytes, and the file ends after {remaining} more: it is truncated or corrupt"
            )
        self.position += count
        if self.position > MAX_HEADER:
            self.fail(f"{subject} reaches beyond byte {MAX_HEADER}; supported: headers of up to so many bytes")

    def skip_texts(self, count: int, subject: str) -> None:
        """Skip `count` consecutive texts without decoding them."""
        position, end = self.position, min(len(self.data), MAX_HEADER)
        for _ in range(count):  # a vocabulary has some hundred thousand
            next_position = position + 8
            if next_position <= end:
                next_position += _LENGTH.unpack_from(self.data, position)[0]
            position = next_position
            if position > end:
                break
        self.skip(position - self.position, subject)

    def texts(self, count: int, subject: str) -> list[str]:
        """`count` consecutive texts, ten times faster than by `text`: a vocabulary has some hundred thousand."""
        start = self.position
        self.skip_texts(count, subject)
        content = self.data[start : self.position]
        texts = list[str]()
        position = 0
        for _ in range(count):
            next_position = position + 8 + _LENGTH.unpack_from(content, position)[0]
            try:
                texts.append(content[position + 8 : next_position].decode())
            except UnicodeDecodeError as error:
                self.fail(f"{subject} is not UTF-8 text ({error})")
            position = next_position
        return texts

    def scalar(self, form: str, subject: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), subject))[0]

    def length(self, subject: str, maximum: int) -> int:
        """Read the length of a text or array. Raises `CheckpointError` if it exceeds `maximum`."""
        count: int = self.scalar("Q", subject)
        if count > maximum:
            self.fail(f"{subject} is {count} long; supported: at most {maximum}")
        return count

    def text(self, subject: str, max_length: int) -> str:
        content = self.take(self.length(subject, max_length), subject)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{subject} is not UTF-8 text ({error})")


def _parse_header(reader: _Reader) -> Header:
    """Read a header from its first byte. Raises `CheckpointError` if it is malformed or describes what is not there."""
    magic, version = reader.take(4, "the magic"), reader.scalar("I", "the version")
    if magic != b"GGUF":
        raise CheckpointError(f"{reader.path} is not a GGUF file: it begins with {magic!r}, not with b'GGUF'.")
    if version not in (2, 3):
        order = " (it is written in big-endian order)" if version and not version & 0xFFFF else ""
        reader.fail(f"its version is {version}{order}; supported: 2 and 3, little-endian")
    tensor_count, key_count = (reader.scalar("Q", f"the number of {noun}") for noun in ("tensors", "keys"))
    for noun, count, maximum in (("tensors", tensor_count, MAX_TENSORS), ("keys", key_count, MAX_KEYS)):
        if count > maximum:
            reader.fail(f"its header counts {count} {noun}; supported: at most {maximum}")
    values = _read_values(reader, key_count)
    descriptions = _read_descriptions(reader, tensor_count)
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"'general.alignment' is {shown(alignment)}; supported: a power of two up to {MAX_ALIGNMENT}")
    start = -(-reader.position // alignment) * alignment
    tensors = {name: _tensor(reader, name, item, start, alignment) for name, item in descriptions.items()}
    return Header(reader.path, values, tensors, start)


def _read_values(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number in range(count):
        key = reader.text(f"the name of key {number + 1} of {count}", MAX_NAME)
        if key in values:
            reader.fail(f"the key {shown(key)} is there twice")
        values[key] = _read_value(reader, shown(key))
    return values


def _read_value(reader: _Reader, subject: str) -> Any:
    """Read the value of a key, whose type comes first. Of an array only the place is read, as a `List`."""
    value_type = reader.scalar("I", subject)
    if value_type == _STRING:
        return reader.text(subject, MAX_HEADER)
    if value_type != _ARRAY:
        return _read_scalar(reader, value_type, subject)
    item_type = reader.scalar("I", subject)
    count = reader.length(subject, MAX_ITEMS)
    array = List(item_type, count, offset=reader.position)
    if item_type == _STRING:
        reader.skip_texts(count, subject)
    elif item_type in _SCALARS:
        reader.skip(count * _width(item_type), subject)
    else:
        reader.fail(f"{subject} is an array of the kind {item_type}; supported: arrays of numbers, flags and texts")
    return array


def _read_scalar(reader: _Reader, value_type: int, subject: str) -> int | float | bool:
    if value_type not in _SCALARS:
        reader.fail(f"{subject} has a value of the kind {value_type}; supported: the kinds 0 to 12")
    value = reader.scalar(_SCALARS[value_type], subject)
    if value_type == _BOOL:
        return bool(value)
    # The shortest decimal number of the float32, so that 1e-5 is 1e-5 as in config.json.
    return float(str(np.float32(value))) if value_type == _FLOAT else value


def _width(value_type: int) -> int:
    """Bytes of a number or flag of this type."""
    return struct.calcsize("<" + _SCALARS[value_type])


def _read_descriptions(reader: _Reader, count: int) -> dict[str, _Description]:
    """Read the descriptions of `count` tensors, by name. Raises `CheckpointError` if a name is there twice."""
    descriptions: dict[str, _Description] = {}
    for number in range(count):
        subject = f"the description of tensor {number + 1} of {count}"
        name = reader.text(subject, MAX_NAME)
        if name in descriptions:
            reader.fail(f"the tensor {shown(name)} is there twice")
        dimensions = reader.scalar("I", subject)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            reader.fail(f"the tensor {shown(name)} has {dimensions} dimensions; supported: 1 to {MAX_DIMENSIONS}")
        sizes = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions, subject))
        type_number, offset = reader.scalar("I", subject), reader.scalar("Q", subject)
        descriptions[name] = _Description(sizes[::-1], type_number, offset)
    return descriptions


def _tensor(reader: _Reader, name: str, description: _Description, start: int, alignment: int) -> StoredTensor:
    """Locate a tensor; those of the file begin at byte `start`. Raises `CheckpointError` if it cannot be there."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    shape, type_number, offset = description
    subject = f"the tensor {shown(name)} {list(shape)}"
    try:
        ggml_type = GGMLQuantizationType(type_number)
        block_length, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        reader.fail(f"{subject} has the type number {type_number}, which is unknown")
    if not all(shape):
        reader.fail(f"{subject} is empty")
    if shape[-1] % block_length:
        reader.fail(
            f"{subject} has rows of {shape[-1]} numbers; supported for {ggml_type.name}: multiples of {block_length}"
        )
    if offset % alignment:
        reader.fail(f"{subject} is at offset {offset}; supported: multiples of the alignment {alignment}")
    nbytes = prod(shape) // block_length * block_bytes
    end = start + offset + nbytes
    if end > len(reader.data):
        reader.fail(
            f"{subject} of type {ggml_type.name} ends at byte {end}, and the file has {len(reader.data)}: it is "
            "truncated or corrupt"
        )
    return StoredTensor(shape, ggml_type, start + offset, nbytes)

"""The header of a GGUF file: its keys, and where each tensor lies. Every count is checked before it is believed.

The `gguf` package's own reader believes the file: it makes an array of each item of a vocabulary, which takes seconds
and hundreds of megabytes, and on hostile files ends in whatever NumPy raises. Types are the package's. It is
imported where a file is read: everybody else starts without it.

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
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from remask.checks.values import SHOWN
from remask.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

SUFFIX = ".gguf"
# Far above what any published file has.
KEYS, TENSORS, NAME, DIMENSIONS = 2**12, 2**17, 2**8, 4
ITEMS = 2**21  # of one array, such as tokens and merges
HEADER = 2**26  # bytes; its texts are kept
ALIGNMENT = 2**20

_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL, _FLOAT = 8, 9, 7, 6
# How a value of each kind is written, by the kind's number; arrays and texts apart.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class List:
    """An array in a file, which `Header.items` reads: the kind of its items, how many, and where the first is."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]  # its sizes, the outermost first (the file writes them the other way round)
    kind: "GGMLQuantizationType"  # how its numbers are kept
    offset: int  # of its first byte in the file
    nbytes: int  # how many it has


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before its tensors."""

    file: Path
    values: Mapping[str, Any]  # each key's value: a number, a text, true or false, or a `List`
    tensors: Mapping[str, StoredTensor]
    start: int  # offset of the first byte of tensors

    def items(self, key: str) -> list[Any] | None:
        """The items of the array `key`; None where the key is absent. Raises `CheckpointError` where it is no array."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, List):
            raise CheckpointError(f"{self.file}: {key!r} is {_shown(value)}; supported: an array.")
        try:
            with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(self.file, data, value.offset)
                if value.kind == _STRING:
                    return reader.texts(value.count, key)
                content = reader.take(value.count * _width(value.kind), key)
                return list(struct.unpack(f"<{value.count}{_SCALARS[value.kind]}", content))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}.") from error


def is_gguf(path: Path) -> bool:
    """Whether `path` is taken for a GGUF file: by its name, as a damaged one has no other sign."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_header(path: Path) -> Header:
    """The header of the GGUF file `path`. It is kept until the file changes.

    Raises `CheckpointError` where it is no GGUF file of this kind, is truncated, or says what cannot be.
    """
    try:
        state = os.stat(path)
        return _read(path, state.st_size, state.st_mtime_ns)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


@lru_cache(maxsize=4)  # loading asks again and again, and to walk over a vocabulary takes a twentieth of a second
def _read(path: Path, size: int, _changed: int) -> Header:
    if size < 24:
        raise CheckpointError(f"{path} is no GGUF file: it has {size} bytes, and the shortest header has 24.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _header(_Reader(path, data, 0))


class _Reader:
    """Reads a file from a place on, and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path, self.data, self.at = path, data, at

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} cannot be read as GGUF: {what}. Download it again, or convert it again.")

    def take(self, count: int, what: str) -> bytes:
        self.skip(count, what)
        return self.data[self.at - count : self.at]

    def skip(self, count: int, what: str) -> None:
        left = len(self.data) - self.at
        if count > left:
            self.fail(f"{what} needs {count} bytes, and the file ends after {left} more: it is truncated or corrupt")
        self.at += count
        if self.at > HEADER:
            self.fail(f"{what} reaches beyond byte {HEADER}; supported: headers of up to so many bytes")

    def skip_texts(self, count: int, what: str) -> None:
        at, end = self.at, min(len(self.data), HEADER)
        for _ in range(count):  # a vocabulary has some hundred thousand
            following = at + 8
            if following <= end:
                following += _LENGTH.unpack_from(self.data, at)[0]
            at = following
            if at > end:
                break
        self.skip(at - self.at, what)

    def texts(self, count: int, what: str) -> list[str]:
        """Texts one behind the other, ten times faster than by `text`: a vocabulary has some hundred thousand."""
        start = self.at
        self.skip_texts(count, what)
        content, texts, at = self.data[start : self.at], list[str](), 0
        for _ in range(count):
            following = at + 8 + _LENGTH.unpack_from(content, at)[0]
            try:
                texts.append(content[at + 8 : following].decode())
            except UnicodeDecodeError as error:
                self.fail(f"{what} is no UTF-8 text ({error})")
            at = following
        return texts

    def scalar(self, form: str, what: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form), what))[0]

    def length(self, what: str, most: int) -> int:
        count: int = self.scalar("Q", what)
        if count > most:
            self.fail(f"{what} is {count} long; supported: at most {most}")
        return count

    def text(self, what: str, most: int) -> str:
        content = self.take(self.length(what, most), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is no UTF-8 text ({error})")


def _header(reader: _Reader) -> Header:
    magic, version = reader.take(4, "the magic"), reader.scalar("I", "the version")
    if magic != b"GGUF":
        raise CheckpointError(f"{reader.path} is no GGUF file: it begins with {magic!r}, not with b'GGUF'.")
    if version not in (2, 3):
        order = " (it is written in big-endian order)" if version and not version & 0xFFFF else ""
        reader.fail(f"its version is {version}{order}; supported: 2 and 3, little-endian")
    tensors, keys = reader.scalar("Q", "the number of tensors"), reader.scalar("Q", "the number of keys")
    for what, count, most in (("tensors", tensors, TENSORS), ("keys", keys, KEYS)):
        if count > most:
            reader.fail(f"it says that it has {count} {what}; supported: at most {most}")
    values = _values(reader, keys)
    descriptions = _descriptions(reader, tensors)
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"'general.alignment' is {_shown(alignment)}; supported: a power of two up to {ALIGNMENT}")
    start = -(-reader.at // alignment) * alignment
    stored = {name: _tensor(reader, name, start, alignment, *parts) for name, parts in descriptions.items()}
    return Header(reader.path, values, stored, start)


def _values(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number in range(count):
        key = reader.text(f"the name of key {number + 1} of {count}", NAME)
        if key in values:
            reader.fail(f"the key {_shown(key)} is there twice")
        values[key] = _value(reader, _shown(key))
    return values


def _value(reader: _Reader, what: str) -> Any:
    kind = reader.scalar("I", what)
    if kind == _STRING:
        return reader.text(what, HEADER)
    if kind != _ARRAY:
        return _scalar(reader, kind, what)
    inner = reader.scalar("I", what)
    count, offset = reader.length(what, ITEMS), reader.at
    if inner == _STRING:
        reader.skip_texts(count, what)
    elif inner in _SCALARS:
        reader.skip(count * _width(inner), what)
    else:
        reader.fail(f"{what} is an array of the kind {inner}; supported: arrays of numbers, flags and texts")
    return List(inner, count, offset)


def _scalar(reader: _Reader, kind: int, what: str) -> int | float | bool:
    if kind not in _SCALARS:
        reader.fail(f"{what} has a value of the kind {kind}; supported: the kinds 0 to 12")
    value = reader.scalar(_SCALARS[kind], what)
    if kind == _BOOL:
        return bool(value)
    # What was written as 1e-5 is to be 1e-5, as in config.json, not the float32 beside it.
    return float(str(np.float32(value))) if kind == _FLOAT else value


def _width(kind: int) -> int:
    return struct.calcsize("<" + _SCALARS[kind])


def _descriptions(reader: _Reader, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Shape, kind and offset of each tensor, as the file says them."""
    descriptions: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for number in range(count):
        what = f"the description of tensor {number + 1} of {count}"
        name = reader.text(what, NAME)
        if name in descriptions:
            reader.fail(f"the tensor {_shown(name)} is there twice")
        dimensions = reader.scalar("I", what)
        if not 1 <= dimensions <= DIMENSIONS:
            reader.fail(f"the tensor {_shown(name)} has {dimensions} dimensions; supported: 1 to {DIMENSIONS}")
        sizes = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions, what))
        descriptions[name] = sizes[::-1], reader.scalar("I", what), reader.scalar("Q", what)
    return descriptions


def _tensor(
    reader: _Reader, name: str, start: int, alignment: int, shape: tuple[int, ...], number: int, offset: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    what, size = f"the tensor {_shown(name)} {list(shape)}", len(reader.data)
    try:
        kind = GGMLQuantizationType(number)
        block, width = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        reader.fail(f"{what} has a type of the number {number}, which is not known")
    if not all(shape):
        reader.fail(f"{what} is empty")
    if shape[-1] % block:
        reader.fail(f"{what} has rows that are no multiple of {block}, the block of {kind.name}")
    if offset % alignment:
        reader.fail(f"{what} is at offset {offset}; supported: multiples of the alignment {alignment}")
    nbytes = prod(shape) // block * width
    if start + offset + nbytes > size:
        reader.fail(
            f"{what} of type {kind.name} ends at byte {start + offset + nbytes}, and the file has {size}: it is "
            "truncated or corrupt"
        )
    return StoredTensor(shape, kind, start + offset, nbytes)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."

"""The identity of a model. Stored prefixes and depth tables belong to one."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import xxhash

from remask.checkpoint.files import weight_files
from remask.checkpoint.gguf_header import is_gguf, read_header
from remask.errors import CheckpointError
from remask.model.config import ModelConfig

_CHUNKS, _CHUNK_BYTES = 256, 4096  # number and size of the samples of a weight file
_LENGTH_BYTES = 8  # of the length of its header, with which a safetensors file begins


def fingerprint(
    config: ModelConfig, source: Path | int, quantization: str | None = None, changes: Sequence[str] = ()
) -> str:
    """Sixteen hexadecimal digits (xxhash64) that identify a model, whatever its dtype and device.

    `quantization` follows after a hyphen, as measurements of a model do not apply to its quantized weights.

    `source` is a checkpoint (a folder or a GGUF file), or the seed of dummy weights. The hash of a folder covers the
    bytes of `config.json`, and of each weight file its name, its size, its header (names, shapes, types and offsets)
    and a sample of its data: 256 chunks of 4 KiB, spread evenly from the first byte to the last. A file of up to 1 MiB
    is hashed as a whole. The path of the folder does not matter. Fine-tunes of a model have different hashes, as they
    differ nearly everywhere; a change of a few bytes in a large file can be missed. The hash of a GGUF file covers the
    same parts, but not its name; that of dummy weights covers configuration and seed. `changes` of a checkpoint, such
    as an adapter that is merged, are covered as well. Raises `CheckpointError` if a file cannot be read.
    """
    dummy_parts = b"dummy", repr(config).encode(), str(source).encode()
    parts = dummy_parts if isinstance(source, int) else _checkpoint_content(source)
    identity = digest(chain(parts, (change.encode() for change in changes)))
    return identity if quantization is None else f"{identity}-{quantization}"


def digest(parts: Iterable[bytes]) -> str:
    """Sixteen hexadecimal digits of `parts` in their order."""
    hasher = xxhash.xxh64()
    for part in parts:
        # The length comes first, so that different sequences of parts never give the same bytes.
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return str(hasher.hexdigest())


def _checkpoint_content(checkpoint: Path) -> Iterator[bytes]:
    """Yield the parts of a folder or GGUF file that are hashed. Raises `CheckpointError` while it is iterated."""
    try:
        if is_gguf(checkpoint):
            yield b"gguf"
            yield from _content(checkpoint, 0, read_header(checkpoint).start)
            return
        yield b"checkpoint"
        yield (checkpoint / "config.json").read_bytes()
        for file in weight_files(checkpoint):
            yield os.fsencode(file.name)  # also of a name that is not UTF-8
            yield from file_content(file)
    except OSError as error:
        raise CheckpointError(f"The model in {checkpoint} cannot be identified: {error}.") from error


def file_content(path: Path) -> Iterator[bytes]:
    """Yield the parts of a safetensors file that are hashed. Raises `CheckpointError` on the way if it is truncated."""
    with path.open("rb") as file:
        header_end = _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")
    yield from _content(path, _LENGTH_BYTES, header_end)


def _content(path: Path, header_start: int, header_end: int) -> Iterator[bytes]:
    """Yield the size of a file, the bytes of its header, and a sample of the bytes behind the header."""
    size = path.stat().st_size
    yield str(size).encode()
    if header_end > size:
        raise CheckpointError(f"{path} is truncated: its header alone has {header_end} bytes, the file {size}.")
    with path.open("rb") as file:
        file.seek(header_start)
        yield file.read(header_end - header_start)
        if size - header_end <= _CHUNKS * _CHUNK_BYTES:
            yield file.read()
            return
        span = size - header_end - _CHUNK_BYTES  # from the start of the first chunk to that of the last one
        for chunk in range(_CHUNKS):
            file.seek(header_end + span * chunk // (_CHUNKS - 1))
            yield file.read(_CHUNK_BYTES)

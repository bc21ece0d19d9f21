"""A cache of weights that take long to make, merged with an adapter or quantized, for the next start.

They are one safetensors file in the cache folder, `weights/FINGERPRINT-DTYPE.safetensors`, with every tensor, those of
quantized matrices independent of the kernel. The file is used if it is intact, and was made of the same files by the
same code; otherwise it is written again.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from remask.checkpoint.fingerprint import digest
from remask.errors import CheckpointError, RemaskError
from remask.machine.device import dtype_name
from remask.machine.disk import cache_folder, whole_file
from remask.model.quantized import QuantizedMatrix
from remask.model.weights import Weights

log = logging.getLogger(__name__)

MIN_BYTES: Final = 20 * 2**20
"""The fewest bytes of weights that are cached: smaller ones are made quickly."""
MAX_BYTES: Final = 2**30
"""The most bytes of weights that are cached, so that the disk is not filled."""


class WeightCache:
    """The cached weights of one model in one dtype.

    Attributes:
        file: their path, which may not exist yet.
    """

    def __init__(self, identity: str, dtype: torch.dtype, sources: Iterable[Path]) -> None:
        """`identity` is the model's fingerprint, and `sources` are all files that its weights are made of.

        Sizes and times of these files are compared as well, as a fingerprint only samples large files.
        """
        self.file = cache_folder() / "weights" / f"{identity}-{dtype_name(dtype)}.safetensors"
        self._stamp = {"made_of": _digest_file_states(sources), "made_by": _code_digest()}

    def read(self, empty: Callable[[], Weights]) -> Weights | None:
        """The weights, copied into those of `empty`. Returns None if there are none; warns if they are damaged."""
        if not os.path.isfile(self.file):  # false also in a folder that this user may not enter
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                stamp = file.metadata() or {}
                if any(stamp.get(name) != value for name, value in self._stamp.items()):
                    log.debug("%s is of other files or of another version, and is written anew", self.file)
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if stamp.get("digest") != _digest(tensors):
                raise CheckpointError("its content is not what was written")
            weights = empty()
            _fill(weights, tensors)
        except (SafetensorError, OSError, RemaskError) as error:
            log.warning("%s is damaged, and is written anew: %s", self.file, error)
            return None
        return weights

    def write(self, weights: Weights) -> None:
        """Store `weights` if their size is within bounds. Logs a warning if they cannot be written."""
        if not MIN_BYTES <= weights.nbytes <= MAX_BYTES:
            return
        tensors = {name: tensor.contiguous() for name, tensor in _tensors_by_name(weights).items()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file("kept weights", self.file, CheckpointError) as draft:
                try:
                    save_file(tensors, draft, self._stamp | {"digest": _digest(tensors)})
                except SafetensorError as error:  # such as on a full disk
                    raise OSError(str(error)) from error
        except (RemaskError, OSError) as error:
            log.warning("the weights are not kept, so the next start makes them again: %s", error)
            return
        log.info("the weights are kept in %s (%d MB), which makes further starts fast", self.file, _megabytes(tensors))


@cache
def _code_digest() -> str:
    """A hash of the code that makes weights of a checkpoint, so that no other version reads them."""
    package = Path(__file__).parents[1]
    files = sorted(path for folder in ("checkpoint", "families", "model") for path in (package / folder).glob("*.py"))
    return digest(path.read_bytes() for path in files)


def _digest_file_states(paths: Iterable[Path]) -> str:
    """A hash of sizes and modification times of files."""
    states = (path.stat() for path in paths)
    return digest(f"{state.st_size} {state.st_mtime_ns}".encode() for state in states)


def _megabytes(tensors: Mapping[str, Tensor]) -> int:
    return round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6)


def _tensors_by_name(weights: Weights) -> dict[str, Tensor]:
    """Every tensor by name; a quantized matrix is several."""
    tensors = dict[str, Tensor]()
    for name, tensor in _weights_by_name(weights).items():
        if isinstance(tensor, QuantizedMatrix):
            tensors |= {f"{name}.{part}": content for part, content in tensor.parts().items()}
        else:
            tensors[name] = tensor
    return tensors


def _weights_by_name(weights: Weights) -> dict[str, Tensor]:
    """Every tensor, quantized matrices as one, by `LAYER.FIELD`, or by field if it is of no layer."""
    return {name if layer is None else f"{layer}.{name}": tensor for name, layer, tensor in weights.named_tensors()}


def _fill(weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into `weights`. Raises `CheckpointError` if their names, shapes or dtypes are not the same."""
    remaining = dict(tensors)
    for name, target in _weights_by_name(weights).items():
        if isinstance(target, QuantizedMatrix):
            parts = [key for key in remaining if key.startswith(f"{name}.")]
            target.restore({key.removeprefix(f"{name}."): remaining.pop(key) for key in parts})
            continue
        tensor = remaining.pop(name, None)
        if tensor is None or (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            raise CheckpointError(f"it has no {name!r} of shape {list(target.shape)} as {target.dtype}")
        target.copy_(tensor)
    if remaining:
        raise CheckpointError(f"it has {next(iter(remaining))!r} beside the model's tensors")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all bytes, and of names, dtypes and shapes."""
    hasher = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        content: Any = tensor.flatten().view(torch.uint8).numpy()
        hasher.update(content)
    return hasher.hexdigest()

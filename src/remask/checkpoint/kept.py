"""Weights that take long to make of their files, merged with an adapter or quantized, kept for the next start.

They are one safetensors file in the cache folder, `weights/FINGERPRINT-DTYPE.safetensors`, of every tensor as it stands
in memory, whatever kernel multiplies with it. It is read where it is whole, and was made of the very files that the
model was found in, by the code that would make it now; else it is written anew.
"""

import logging
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
from remask.machine.disk import cache_folder, whole_file
from remask.model.quantised import QuantisedMatrix
from remask.model.weights import Weights

log = logging.getLogger(__name__)

LEAST: Final = 20 * 2**20
"""Bytes of weights that are kept: smaller ones are made in less time than it takes to notice."""
MOST: Final = 2**30
"""Bytes of weights that are kept, at most: a disk that nobody asked for is not filled."""


class KeptWeights:
    """The kept weights of one model in one dtype.

    Attributes:
        file: where they are, or will be.
    """

    def __init__(self, identity: str, dtype: torch.dtype, sources: Iterable[Path]) -> None:
        """`identity` is the model's fingerprint, and `sources` are all files that its weights are made of.

        A fingerprint samples large files. So sizes and times of the files are compared as well.
        """
        name = str(dtype).removeprefix("torch.")
        self.file = cache_folder() / "weights" / f"{identity}-{name}.safetensors"
        self._stamp = {"made_of": _states(sources), "made_by": _code()}

    def read(self, empty: Callable[[], Weights]) -> Weights | None:
        """The weights, in the place that `empty` makes for them; None where they have to be made.

        A file that is damaged is named in a warning.
        """
        if not self.file.is_file():
            return None
        try:
            with safe_open(self.file, framework="pt") as file:
                stamp = file.metadata() or {}
                if any(stamp.get(name) != value for name, value in self._stamp.items()):
                    log.debug("%s is of other files or of another version, and is written anew", self.file)
                    return None
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if stamp.get("digest") != _digest(found):
                raise CheckpointError("its content is not what was written")
            weights = empty()
            _fill(weights, found)
        except (SafetensorError, OSError, RemaskError) as error:
            log.warning("%s is damaged, and is written anew: %s", self.file, error)
            return None
        return weights

    def write(self, weights: Weights) -> None:
        """Keep `weights`, where they are worth it. A disk that is full is told in a warning."""
        if not LEAST <= weights.nbytes <= MOST:
            return
        held = {name: tensor.contiguous() for name, tensor in _named(weights).items()}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file("kept weights", self.file, CheckpointError) as draft:
                try:
                    save_file(held, draft, self._stamp | {"digest": _digest(held)})
                except SafetensorError as error:  # what it makes of a full disk
                    raise OSError(str(error)) from error
        except (RemaskError, OSError) as error:
            log.warning("the weights are not kept, so the next start makes them again: %s", error)
            return
        log.info("the weights are kept in %s (%d MB), which makes further starts fast", self.file, _megabytes(held))


@cache
def _code() -> str:
    """Identifies the code that decides what weights are made of a checkpoint, so that no other version reads them."""
    package = Path(__file__).parents[1]
    files = sorted(path for folder in ("checkpoint", "families", "model") for path in (package / folder).glob("*.py"))
    return digest(path.read_bytes() for path in files)


def _states(paths: Iterable[Path]) -> str:
    """Identifies files by their sizes and times."""
    states = (path.stat() for path in paths)
    return digest(f"{state.st_size} {state.st_mtime_ns}".encode() for state in states)


def _megabytes(held: Mapping[str, Tensor]) -> int:
    return round(sum(tensor.nbytes for tensor in held.values()) / 1e6)


def _named(weights: Weights) -> dict[str, Tensor]:
    """Every tensor by its name: those of a quantized matrix one by one."""
    found = dict[str, Tensor]()
    for name, tensor in _slots(weights).items():
        if isinstance(tensor, QuantisedMatrix):
            found |= {f"{name}.{part}": content for part, content in tensor.parts().items()}
        else:
            found[name] = tensor
    return found


def _slots(weights: Weights) -> dict[str, Tensor]:
    return {name if layer is None else f"{layer}.{name}": tensor for name, layer, tensor in weights.named_tensors()}


def _fill(weights: Weights, found: Mapping[str, Tensor]) -> None:
    """Copy what was `found` into its places. Raises `CheckpointError` where it is not what belongs there."""
    left = dict(found)
    for name, target in _slots(weights).items():
        if isinstance(target, QuantisedMatrix):
            parts = [key for key in left if key.startswith(f"{name}.")]
            target.restore({key.removeprefix(f"{name}."): left.pop(key) for key in parts})
        elif (tensor := left.pop(name, None)) is not None and (tensor.shape, tensor.dtype) == (
            target.shape,
            target.dtype,
        ):
            target.copy_(tensor)
        else:
            raise CheckpointError(f"it has no {name!r} of shape {list(target.shape)} as {target.dtype}")
    if left:
        raise CheckpointError(f"it has {next(iter(left))!r} beside the model's tensors")


def _digest(held: Mapping[str, Tensor]) -> str:
    """Identifies all bytes, and their names, types and shapes."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(held.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        content: Any = tensor.flatten().view(torch.uint8).numpy()
        found.update(content)
    return found.hexdigest()

"""The weight files of a safetensors checkpoint and their headers. No weight is read."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from remask.checkpoint.json_files import read_json
from remask.errors import CheckpointError
from remask.model.quantization_names import Quantization

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Bytes per element of the types that convert to any floating type without a scale.
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
CONVERTED = tuple(_BYTES)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The file that holds a tensor, with its shape and its dtype as safetensors headers spell it: F32, BF16, ...

    Of a quantized tensor these are the shape and the dtype of what it stands for, and `kind` says how.
    A GGUF file's types have the names that it gives them, and `packed` is the bytes of one number.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    kind: Quantization | None = None
    packed: float | None = None

    @property
    def item(self) -> float | None:
        """Bytes of a number in the file; None: of a type that does not convert to floating types."""
        return _BYTES.get(self.dtype) if self.packed is None else self.packed


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: the single one, or the shards that its index names, sorted by name.

    Raises:
        CheckpointError: there is neither, or the index is malformed or names files that do not exist.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return sorted({folder / shard for shard in _weight_map(folder).values()})


def tensor_locations(folder: Path) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint by name. Where two shards hold one name, the index decides.

    Raises:
        CheckpointError: as `weight_files`; or a file is truncated, corrupt or unreadable.
    """
    files = weight_files(folder)
    placed = {} if files == [folder / SINGLE] else _weight_map(folder)
    found: dict[str, TensorLocation] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                    if placed.get(name, file.name) == file.name:
                        piece = opened.get_slice(name)
                        found[name] = TensorLocation(file, tuple(piece.get_shape()), piece.get_dtype())
        except (SafetensorError, OSError) as error:
            raise unreadable(file, error) from error
    return found


def unreadable(file: Path, error: Exception) -> CheckpointError:
    """The error for a weight file that safetensors cannot read."""
    return CheckpointError(f"{file} cannot be read: {error}. It is truncated or corrupt: download or copy it again.")


def _weight_map(folder: Path) -> dict[str, str]:
    """The file name of each tensor's shard, from the index."""
    index = folder / INDEX
    if not index.is_file():
        held = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        raise CheckpointError(
            f"{folder} holds neither {SINGLE} nor {INDEX} (weight files there: {', '.join(held) or 'none'}). "
            "Only safetensors checkpoints load; convert others with save_pretrained(..., safe_serialization=True)."
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise CheckpointError(f"{index}: 'weight_map' must be an object of tensor names and file names.")
    # A name with a folder in it could lead anywhere on the disk.
    outside = sorted({shard for shard in shards.values() if Path(shard).name != shard})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(map(repr, outside))}.")
    absent = sorted({shard for shard in shards.values() if not (folder / shard).is_file()})
    if absent:
        raise CheckpointError(
            f"{index} names {len(absent)} of {len(set(shards.values()))} shards that are not in {folder}: "
            f"{', '.join(absent)}. The download is incomplete: fetch them again."
        )
    return shards

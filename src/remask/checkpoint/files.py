"""The files of a checkpoint: JSON objects, and the headers of weight files. No weight is read."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOMEM
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from remask.checkpoint.gguf_header import is_gguf, read_header
from remask.checkpoint.gguf_model import config_object
from remask.checks import Quantization
from remask.checks.values import is_whole
from remask.errors import CheckpointError, ConfigError
from remask.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from remask.families.family import OwnWords  # which imports PyTorch

log = logging.getLogger(__name__)

OWN, SAMPLING, OVERRIDES, CACHE, QUANTIZATION = "remask.json", "sampling", "hf_overrides", "cache", "quantization"
_KEYS = {SAMPLING: dict, OVERRIDES: dict, CACHE: str, QUANTIZATION: str}
CONFIG = "config.json"
VERSION = "version"  # of what remask writes into a checkpoint; files without one are of the first
_VERSION = 1


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `CheckpointError` where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist. A checkpoint folder in the Hugging Face layout holds it; check the path, "
            "or download the model again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). It may be truncated: download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__} where an object is expected.")
    return raw


def read_own(folder: Path) -> dict[str, Any]:
    """The object in a folder's `remask.json`: what suits the model where nothing is asked; empty where there is none.

    "sampling" and "hf_overrides" are objects, "cache" and "quantization" (on CPUs) names. Raises `CheckpointError` as
    `read_json`, and on another key or value.
    """
    path = folder / OWN
    if not path.is_file():
        return {}
    content = read_json(path)
    check_version(content.pop(VERSION, _VERSION), str(path))
    for key, value in content.items():
        if key not in _KEYS or not isinstance(value, _KEYS[key]):
            raise CheckpointError(
                f"{path}: {key!r} is {value!r}; it may hold {SAMPLING!r}, an object of sampling parameters, "
                f"{OVERRIDES!r}, one of keys of config.json, and the names {CACHE!r} and {QUANTIZATION!r}."
            )
    return content


def check_version(version: object, what: str) -> None:
    """Raise `CheckpointError` where `what`, which remask has written, is of a version that this program cannot read."""
    if version != _VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{what} is of version {version!r}, and this program reads {_VERSION}: use the remask that wrote it, or a "
            "newer one, or make it anew"
        )


def raw_config(checkpoint: Path) -> dict[str, Any]:
    """The object in `config.json`, or what it would be for a GGUF file. Raises `CheckpointError`."""
    return config_object(read_header(checkpoint)) if is_gguf(checkpoint) else read_json(checkpoint / CONFIG)


def tokenizer_mask(folder: Path) -> int | None:
    """The id of the `mask_token` that a folder's tokenizer names in any of its files; None where it names none.

    Raises `CheckpointError` as `read_json`, and where a file is malformed or none says which id the token has.
    """
    try:
        name, token = _named_mask(folder)
        if name is None:
            return None
    # Their objects are of any form: what they hold is not checked value by value.
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The tokenizer in {folder} cannot be asked for its mask_token: {type(error).__name__}: {error}. Download "
            "its files again."
        ) from error
    if not is_whole(token, 0):
        raise CheckpointError(
            f"The tokenizer in {folder} names {name!r} as its mask_token, and none of its files says which id that is; "
            "give it: --hf-overrides '{\"mask_token_id\": ID}' (hf_overrides)."
        )
    return token


def _named_mask(folder: Path) -> tuple[str | None, object]:
    """The text of that token, and its id; None where there is none."""

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    config, whole = content("tokenizer_config.json"), content("tokenizer.json")
    name = config.get("mask_token") or content("special_tokens_map.json").get("mask_token")
    name = name.get("content") if isinstance(name, dict) else name
    if name is None:
        return None, None
    added = [*(whole.get("added_tokens") or ())]
    added += [{"id": int(key), **token} for key, token in (config.get("added_tokens_decoder") or {}).items()]
    ids = [token.get("id") for token in added if token.get("content") == name]
    tables = [content("added_tokens.json"), content("vocab.json"), (whole.get("model") or {}).get("vocab")]
    ids += [table.get(name) for table in tables if isinstance(table, dict)]
    return name, next((number for number in ids if number is not None), None)


GENERATION = "generation_config.json"
# Of the Hugging Face file: our names of the fields that mean the same. The second apply where it says that it samples.
_ALWAYS: Mapping[str, str] = {"max_new_tokens": "max_tokens"}
_SAMPLED: Mapping[str, str] = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
# Keys that do not say which tokens are chosen.
_MECHANICS = {
    *("do_sample", "cache_config", "cache_implementation", "disable_compile", "return_dict_in_generate"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_commit_hash", "_from_model_config"),
}


def read_sampling(folder: Path, words: "OwnWords | None" = None) -> dict[str, Any]:
    """The defaults of the checkpoint in `folder`; empty where it gives none.

    `remask.json` holds them as an object `sampling` of declared sampling parameters. Without such a file they are what
    `generation_config.json` says in its own words: `max_new_tokens`, and with `do_sample` also `temperature`, `top_k`
    and `top_p`, and what it says in the `words` of the model's family; the rest of that file is for other libraries.
    What no file says is the family's choice. Raises `CheckpointError` on a value that is not allowed, too.
    """
    for name in (OWN, GENERATION):
        if (folder / name).is_file():
            sampling = dict(read_own(folder).get(SAMPLING, {})) if name == OWN else _generation(folder / name, words)
            try:
                SamplingParams.from_mapping(sampling)
            except ConfigError as error:
                raise CheckpointError(
                    f"{folder / name}: {error} Mend the file, or take it away to load the model without its defaults."
                ) from error
            return sampling
    return {}


def unfollowed(folder: Path, words: "OwnWords | None") -> list[str]:
    """Keys of `generation_config.json` that say how a checkpoint is decoded, and that `read_sampling` cannot follow.

    Empty where the model's family has no `words` of its own, or where `remask.json` is read in that file's place.
    Raises `CheckpointError` as `read_json`.
    """
    path = folder / GENERATION
    if words is None or (folder / OWN).is_file() or not path.is_file():
        return []
    content = read_json(path)
    known = _MECHANICS | _common(content).keys()
    return [key for key in words(content)[1] if key not in known]


def _generation(path: Path, words: "OwnWords | None") -> dict[str, Any]:
    content = read_json(path)
    sampling = {ours: content[theirs] for theirs, ours in _common(content).items() if content.get(theirs) is not None}
    if sampling.get("top_k") in (0, -1):  # all tokens, in the words of transformers and of vLLM
        del sampling["top_k"]
    return sampling if words is None else sampling | words(content)[0]


def _common(content: Mapping[str, Any]) -> dict[str, str]:
    """Our names of the keys of `content` that are followed whatever the family."""
    return {**_ALWAYS, **(_SAMPLED if content.get("do_sample") is True else {})}


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LISTED = 20  # faults, of which more are counted
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a number, of types that convert to any floating type
CONVERTED = tuple(_BYTES)


@dataclass(frozen=True, slots=True)
class Scales:
    """The tensor that holds what the numbers of another are multiplied with, one for each `block` of rows and columns.

    Blocks begin at the first row and column; those at the ends may be smaller.
    """

    name: str
    file: Path
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The file that holds a tensor, with its shape and its dtype as safetensors headers spell it: F32, BF16, ...

    Of a quantized tensor these are the shape and the dtype of what it stands for, and `kind` says how. A GGUF file's
    types have its names; `packed` is the bytes of one number, as it is of a tensor with `scales`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    kind: Quantization | None = None
    packed: float | None = None
    scales: Scales | None = None

    @property
    def item(self) -> float | None:
        """Bytes of a number in the file; None: of a type that does not convert to floating types."""
        return _BYTES.get(self.dtype) if self.packed is None else self.packed


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: the single one, or the shards that its index names, sorted by name.

    Raises `CheckpointError` where there is neither, or the index is malformed or names files that do not exist.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return sorted({folder / shard for shard in _weight_map(folder).values()})


def tensor_locations(folder: Path) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint by name. Says which file was read where a single one and an index are there.

    Raises `CheckpointError` as `weight_files`, and where a file cannot be read or the index contradicts the files.
    """
    files = weight_files(folder)
    index = {} if files == [folder / SINGLE] else _weight_map(folder)
    if not index and _indexes_others(folder):
        log.warning(
            "%s holds a whole model in %s, which is read, and %s of other files, which is not: take away the one that "
            "is not the model",
            *(folder, SINGLE, INDEX),
        )
    locations: dict[str, list[TensorLocation]] = {}
    for file in files:
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                piece = content.get_slice(name)
                location = TensorLocation(file, tuple(piece.get_shape()), piece.get_dtype())
                locations.setdefault(name, []).append(location)
    _check_index(folder, index, locations)
    return {name: location for name, (location,) in locations.items()}


def _indexes_others(folder: Path) -> bool:
    """Whether there is an index of other files than the single one."""
    try:
        return set(_weight_map(folder).values()) != {SINGLE}
    except CheckpointError:
        return (folder / INDEX).is_file()


def _check_index(folder: Path, index: Mapping[str, str], found: Mapping[str, Sequence[TensorLocation]]) -> None:
    """Raise `CheckpointError` where the index names a tensor's file wrongly, or shards hold one name more than once."""
    faults = []
    for name, shard in index.items():
        shards = [place.file.name for place in found.get(name, ())]
        if shard not in shards:
            faults.append(f"it has {name} in {shard}, and {' and '.join(shards) or 'no shard'} holds it")
    for name, places in found.items():
        if len(places) > 1:
            copies = " and ".join(f"{place.file.name} {list(place.shape)}" for place in places)
            faults.append(f"{name} stands in {copies}")
    if faults:
        raise CheckpointError(
            f"{folder / INDEX} and the shards that it names contradict each other: {listed(faults)}. They are of "
            "different models or downloads: fetch the index and the shards again."
        )


def listed(faults: Sequence[str]) -> str:
    """What is wrong, in one sentence; of many the first ones, and how many more there are."""
    rest = len(faults) - _LISTED
    return "; ".join(faults[:_LISTED]) + (f"; and {rest} more" if rest > 0 else "")


@contextmanager
def opened(path: Path, how: Callable[[Path], Any] | None = None) -> Iterator[Any]:
    """A weight file that `how` opens, or safetensors, while it is read. Raises `CheckpointError` on a failure."""
    try:
        with safe_open(path, framework="pt") if how is None else how(path) as file:
            yield file
    except (SafetensorError, OSError) as error:
        if getattr(error, "errno", None) == ENOMEM or "Cannot allocate memory" in str(error):
            raise MemoryError(str(error)) from error  # the file is sound
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is truncated or corrupt: download or copy it again."
        ) from error


def _weight_map(folder: Path) -> dict[str, str]:
    """The file name of each tensor's shard, from the index."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        raise CheckpointError(
            f"{folder} holds neither {SINGLE} nor {INDEX} (weight files there: {', '.join(files) or 'none'}). "
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

"""The files of a checkpoint: JSON objects, and the headers of weight files. No weight is read."""

import json
import logging
import os
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
    from remask.families.family import GenerationReader  # which imports PyTorch

log = logging.getLogger(__name__)

DEFAULTS_FILE = "remask.json"
SAMPLING, OVERRIDES, CACHE, QUANTIZATION = "sampling", "hf_overrides", "cache", "quantization"  # its keys
_KEYS = {SAMPLING: dict, OVERRIDES: dict, CACHE: str, QUANTIZATION: str}
CONFIG = "config.json"
VERSION = "version"  # key of the version of what remask writes into a checkpoint; without it the version is 1
_VERSION = 1


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `CheckpointError` if the file cannot be read or has another value."""
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


def read_model_defaults(folder: Path) -> dict[str, Any]:
    """The defaults for a model in its folder's `remask.json`. Returns an empty object if there is no such file.

    "sampling" and "hf_overrides" are objects, "cache" and "quantization" (on CPUs) names. Raises `CheckpointError` if
    the file cannot be read, or has another key or a value of another type.
    """
    path = folder / DEFAULTS_FILE
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


def check_version(version: object, subject: str) -> None:
    """Raise `CheckpointError` if this program cannot read the `version` of `subject`, which remask has written."""
    if version != _VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{subject} is of version {version!r}, and this program reads {_VERSION}: use the remask that wrote it, or "
            "a newer one, or make it anew"
        )


def raw_config(checkpoint: Path) -> dict[str, Any]:
    """The object in `config.json`, or the equivalent of a GGUF file. Raises `CheckpointError` if it cannot be read."""
    return config_object(read_header(checkpoint)) if is_gguf(checkpoint) else read_json(checkpoint / CONFIG)


def tokenizer_mask(folder: Path) -> int | None:
    """The id of the `mask_token` in the files of a folder's tokenizer. Returns None if they name none.

    Raises `CheckpointError` if a file is malformed, or if no file has the id of the token.
    """
    try:
        name, token = _mask_token(folder)
        if name is None:
            return None
    # The files' values are not checked one by one: wrong types end here.
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


def _mask_token(folder: Path) -> tuple[str | None, object]:
    """Text and id of the tokenizer's mask token, each None if no file has it. Malformed files raise any error."""

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    config, tokenizer = content("tokenizer_config.json"), content("tokenizer.json")
    mask = config.get("mask_token") or content("special_tokens_map.json").get("mask_token")
    name = mask.get("content") if isinstance(mask, dict) else mask
    if name is None:
        return None, None
    tokens = [*(tokenizer.get("added_tokens") or ())]
    tokens += [{"id": int(key), **token} for key, token in (config.get("added_tokens_decoder") or {}).items()]
    ids = [token.get("id") for token in tokens if token.get("content") == name]
    vocabularies = [content("added_tokens.json"), content("vocab.json"), (tokenizer.get("model") or {}).get("vocab")]
    ids += [vocabulary.get(name) for vocabulary in vocabularies if isinstance(vocabulary, dict)]
    return name, next((token for token in ids if token is not None), None)


GENERATION = "generation_config.json"
# Our names of keys of `generation_config.json`. The second ones apply if its `do_sample` is true.
_GENERATION_KEYS: Mapping[str, str] = {"max_new_tokens": "max_tokens"}
_SAMPLING_KEYS: Mapping[str, str] = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p"}
# Keys that do not affect which tokens are chosen.
_NEUTRAL_KEYS = {
    *("do_sample", "cache_config", "cache_implementation", "disable_compile", "return_dict_in_generate"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_commit_hash", "_from_model_config"),
}


def read_sampling(folder: Path, family_reader: "GenerationReader | None" = None) -> dict[str, Any]:
    """The default sampling parameters in the files of a checkpoint; empty if there are none.

    They are the object `sampling` of `remask.json`. Without such a file they come from `generation_config.json`:
    `max_new_tokens`, with `do_sample` also `temperature`, `top_k` and `top_p`, and what `family_reader` makes of keys
    of the model's family. Raises `CheckpointError` if a file cannot be read, or a value is not allowed.
    """
    path = next((folder / name for name in (DEFAULTS_FILE, GENERATION) if (folder / name).is_file()), None)
    if path is None:
        return {}
    if path.name == DEFAULTS_FILE:
        sampling = dict(read_model_defaults(folder).get(SAMPLING, {}))
    else:
        sampling = _generation_sampling(path, family_reader)
    try:
        SamplingParams.from_mapping(sampling)
    except ConfigError as error:
        raise CheckpointError(
            f"{path}: {error} Mend the file, or take it away to load the model without its defaults."
        ) from error
    return sampling


def ignored_keys(folder: Path, family_reader: "GenerationReader | None") -> list[str]:
    """Keys of `generation_config.json` that affect which tokens are chosen, and that `read_sampling` ignores.

    Returns an empty list if there is no `family_reader`, or if `remask.json` is read instead of that file. Raises
    `CheckpointError` if the file cannot be read.
    """
    path = folder / GENERATION
    if family_reader is None or (folder / DEFAULTS_FILE).is_file() or not path.is_file():
        return []
    content = read_json(path)
    common_keys = _NEUTRAL_KEYS | _common_keys(content).keys()
    return [key for key in family_reader(content)[1] if key not in common_keys]


def _generation_sampling(path: Path, family_reader: "GenerationReader | None") -> dict[str, Any]:
    """The sampling parameters in `generation_config.json`, unchecked. Raises `CheckpointError` if it cannot be read."""
    content = read_json(path)
    sampling = {name: content[key] for key, name in _common_keys(content).items() if content.get(key) is not None}
    if sampling.get("top_k") in (0, -1):  # all tokens, as transformers and vLLM write it
        del sampling["top_k"]
    return sampling if family_reader is None else sampling | family_reader(content)[0]


def _common_keys(content: Mapping[str, Any]) -> dict[str, str]:
    """Keys of `content` that apply to every family, with our names for them."""
    return {**_GENERATION_KEYS, **(_SAMPLING_KEYS if content.get("do_sample") is True else {})}


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_FAULTS = 20  # faults that an error lists; it counts the others
_ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a number, in types that convert to any floating type
FLOATS = tuple(_ITEMSIZES)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of another tensor, one for each block of rows and columns. The last blocks may be smaller."""

    name: str
    file: Path
    block_shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor is, and what it is. Shape and dtype of a quantized tensor are those of the numbers it encodes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it, F32, BF16, ..., or as the GGUF file does
    quantization: Quantization | None = None  # how our own checkpoint encodes it; None: it does not
    number_bytes: float | None = None  # in GGUF files, and of tensors with `scales`; None: as of `dtype`
    scales: Scales | None = None

    @property
    def itemsize(self) -> float | None:
        """Bytes of a number in the file. Returns None if its type does not convert to floating types."""
        return _ITEMSIZES.get(self.dtype) if self.number_bytes is None else self.number_bytes


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: the single one, or the shards that its index names, sorted by name.

    Raises `CheckpointError` if there is neither, or if the index is malformed or names files that do not exist.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return sorted({folder / shard for shard in _weight_map(folder).values()})


def tensor_locations(folder: Path) -> dict[str, TensorLocation]:
    """Every tensor of a checkpoint by name. Logs a warning if there are a single file and an index of other files.

    Raises `CheckpointError` if there are no weight files, one cannot be read, or the index contradicts them.
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
        with open_weight_file(file) as content:
            for name in content.keys():  # noqa: SIM118 - not a dict: it cannot be iterated
                header = content.get_slice(name)
                location = TensorLocation(file, tuple(header.get_shape()), header.get_dtype())
                locations.setdefault(name, []).append(location)
    _check_index(folder, index, locations)
    return {name: location for name, (location,) in locations.items()}


def _indexes_others(folder: Path) -> bool:
    """Whether there is an index, also a malformed one, of other files than the single one."""
    try:
        return set(_weight_map(folder).values()) != {SINGLE}
    except CheckpointError:
        return (folder / INDEX).is_file()


def _check_index(folder: Path, index: Mapping[str, str], locations: Mapping[str, Sequence[TensorLocation]]) -> None:
    """Raise `CheckpointError` if the index names a wrong file for a tensor, or two shards hold one name."""
    faults = []
    for name, shard in index.items():
        shards = [location.file.name for location in locations.get(name, ())]
        if shard not in shards:
            faults.append(f"it has {name} in {shard}, and {' and '.join(shards) or 'no shard'} holds it")
    for name, duplicates in locations.items():
        if len(duplicates) > 1:
            copies = " and ".join(f"{location.file.name} {list(location.shape)}" for location in duplicates)
            faults.append(f"{name} is in {copies}")
    if faults:
        raise CheckpointError(
            f"{folder / INDEX} and the shards that it names contradict each other: {list_faults(faults)}. They are of "
            "different models or downloads: fetch the index and the shards again."
        )


def list_faults(faults: Sequence[str]) -> str:
    """The first `_MAX_FAULTS` of `faults` in one sentence, and how many more there are."""
    more = len(faults) - _MAX_FAULTS
    return "; ".join(faults[:_MAX_FAULTS]) + (f"; and {more} more" if more > 0 else "")


@contextmanager
def open_weight_file(path: Path, opener: Callable[[Path], Any] | None = None) -> Iterator[Any]:
    """An open weight file, of `opener` or of safetensors. Raises `CheckpointError` on errors, also while it is read.

    Raises `MemoryError` if there is too little memory to map it.
    """
    try:
        with safe_open(path, framework="pt") if opener is None else opener(path) as file:
            yield file
    except (SafetensorError, OSError) as error:
        if getattr(error, "errno", None) == ENOMEM or "Cannot allocate memory" in str(error):
            raise MemoryError(str(error)) from error  # the file is sound
        raise CheckpointError(
            f"{path} cannot be read: {error}. It is truncated or corrupt: download or copy it again."
        ) from error


def _weight_map(folder: Path) -> dict[str, str]:
    """The file name of each tensor's shard, from the index. Raises `CheckpointError` as `weight_files` says."""
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
    # A name with a folder in it could be anywhere on the disk.
    outside = sorted({shard for shard in shards.values() if Path(shard).name != shard})
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(map(repr, outside))}.")
    # Not `Path.is_file`, which raises on names that are too long.
    absent = sorted({shard for shard in shards.values() if not os.path.isfile(folder / shard)})
    if absent:
        raise CheckpointError(
            f"{index} names {len(absent)} of {len(set(shards.values()))} shards that are not in {folder}: "
            f"{', '.join(absent)}. The download is incomplete: fetch them again."
        )
    return shards

"""Loading of a checkpoint: its headers are checked first, then its tensors are read one at a time."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remask.checkpoint.adapter import Adapter
from remask.checkpoint.files import (
    CONFIG,
    FLOATS,
    GENERATION,
    TensorLocation,
    list_faults,
    open_weight_file,
    raw_config,
    read_json,
    tensor_locations,
    tokenizer_mask,
)
from remask.checkpoint.gguf_header import is_gguf
from remask.checkpoint.gguf_model import NAMES as GGUF_NAMES
from remask.checkpoint.quantized_files import MATRICES, check_stored_quantization, join_codes, read_codes, read_numbers
from remask.checkpoint.source import resolve_model
from remask.checks import Quantization
from remask.checks.values import is_whole
from remask.errors import CheckpointError, ConfigError
from remask.families import Family, Slot, family_of
from remask.families.fields import Fields
from remask.families.harmless import unknown_keys
from remask.machine.device import dtype_name
from remask.machine.progress import Progress
from remask.model.config import ModelConfig
from remask.model.quantized import Codes, QuantizedMatrix
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, LowRank, Weights, empty_weights

TEXT = "text_config"
_MAX_MAPPED_BYTES = 2**24  # bytes of a file that stay mapped while it is read
_MAX_UNPACKED = 2**24  # numbers of the embedding or the output matrix that are unpacked to float32 at a time
# With more experts for each stored tensor, a configuration does not belong to the files: an expert has three tensors.
_MAX_EXPERTS_PER_TENSOR = 4


def read_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, tokenizer: str | None = None, *, force: bool = False
) -> tuple[Family, ModelConfig]:
    """The family and the shape in `config.json` or in a GGUF file.

    If they name no mask token, it is that of `tokenizer`, a folder or hub id, by default the same folder. Stop ids of
    `generation_config.json` are added. The family's names are those of the checkpoint's tensors. Keys of `overrides`
    replace those of `config.json`, also for the family's factors; null removes a key.

    Raises the errors of `family_of`, `ConfigError` if the family does not read a key of `overrides`, and
    `CheckpointError` if a file is missing or malformed, the transformer cannot execute a value, or, unless `force`, a
    key is unknown.
    """
    raw = raw_config(folder) | dict(overrides or {})
    family = replace(family_of(raw), names=GGUF_NAMES) if is_gguf(folder) else family_of(raw)
    if raw.get("mask_token_id") is None and not is_gguf(folder):
        raw |= _tokenizer_mask_key(folder if tokenizer is None else resolve_model(tokenizer, weights=False), raw)
    tracked = _TrackedKeys(raw)
    try:
        config = family.config(tracked)
        family.factors(tracked)
        generation = folder / GENERATION
        if generation.is_file():
            stop_ids = Fields(generation.name, read_json(generation)).tokens("eos_token_id", config.vocab)
            config = replace(config, stop_ids=tuple(dict.fromkeys(config.stop_ids + stop_ids)))
    except CheckpointError as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded. {error}") from error
    for key, value in (overrides or {}).items():
        if key not in tracked.keys_read and key not in ("model_type", "architectures") and value is not None:
            raise ConfigError(
                f"hf_overrides: the family {family.name!r} does not read {key!r}; it reads "
                f"{', '.join(sorted(tracked.keys_read))}"
            )
    if family.harmless is not None and not force and not is_gguf(folder):
        _check_keys(folder, family, tracked)
    factors = family.factors
    return replace(family, factors=lambda raw: factors({**raw, **(overrides or {})})), config


def _tokenizer_mask_key(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`mask_token_id` with a tokenizer's mask token; empty if it has none. Raises `CheckpointError` if it is wrong."""
    mask = None if is_gguf(folder) else tokenizer_mask(folder)
    rows = raw.get("vocab_size")
    if mask is not None and is_whole(rows, 0, mask):
        raise CheckpointError(
            f"The tokenizer's mask_token has the id {mask}, and the model's embedding {rows} rows ('vocab_size' of "
            f"{CONFIG}); give the id that the model was trained with: --hf-overrides '{{\"mask_token_id\": ID}}' "
            "(hf_overrides)."
        )
    return {} if mask is None else {"mask_token_id": mask}


def _check_keys(folder: Path, family: Family, tracked: "_TrackedKeys") -> None:
    """Raise `CheckpointError` if `tracked` has keys that the family's reader has not read.

    A newer model of a family may have the tensors of an older one, but compute something else.
    """
    values = {key: tracked[key] for key in unknown_keys(tracked, frozenset(tracked.keys_read), family.harmless or ())}
    for outer, inner in tracked.inner.items():
        keys = unknown_keys(inner, frozenset(inner.keys_read), family.harmless or ())
        values |= {f"{outer}.{key}": inner[key] for key in keys}
    if not values:
        return
    listing = ", ".join(f"{key!r} ({value!r:.60})" for key, value in values.items())
    nulls = json.dumps({key: None for key in values if key in tracked})
    removal = f"--hf-overrides {nulls!r} (hf_overrides), or " if nulls != "{}" else ""
    raise CheckpointError(
        f"The model in {folder} cannot be loaded. {CONFIG} ({family.name}) has keys that this family is not known to "
        f"have: {listing}. Newer models of a family may compute something else by such a key, and would write wrong "
        f"text without it. If these change nothing, pass {removal}--force (force=True)."
    )


class _TrackedKeys(dict[str, Any]):
    """An object that records which of its keys were read, also those of its text model's object (`inner`)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()
        self.inner: dict[str, _TrackedKeys] = {}
        if isinstance(values.get(TEXT), dict):
            self[TEXT] = self.inner[TEXT] = _TrackedKeys(values[TEXT])

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def load_weights(
    folder: Path,
    family: Family,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: bool = True,
    check: bool = True,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
    adapter: Adapter | None = None,
) -> Weights:
    """The weights of the checkpoint `folder` that `shard` holds, on `device` and converted to `dtype`.

    The products of an `adapter` are added to its matrices in float32, before these are converted or quantized. Only the
    shard's part of each tensor is read, and copied into its place, so at most one tensor is in memory besides the
    result. `progress` is shown on stderr.

    Raises `CheckpointError` if tensors are missing, unexpected, misshapen or of a type that does not convert; the
    message lists all of them, and no weight was read. It is also raised if files cannot be read, and with `check` for
    NaN, infinities, and numbers that are too large for `dtype`.
    """
    slots, locations = check_tensors(folder, family, config, dtype)
    check_stored_quantization(folder, quantization)
    changes: dict[str, Callable[[], LowRank]] = {}
    if adapter is not None:
        changes = {slot.name: partial(adapter.read, slot) for slot in slots if adapter.changes(slot)}
    weights = empty_weights(config, dtype, device, shard, quantization)
    local_slots = [part for slot in slots for part in slot.parts(config, shard)]
    parts = [part for slot in local_slots for part in _unpacked_parts(slot, locations[slot.name])]
    parts.sort(key=lambda part: locations[part.name].file)
    total = sum(_size(part, locations) for part in parts)
    with Progress("loading weights", total, "B", enabled=progress, scale=True) as bar:
        for file, batch in _batch_by_file(parts, locations):
            _read_slots(file, batch, locations, weights, check=check, quantization=quantization, changes=changes)
            bar.update(sum(_size(slot, locations) for slot in batch))
    return weights


def check_tensors(
    folder: Path, family: Family, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[Slot], dict[str, TensorLocation]]:
    """The slots of the checkpoint in `folder`, and the locations of its tensors. Only headers are read.

    Raises `CheckpointError` like `load_weights` if tensors do not fit; `dtype` is for sizes in the message.
    """
    locations = join_codes(folder, _tensors(folder))
    _check_layers(folder, family, config, locations, dtype)
    slots = family.tensors(config, family.factors(raw_config(folder)))
    _check_tensors(folder, family, config, slots, locations, dtype)
    return slots, locations


def _tensors(checkpoint: Path) -> dict[str, TensorLocation]:
    """The tensors of a folder or a GGUF file by name; only headers are read."""
    if not is_gguf(checkpoint):
        return tensor_locations(checkpoint)
    from remask.checkpoint.gguf_tensors import locate

    return locate(checkpoint)


def _open_weights(path: Path) -> AbstractContextManager[Any]:
    """An open safetensors or GGUF file, as of `open_weight_file`."""
    if not is_gguf(path):
        return open_weight_file(path)
    from remask.checkpoint.gguf_tensors import OpenGGUF

    return open_weight_file(path, OpenGGUF)


def _description(checkpoint: Path) -> str:
    """The part of a checkpoint that has its shape, for messages."""
    return "header" if is_gguf(checkpoint) else CONFIG


def _batch_by_file(slots: Sequence[Slot], locations: Mapping[str, TensorLocation]) -> Iterator[tuple[Path, list[Slot]]]:
    """Consecutive `slots` of one file, in batches of at most `_MAX_MAPPED_BYTES` bytes or one slot, with the file.

    An open file keeps every page that was read mapped, and a mapping of the whole checkpoint would be a second copy.
    Opening it for each slot would take too long: it takes milliseconds with thousands of experts.
    """
    batch = list[Slot]()
    mapped = 0
    file = locations[slots[0].name].file
    for slot in slots:
        location = locations[slot.name]
        size = _size(slot, locations)
        if batch and (file != location.file or mapped + size > _MAX_MAPPED_BYTES):
            yield file, batch
            batch = []
            mapped = 0
        batch.append(slot)
        mapped += size
        file = location.file
    yield file, batch


def _size(slot: Slot, locations: Mapping[str, TensorLocation]) -> int:
    """Bytes of the part of a file that `slot` reads."""
    return int((locations[slot.name].itemsize or 0) * prod(slot.shape))


def _unpacked_parts(slot: Slot, location: TensorLocation) -> Iterator[Slot]:
    """`slot`, or parts of it if it is a large tensor that is unpacked when it is read."""
    large = slot.field in ("embed", "head") and location.number_bytes is not None and location.dtype not in FLOATS
    yield from slot.in_rows(max(1, _MAX_UNPACKED // slot.shape[1])) if large else (slot,)


def _read_slots(
    path: Path,
    slots: Sequence[Slot],
    locations: Mapping[str, TensorLocation],
    weights: Weights,
    *,
    check: bool,
    quantization: Quantization | None,
    changes: Mapping[str, Callable[[], LowRank]],
) -> None:
    """Copy tensors of one file into `weights`, one after the other, plus the low-rank `changes` by the tensor's name.

    Raises `CheckpointError` if a tensor cannot be read, or with `check` if its numbers are not finite.
    """
    with _open_weights(path) as file:
        for slot in slots:
            read_change = changes.get(slot.name)
            tensor = _read_tensor(file, slot, locations[slot.name], quantization if read_change is None else None)
            if read_change is not None:
                assert isinstance(tensor, Tensor)
                tensor = tensor.float() + read_change().cut(*(slot.part or ())).dense()
            slot.fill(weights, tensor)
            values = tensor.constants if isinstance(tensor, Codes) else tensor
            target = slot.target(weights)
            if check and not _is_finite(values if isinstance(target, QuantizedMatrix) else target):
                raise _not_finite_error(slot, locations[slot.name], values, weights.embed.dtype)
            del tensor, values  # before the next one is read


def _read_tensor(file: Any, slot: Slot, location: TensorLocation, quantization: Quantization | None) -> Tensor | Codes:
    """The part of a tensor in an open file that `slot` reads; nothing else of it is read."""
    if is_gguf(location.file):
        allowed = quantization if slot.field in MATRICES else None
        return file.read(slot.name, slot.part, allowed)  # type: ignore[no-any-return]
    if location.quantization is not None:
        return read_codes(file, slot.name, location.quantization, slot.part or (slice(None),))
    return read_numbers(file, slot.name, location, slot.part)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Nothing of the tensor's size is allocated."""
    low, high = torch.aminmax(tensor)  # both are NaN if a value is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _not_finite_error(slot: Slot, location: TensorLocation, values: Tensor, dtype: torch.dtype) -> CheckpointError:
    """The error for a tensor whose values in memory are not all finite."""
    subject = f"The tensor {slot.name!r} in {location.file}"
    count = int((~torch.isfinite(values)).sum())
    bypass = "load it all the same with --skip-weight-check (check_weights=False)"
    if count:
        return CheckpointError(
            f"{subject} holds {count} values of {values.numel()} that are NaN or infinite. The file is damaged, or "
            f"its training diverged: download it again, or {bypass}."
        )
    largest = float(values.abs().max())
    return CheckpointError(
        f"{subject} holds values that become infinite as {dtype_name(dtype)}; the largest is {largest:.3g}. "
        f"Load it with --dtype bfloat16 or float32, or {bypass}."
    )


def _check_layers(
    folder: Path, family: Family, config: ModelConfig, locations: Mapping[str, TensorLocation], dtype: torch.dtype
) -> None:
    """Raise `CheckpointError` if the files have far fewer tensors than the configuration, before they are listed."""
    mixtures = filter(None, map(config.mixture_of, range(config.layers)))
    names = family.names.mixture
    experts = 0 if names is None or names.stacked is not None else sum(mixture.experts for mixture in mixtures)
    if config.layers > len(locations) or experts > _MAX_EXPERTS_PER_TENSOR * len(locations):
        shape = f"{config.layers} layers" + (f" and {experts} experts in them" if experts else "")
        raise CheckpointError(
            f"The {_description(folder)} of the {family.name} model in {folder} describes {shape}, and its files "
            f"list {len(locations)} tensors in all. {_sizes_sentence(config, locations, dtype)} "
            f"{_way_out(folder)}"
        )


def _sizes_sentence(config: ModelConfig, locations: Mapping[str, TensorLocation], dtype: torch.dtype) -> str:
    """A sentence with the memory for the configuration's weights, and for the tensors in the files."""
    counts = config.parameters, sum(prod(location.shape) for location in locations.values())
    needed, present = (_size_text(count * dtype.itemsize) for count in counts)
    return f"Its weights need {needed} as {dtype_name(dtype)}; the tensors in the files need {present}."


def _size_text(size: int) -> str:
    """A number of bytes with four digits and a decimal unit."""
    power = min(4, (len(str(size)) - 1) // 3)
    return f"{size / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _check_tensors(
    folder: Path,
    family: Family,
    config: ModelConfig,
    slots: Sequence[Slot],
    locations: Mapping[str, TensorLocation],
    dtype: torch.dtype,
) -> None:
    """Raise one `CheckpointError` that lists every difference between the checkpoint and the configuration.

    Tensors of many experts in many layers are listed by ranges of their numbers.
    """
    expected = {slot.name: slot for slot in slots}
    # Some programs store a tied embedding twice.
    ignored = {family.head} if config.tied else set()
    common = [(slot, locations[slot.name]) for slot in slots if slot.name in locations]
    problems = {
        "missing": [f"{name} {list(slot.shape)}" for name, slot in expected.items() if name not in locations],
        "unexpected": [
            f"{name} {list(location.shape)}"
            for name, location in locations.items()
            if name not in expected.keys() | ignored and not re.fullmatch(family.unread, name)
        ],
        "misshapen": [
            f"{slot.name} is {list(location.shape)}, {_description(folder)} asks for {list(slot.shape)}"
            for slot, location in common
            if location.shape != slot.shape
        ],
        "of a type that does not convert" if is_gguf(folder) else f"of a type other than {', '.join(FLOATS)}": [
            f"{slot.name} is {location.dtype}" for slot, location in common if location.itemsize is None
        ],
    }
    lines = [f"  {len(names)} {kind}: {list_faults(name_ranges(names))}" for kind, names in problems.items() if names]
    if lines:
        text = "\n".join(lines)
        raise CheckpointError(
            f"The tensors in {folder} are not those of the {family.name} model that its {_description(folder)} "
            f"describes.\n{text}\n{_sizes_sentence(config, locations, dtype)} {_way_out(folder)}"
        )


def _way_out(folder: Path) -> str:
    if is_gguf(folder):
        return "Convert the model again, or download another file of it."
    return "Use the config.json that belongs to these weights."


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _NameParts:
    """The texts around the numbers of layer and expert in a tensor's name."""

    prefix: str
    middle: str
    suffix: str


def name_ranges(names: Iterable[str]) -> list[str]:
    """`names` with numbers of experts, and of layers with the same experts, combined to ranges.

    `layers.{0-3}.experts.{0-7,9}.up` stands for 36 names such as `layers.3.experts.5.up`. Names without two numbers
    between dots, a layer's and an expert's, are unchanged.
    """
    texts = list[str]()
    experts = dict[tuple[_NameParts, int], list[int]]()  # by layer
    for name in names:
        numbers = _NUMBER.findall(name)
        if len(numbers) == 2:
            layer, expert = map(int, numbers)
            experts.setdefault((_NameParts(*_NUMBER.split(name)), layer), []).append(expert)
        else:
            texts.append(name)
    layers = dict[tuple[_NameParts, str], list[int]]()  # by the range of their experts
    for (parts, layer), layer_experts in experts.items():
        layers.setdefault((parts, _ranges(layer_experts)), []).append(layer)
    for (parts, expert_range), range_layers in layers.items():
        texts.append(f"{parts.prefix}{_ranges(range_layers)}{parts.middle}{expert_range}{parts.suffix}")
    return texts


def _ranges(numbers: Sequence[int]) -> str:
    """The number, or the ranges of several numbers in braces: `{0-7,9}`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ",".join(str(start) if start == end else f"{start}-{end}" for start, end in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"

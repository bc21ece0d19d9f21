"""Loading of a checkpoint: its headers are checked first, then its tensors are read one at a time."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remask.checkpoint.adapter import Adapter
from remask.checkpoint.files import (
    CONFIG,
    CONVERTED,
    GENERATION,
    TensorLocation,
    listed,
    opened,
    raw_config,
    read_json,
    tensor_locations,
    tokenizer_mask,
)
from remask.checkpoint.gguf_header import is_gguf
from remask.checkpoint.gguf_model import NAMES as GGUF_NAMES
from remask.checkpoint.quantised_files import MATRICES, check_kind, read_codes, read_numbers, unfolded
from remask.checkpoint.source import resolve
from remask.checks import Quantization
from remask.checks.values import is_whole
from remask.errors import CheckpointError, ConfigError
from remask.families import Family, Slot, family_of
from remask.families.fields import Fields
from remask.families.harmless import unknown
from remask.machine.progress import Progress
from remask.model.config import ModelConfig
from remask.model.quantised import Codes, QuantisedMatrix
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, LowRank, Weights, empty_weights

TEXT = "text_config"
_MAPPED = 2**24  # bytes of a file that stay mapped while it is read
_UNPACKED = 2**24  # numbers of the embedding or the output matrix that stand unpacked, as float32, at a time
# Experts for each stored tensor above which a configuration cannot be meant for the files; there are three tensors for
# each expert.
_FEW = 4


def read_config(
    folder: Path, overrides: Mapping[str, Any] | None = None, tokenizer: str | None = None, *, force: bool = False
) -> tuple[Family, ModelConfig]:
    """The family and the shape that `config.json`, or a GGUF file, describes.

    A mask token that it does not name is that of the `tokenizer`, a folder or hub id, by default in the same folder.
    Stop ids of `generation_config.json` are added. The family's names are those of the checkpoint's tensors. The keys
    of `overrides` are laid over those of `config.json`, and of whatever the family's factors are read from; null takes
    a key away.

    Raises `ConfigError` where the family reads no such key as one of `overrides`, errors as `family_of`, and
    `CheckpointError` where a file is missing or malformed, or a key has a value that the transformer cannot execute, or
    means something that nobody here knows, unless `force`.
    """
    raw = raw_config(folder) | dict(overrides or {})
    family = replace(family_of(raw), names=GGUF_NAMES) if is_gguf(folder) else family_of(raw)
    if raw.get("mask_token_id") is None and not is_gguf(folder):
        raw |= _mask_of(folder if tokenizer is None else resolve(tokenizer, weights=False), raw)
    read = _Read(raw)
    try:
        config = family.config(read)
        family.factors(read)
        generation = folder / GENERATION
        if generation.is_file():
            more = Fields(generation.name, read_json(generation)).tokens("eos_token_id", config.vocab)
            config = replace(config, stop_ids=tuple(dict.fromkeys(config.stop_ids + more)))
    except CheckpointError as error:
        raise CheckpointError(f"The model in {folder} cannot be loaded. {error}") from error
    for key, value in (overrides or {}).items():
        if key not in read.keys_read and key not in ("model_type", "architectures") and value is not None:
            raise ConfigError(
                f"hf_overrides: {key!r} is no key that the family {family.name!r} reads; it reads "
                f"{', '.join(sorted(read.keys_read))}"
            )
    if family.harmless is not None and not force and not is_gguf(folder):
        _refuse_unknown(folder, family, read)
    factors = family.factors
    return replace(family, factors=lambda raw: factors({**raw, **(overrides or {})})), config


def _mask_of(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The key of the mask token that a tokenizer names; empty where it names none."""
    mask, rows = None if is_gguf(folder) else tokenizer_mask(folder), raw.get("vocab_size")
    if mask is not None and is_whole(rows, 0, mask):
        raise CheckpointError(
            f"The tokenizer's mask_token has the id {mask}, and the model's embedding {rows} rows ('vocab_size' of "
            f"{CONFIG}); give the id that the model was trained with: --hf-overrides '{{\"mask_token_id\": ID}}' "
            "(hf_overrides)."
        )
    return {} if mask is None else {"mask_token_id": mask}


def _refuse_unknown(folder: Path, family: Family, read: "_Read") -> None:
    """Raise `CheckpointError` where `read` has keys that the family's reader does not know.

    A newer model of a family may have the tensors of an older one and compute something else.
    """
    values = {key: read[key] for key in unknown(read, frozenset(read.keys_read), family.harmless or ())}
    for outer, inner in read.inner.items():
        keys = unknown(inner, frozenset(inner.keys_read), family.harmless or ())
        values |= {f"{outer}.{key}": inner[key] for key in keys}
    if not values:
        return
    named = ", ".join(f"{key!r} ({value!r:.60})" for key, value in values.items())
    nulls = json.dumps({key: None for key in values if key in read})
    way = f"--hf-overrides {nulls!r} (hf_overrides), or " if nulls != "{}" else ""
    raise CheckpointError(
        f"The model in {folder} cannot be loaded. {CONFIG} ({family.name}) has keys that this family is not known to "
        f"have: {named}. Newer models of a family may compute something else by such a key, and would write wrong text "
        f"without it. If these change nothing, pass {way}--force (force=True)."
    )


class _Read(dict[str, Any]):
    """An object that remembers which of its keys were asked for; of the object of a text model, too (`inner`)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()
        self.inner: dict[str, _Read] = {}
        if isinstance(values.get(TEXT), dict):
            self[TEXT] = self.inner[TEXT] = _Read(values[TEXT])

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
    progress: bool = True,
    check: bool = True,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
    adapter: Adapter | None = None,
) -> Weights:
    """The weights of the checkpoint `folder` that `shard` holds, on `device` and converted to `dtype`.

    The products of an `adapter` are added to its matrices, in float32 and before anything is converted or quantised.
    Of each tensor only what the shard holds is read. It is copied from its file into its place, so at most one tensor
    is in memory beside the result, also where matrices are quantised. `progress` is told on stderr. With `check`
    each is looked at once more, where it is still in the cache, for values that are not finite.

    Raises `CheckpointError` where tensors are missing, unexpected, misshapen or of a type that does not convert; the
    message lists all of them, and no weight has been read. So it does on files that cannot be read, on NaN and
    infinities, and on numbers that are too large for `dtype`.
    """
    slots, stored = check_tensors(folder, family, config, dtype)
    check_kind(folder, quantization)
    merges = (
        {} if adapter is None else {slot.name: partial(adapter.read, slot) for slot in slots if adapter.changes(slot)}
    )
    weights = empty_weights(config, dtype, device, shard, quantization)
    slots = [piece for slot in slots for piece in slot.pieces(config, shard)]
    slots = [part for slot in slots for part in _unpacked_parts(slot, stored[slot.name])]
    slots.sort(key=lambda slot: stored[slot.name].file)
    total = sum(_size(slot, stored) for slot in slots)
    with Progress("loading weights", total, "B", shown=progress, scale=True) as bar:
        for file, few in _together(slots, stored):
            _read(file, few, stored, weights, check, quantization, merges)
            bar.update(sum(_size(slot, stored) for slot in few))
    return weights


def check_tensors(
    folder: Path, family: Family, config: ModelConfig, dtype: torch.dtype
) -> tuple[list[Slot], dict[str, TensorLocation]]:
    """Where each tensor of the checkpoint in `folder` goes, and where it is. Headers are read, and no weight.

    Raises `CheckpointError` as `load_weights` on tensors that do not fit. `dtype` is for the memory that it names.
    """
    stored = unfolded(folder, _tensors(folder))
    _check_layers(folder, family, config, stored, dtype)
    slots = family.tensors(config, family.factors(raw_config(folder)))
    _check(folder, family, config, slots, stored, dtype)
    return slots, stored


def _tensors(checkpoint: Path) -> dict[str, TensorLocation]:
    if not is_gguf(checkpoint):
        return tensor_locations(checkpoint)
    from remask.checkpoint.gguf_tensors import locate

    return locate(checkpoint)


def _open_weights(path: Path) -> AbstractContextManager[Any]:
    if not is_gguf(path):
        return opened(path)
    from remask.checkpoint.gguf_tensors import OpenGGUF

    return opened(path, OpenGGUF)


def _description(checkpoint: Path) -> str:
    """What of a checkpoint says which shape it has, for messages."""
    return "header" if is_gguf(checkpoint) else CONFIG


def _together(slots: Sequence[Slot], stored: Mapping[str, TensorLocation]) -> Iterator[tuple[Path, list[Slot]]]:
    """`slots` in their order, those side by side in one file together as long as they are small.

    An open file keeps every page read so far mapped, and a mapping of the whole checkpoint would be a second copy.
    To open one takes milliseconds where it lists thousands of experts.
    """
    few, mapped, file = list[Slot](), 0, stored[slots[0].name].file
    for slot in slots:
        place, size = stored[slot.name], _size(slot, stored)
        if few and (file != place.file or mapped + size > _MAPPED):
            yield file, few
            few, mapped = [], 0
        few.append(slot)
        mapped, file = mapped + size, place.file
    yield file, few


def _size(slot: Slot, stored: Mapping[str, TensorLocation]) -> int:
    """Bytes of what `slot` takes of a file."""
    return int((stored[slot.name].item or 0) * prod(slot.shape))


def _unpacked_parts(slot: Slot, place: TensorLocation) -> Iterator[Slot]:
    """`slot`, in parts where the tensor is large, does not stay quantized, and must be unpacked to be read."""
    large = slot.field in ("embed", "head") and place.packed is not None and place.dtype not in CONVERTED
    yield from slot.in_rows(max(1, _UNPACKED // slot.shape[1])) if large else (slot,)


def _read(
    path: Path,
    slots: Sequence[Slot],
    stored: Mapping[str, TensorLocation],
    weights: Weights,
    check: bool,
    quantization: Quantization | None,
    merges: Mapping[str, Callable[[], LowRank]],
) -> None:
    """Copy tensors of one file into their places, one after the other, with what `merges` adds to them by name."""
    with _open_weights(path) as file:
        for slot in slots:
            added = merges.get(slot.name)
            tensor = _stored(file, slot, stored[slot.name], quantization if added is None else None)
            if added is not None:
                assert isinstance(tensor, Tensor)
                tensor = tensor.float() + added().dense(slot.part)
            slot.fill(weights, tensor)
            numbers, target = tensor.constants if isinstance(tensor, Codes) else tensor, slot.target(weights)
            if check and not _finite(numbers if isinstance(target, QuantisedMatrix) else target):
                raise _not_finite(slot, stored[slot.name], numbers, weights.embed.dtype)
            del tensor, numbers  # before the next one is read


def _stored(file: Any, slot: Slot, place: TensorLocation, quantization: Quantization | None) -> Tensor | Codes:
    """What `slot` takes of its tensor in an open file; nothing else of it is read."""
    if is_gguf(place.file):
        kind = quantization if slot.field in MATRICES else None
        return file.read(slot.name, slot.part, kind)  # type: ignore[no-any-return]
    if place.kind is not None:
        return read_codes(file, slot.name, place.kind, slot.part or (slice(None),))
    return read_numbers(file, slot.name, place, slot.part)


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Nothing of the tensor's size is allocated."""
    low, high = torch.aminmax(tensor)  # both are NaN where one value is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _not_finite(slot: Slot, place: TensorLocation, stored: Tensor, dtype: torch.dtype) -> CheckpointError:
    """The error for a tensor whose values in memory are not all finite."""
    where, count = f"The tensor {slot.name!r} in {place.file}", int((~torch.isfinite(stored)).sum())
    way = "load it all the same with --skip-weight-check (check_weights=False)"
    if count:
        return CheckpointError(
            f"{where} holds {count} values of {stored.numel()} that are NaN or infinite. The file is damaged, or its "
            f"training diverged: download it again, or {way}."
        )
    return CheckpointError(
        f"{where} holds values that become infinite as {_name(dtype)}; the largest is {float(stored.abs().max()):.3g}. "
        f"Load it with --dtype bfloat16 or float32, or {way}."
    )


def _check_layers(
    folder: Path, family: Family, config: ModelConfig, stored: Mapping[str, TensorLocation], dtype: torch.dtype
) -> None:
    """Raise where the files have far fewer tensors than the configuration names, before any of them is listed."""
    mixtures = filter(None, map(config.mixture_of, range(config.layers)))
    names = family.names.mixture
    experts = 0 if names is None or names.stacked is not None else sum(mixture.experts for mixture in mixtures)
    if config.layers > len(stored) or experts > _FEW * len(stored):
        described = f"{config.layers} layers" + (f" and {experts} experts in them" if experts else "")
        raise CheckpointError(
            f"The {_description(folder)} of the {family.name} model in {folder} describes {described}, and its files "
            f"list {len(stored)} tensors in all. {_sizes(config, stored, dtype)} "
            f"{_way_out(folder)}"
        )


def _sizes(config: ModelConfig, stored: Mapping[str, TensorLocation], dtype: torch.dtype) -> str:
    """The memory that the configuration's weights take, beside that of what the files hold."""
    counts = config.parameters, sum(prod(place.shape) for place in stored.values())
    needed, present = (_bytes(count * dtype.itemsize) for count in counts)
    return f"Its weights need {needed} as {_name(dtype)}; the tensors in the files need {present}."


def _bytes(size: int) -> str:
    power = min(4, (len(str(size)) - 1) // 3)
    return f"{size / 1000**power:.4g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(
    folder: Path,
    family: Family,
    config: ModelConfig,
    slots: Sequence[Slot],
    stored: Mapping[str, TensorLocation],
    dtype: torch.dtype,
) -> None:
    """Raise one error that lists every difference between the checkpoint and the configuration.

    Tensors of many experts in many layers are listed by ranges of their numbers.
    """
    wanted = {slot.name: slot for slot in slots}
    # Some programs store a tied embedding twice.
    ignored = {family.head} if config.tied else set()
    common = [(slot, stored[slot.name]) for slot in slots if slot.name in stored]
    problems = {
        "missing": [f"{name} {list(slot.shape)}" for name, slot in wanted.items() if name not in stored],
        "unexpected": [
            f"{name} {list(place.shape)}"
            for name, place in stored.items()
            if name not in wanted.keys() | ignored and not re.fullmatch(family.unread, name)
        ],
        "misshapen": [
            f"{slot.name} is {list(place.shape)}, {_description(folder)} asks for {list(slot.shape)}"
            for slot, place in common
            if place.shape != slot.shape
        ],
        "of a type that does not convert" if is_gguf(folder) else f"of a type other than {', '.join(CONVERTED)}": [
            f"{slot.name} is {place.dtype}" for slot, place in common if place.item is None
        ],
    }
    lines = [f"  {len(names)} {kind}: {listed(in_ranges(names))}" for kind, names in problems.items() if names]
    if lines:
        text = "\n".join(lines)
        raise CheckpointError(
            f"The tensors in {folder} are not those of the {family.name} model that its {_description(folder)} "
            f"describes.\n{text}\n{_sizes(config, stored, dtype)} {_way_out(folder)}"
        )


def _way_out(folder: Path) -> str:
    if is_gguf(folder):
        return "Convert the model again, or download another file of it."
    return "Use the config.json that belongs to these weights."


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def in_ranges(names: Iterable[str]) -> list[str]:
    """`names` with ranges for the numbers of experts, and for those of layers in which the same experts are named.

    A name such as `layers.3.experts.5.up` has two numbers between dots, a layer's and an expert's; others are returned
    as they are. `layers.{0-3}.experts.{0-7,9}.up` stands for 36 names.
    """
    texts, experts = list[str](), dict[tuple[tuple[str, ...], int], list[int]]()
    for name in names:
        numbers = _NUMBER.findall(name)
        if len(numbers) == 2:
            experts.setdefault((tuple(_NUMBER.split(name)), int(numbers[0])), []).append(int(numbers[1]))
        else:
            texts.append(name)
    layers: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for (parts, layer), numbers in experts.items():
        layers.setdefault((parts, _ranges(numbers)), []).append(layer)
    for (parts, inner), numbers in layers.items():
        texts.append(f"{parts[0]}{_ranges(numbers)}{parts[1]}{inner}{parts[2]}")
    return texts


def _ranges(numbers: Sequence[int]) -> str:
    """The number itself, or braces around runs of several: `{0-7,9}`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"

"""`remask models` lists models with short names, and whether they fit this machine; `remask models pull` downloads one.

PyTorch is imported only if there may be a GPU, whose memory it tells.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from remask.checkpoint.files import raw_config
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import SHELF, ShelfEntry, is_in_cache
from remask.checkpoint.source import find_source
from remask.checks import BUNDLED_MODELS, CPU_QUANTIZATIONS, SMOLLM2, SMOLLM2_BLOCKS, Quantization
from remask.checks.values import check_real
from remask.cli.logs import print_notice
from remask.engine.capacity import DeviceMemory, weight_bytes
from remask.engine.config import AUTO, EngineConfig
from remask.engine.expected_speed import DATA_SHEETS, tokens_per_second
from remask.engine.fitting import Fit, cpu_quantizations, widest_fit
from remask.errors import CheckpointError
from remask.families import PRESETS, family_of
from remask.machine.cpu import BFLOAT16, instructions, may_have_gpu, memory, physical_cores, quota, usual_dtype
from remask.machine.speeds import read_speeds
from remask.model.config import ModelConfig
from remask.model.sizes import FORMATS

WIDEST = "bfloat16"  # dtype on the CPU of another machine
CORES = 8  # of the CPU of another machine
_APACHE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class ModelLine:
    """A line of the list: one model.

    Attributes:
        hub: its id on the Hugging Face hub; empty if it ships with remask or in a package of its own.
        licence: the licence of its weights; empty if unknown.
        download_bytes: approximate bytes to download, those of the weights as bfloat16; 0 if it ships.
        memory_bytes: bytes of the weights as bfloat16, int8 and int4.
        fits: `fits as FORM` if a default engine has room for canvases of the longest default length (`max_num_seqs` of
            them on a CUDA device), `tight as FORM` if it has room for shorter or fewer ones, `does not fit`, or `-` if
            the memory is unknown. FORM is the widest form with this property, which a start uses; `--quantization auto`
            may use a narrower one, the fastest that has room.
        on_disk: whether all of its files are on this disk.
        tokens_per_second: its speed; None if unknown.
        speed: whether the speed was measured here, by the last answer of `remask generate --prompt` or `remask chat`,
            or is computed: an upper bound for one request at one token a step, as int8 on a CPU.
    """

    name: str
    hub: str
    licence: str
    parameters: int
    download_bytes: int
    memory_bytes: dict[str, int]
    fits: str
    on_disk: bool
    tokens_per_second: float | None = None
    speed: Literal["measured", "computed"] | None = None

    @property
    def ships(self) -> bool:
        """Whether it needs no download from a hub."""
        return not self.hub


def shelf_line(entry: ShelfEntry, dtype: str, fit: Fit | None, device: str | int | None) -> ModelLine:
    """Return the line of a model of the shelf, with its default dtype, and its `fit` (None if memory is unknown).

    `device` is that of `tokens_per_second`; None computes no speed.
    """
    form_bytes = _form_bytes(entry.config)
    line = ModelLine(
        name=entry.name,
        hub=entry.hub,
        licence=entry.licence,
        parameters=entry.config.parameters,
        download_bytes=form_bytes[WIDEST],
        memory_bytes=form_bytes,
        fits=_fit_text(dtype, fit),
        on_disk=_on_disk(entry),
    )
    # Speeds on CPUs, whose number of cores is the device, are those as int8.
    is_computable = device is not None and ("int8" in form_bytes or not isinstance(device, int))
    if device is None or not is_computable or (fit is not None and not fit.length):
        return line
    return replace(line, tokens_per_second=tokens_per_second(entry.config, entry.cache, device), speed="computed")


def shipped_line(name: str, room: DeviceMemory | None, cpu_instructions: frozenset[str]) -> ModelLine:
    """Return the line of a shipped model, on a CPU with these instructions and this memory (None if unknown).

    It has no computed speed: these models are so small that matrix products take little of their time.
    """
    try:
        source = find_source(name)
    except CheckpointError:
        source = None  # the package of its weights is not installed
    if name in (SMOLLM2, SMOLLM2_BLOCKS):
        config = PRESETS["smollm2-135m"]
    else:
        assert source is not None
        raw = raw_config(source.weights)
        config = family_of(raw).config(raw)
    dtype, _ = usual_dtype(config.parameters, cpu_instructions)
    fit = None if room is None else widest_fit(config, FORMATS[dtype], room, EngineConfig())
    quantization = None if source is None else source.default_names.get("quantization")
    if fit is not None and quantization in CPU_QUANTIZATIONS:
        fit = replace(fit, quantization=quantization)
    return ModelLine(
        name=name,
        hub="",
        licence=_APACHE,
        parameters=config.parameters,
        download_bytes=0,
        memory_bytes=_form_bytes(config),
        fits=_fit_text(dtype, fit),
        on_disk=source is not None,
    )


def _form_bytes(config: ModelConfig) -> dict[str, int]:
    """Return the bytes of the weights as `WIDEST` and as each quantization for CPUs that they allow."""
    forms: list[Quantization | None] = [None, *cpu_quantizations(config)]
    return {form or WIDEST: weight_bytes(config, FORMATS[WIDEST], 1, form) for form in forms}


def _fit_text(dtype: str, fit: Fit | None) -> str:
    """Return `ModelLine.fits`, in which the form is the fit's quantization, or else `dtype`."""
    if fit is None:
        return "-"
    word = "fits as" if fit.is_full else "tight as"
    return f"{word} {fit.quantization or dtype}" if fit.length else "does not fit"


def _on_disk(entry: ShelfEntry) -> bool:
    """Whether all files of a model are in the hub's cache. Imports the hub's client only if some may be."""
    if not is_in_cache(entry.hub):
        return False
    from remask.checkpoint import hub

    return hub.on_disk(entry.hub, entry.revision) is not None


def lines_for(memory_bytes: int) -> list[ModelLine]:
    """Return the lines of all models, shipped ones first, on another machine with a CPU and this memory."""
    room = DeviceMemory(memory_bytes, memory_bytes, 1.0)
    fits = {entry.name: widest_fit(entry.config, FORMATS[WIDEST], room, EngineConfig()) for entry in SHELF.values()}
    shelf = [shelf_line(entry, WIDEST, fits[entry.name], CORES) for entry in SHELF.values()]
    return [*(shipped_line(name, room, BFLOAT16) for name in BUNDLED_MODELS), *shelf]


def local_lines() -> list[ModelLine]:
    """Return the lines of all models on this machine, shipped ones first, with measured speeds if there are any."""
    machine_memory = memory()
    room = None if machine_memory is None else DeviceMemory(*machine_memory, 1.0)
    lines = [shipped_line(name, room, instructions()) for name in BUNDLED_MODELS]
    lines += [_local_shelf_line(entry, room) for entry in SHELF.values()]
    speeds = read_speeds()
    rates = [speeds.get(line.name, speeds.get(line.hub)) for line in lines]
    return [
        line if rate is None else replace(line, tokens_per_second=rate, speed="measured")
        for line, rate in zip(lines, rates, strict=True)
    ]


def run(args: argparse.Namespace) -> int:
    """Print the list of models. Returns 0. Raises `ConfigError` if `--memory` is not a positive number."""
    check_real("--memory", args.memory, low=0, above=True, optional=True)
    lines = local_lines() if args.memory is None else lines_for(int(args.memory * 1e9))
    if args.json:
        print(json.dumps([asdict(line) for line in lines]))
        return 0
    print(table_text(lines))
    cores = local_cores() if args.memory is None else CORES
    print_notice(
        args,
        "tokens/s: * measured here, by the last answer; others computed, what one request comes to at most"
        + ("" if may_have_gpu() and args.memory is None else f" on {cores} cores as int8"),
    )
    return 0


def local_cores() -> int:
    """Return the number of cores that this process may use: physical ones, up to its quota."""
    return max(1, min(physical_cores(), int(quota() or physical_cores())))


def _local_shelf_line(entry: ShelfEntry, room: DeviceMemory | None) -> ModelLine:
    """Return the line of a model of the shelf on this machine: on its first GPU, or its CPU with this memory."""
    if may_have_gpu():
        # Imported here, as PyTorch takes seconds.
        import torch

        from remask.loading import fit_on, memory_of
        from remask.machine.device import dtype_name, resolve_device, resolve_dtype

        device, limits = resolve_device(AUTO), EngineConfig()
        if device.type == "cuda":
            dtype, _ = resolve_dtype(AUTO, device, entry.config.parameters)
            gpu_memory = memory_of(device, None)
            assert gpu_memory is not None
            gpu_name = torch.cuda.get_device_name(device).lower()
            sheet = next((model for model in DATA_SHEETS if model in gpu_name), None)
            fit = fit_on(entry.config, dtype, device, gpu_memory, limits)
            return shelf_line(entry, dtype_name(dtype), fit, sheet)
    usual_name, _ = usual_dtype(entry.config.parameters, instructions())
    cpu_fit = None if room is None else widest_fit(entry.config, FORMATS[usual_name], room, EngineConfig())
    return shelf_line(entry, usual_name, cpu_fit, local_cores())


def table_text(lines: Sequence[ModelLine]) -> str:
    """Return the lines as a text table, with a star behind measured speeds."""
    rows: list[tuple[str, ...]] = [("name", "weights", "download", "on disk", "licence", "memory", "tokens/s")]
    for line in lines:
        download = "ships" if line.ships else f"{line.download_bytes / 1e9:.1f} GB"
        speed = "-" if line.tokens_per_second is None else f"{float(f'{line.tokens_per_second:.2g}'):g}"
        millions = line.parameters / 1e6
        size = f"{millions / 1e3:.1f} B" if millions >= 50 else f"{millions:.1f} M"
        on_disk = "yes" if line.on_disk else "no"
        star = "*" if line.speed == "measured" else " "
        rows.append((line.name, size, download, on_disk, line.licence or "-", line.fits, speed + star))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    alignments = "<>>><<>"
    columns = list(zip(alignments, widths, strict=True))
    texts = ([f"{cell:{side}{width}}" for cell, (side, width) in zip(row, columns, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in texts)


def pull(args: argparse.Namespace) -> int:
    """Download a model, or what its revision has changed since, and print the folder. A bundled one is only named.

    Returns 0. Raises `ConfigError` if the model would not fit this machine, and `CheckpointError` if a download fails.
    """
    if args.name in BUNDLED_MODELS:
        print(f"{args.name} ships: {find_source(args.name).weights}")
        return 0
    # Imported here, as PyTorch takes seconds, and a misspelt name is refused before.
    from remask.checkpoint import hub
    from remask.loading import announce_download
    from remask.machine.device import resolve_device

    entry = SHELF.get(args.name)
    announce_download(ModelSettings(args.name, force=args.force), resolve_device(AUTO))
    repo, revision = (args.name, None) if entry is None else (entry.hub, entry.revision)
    print(f"{args.name}: {hub.fetch(repo, revision, progress=args.progress)}")
    return 0

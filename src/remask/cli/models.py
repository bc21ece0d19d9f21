"""`remask models`: the shelf, what of it fits this machine, and downloads."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from remask.checkpoint import hub
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import SHELF, Shelved
from remask.checkpoint.source import is_hub_id
from remask.checks import CPU_QUANTIZATIONS, Quantization
from remask.checks.values import real
from remask.cli.inspect import inspect_model
from remask.engine.capacity import default_length, weight_bytes
from remask.engine.config import AUTO, EngineConfig
from remask.engine.cpu_memory import CpuMemory, cpu_quantizations
from remask.errors import UnknownNameError
from remask.loading import announce_download
from remask.machine.cpu import memory
from remask.machine.device import DTYPES, resolve_device, resolve_dtype

WIDEST = "bfloat16"  # of CPUs that are not this one


@dataclass(frozen=True, slots=True)
class ShelfLine:
    """What is told of a model of the shelf.

    Attributes:
        name, hub, licence: as of `Shelved`.
        parameters: its weights.
        download_bytes: about what is downloaded: the weights as bfloat16.
        memory_bytes: of the weights as bfloat16, int8 and int4.
        fits: `fits as FORM` where an engine that is made by default has room for canvases of the longest default length
            (of `max_num_seqs` of them on a CUDA device), `tight as FORM` where it has for shorter or fewer ones, in the
            widest form in which it is so; or `does not fit`. What `--quantization auto` takes may be narrower: the
            fastest of what has room.
        on_disk: whether all of its files are here.
    """

    name: str
    hub: str
    licence: str
    parameters: int
    download_bytes: int
    memory_bytes: dict[str, int]
    fits: str
    on_disk: bool


def line_of(row: Shelved, device: torch.device, dtype: str, free: int) -> ShelfLine:
    """What is told of `row`, for `device` and the dtype that it takes by default.

    `free` bytes of a CPU's memory are left; that of a CUDA device is asked of it.
    """
    config, wanted, room = row.config, default_length(row.config), dict[str, int]()
    kinds: list[Quantization | None] = [None, *cpu_quantizations(config)]
    weights = {kind or WIDEST: weight_bytes(config, DTYPES[WIDEST], 1, kind) for kind in kinds}
    if device.type == "cpu":
        for kind in kinds:
            room[kind or dtype] = CpuMemory.before(config, DTYPES[dtype], kind, free).fitting_length()
    else:
        room[dtype] = (inspect_model(row.name).kv_tokens[dtype] or 0) // EngineConfig().max_num_seqs
    full = next((form for form, tokens in room.items() if tokens >= wanted), None)
    some = next((form for form, tokens in room.items() if tokens), None)
    fits = f"fits as {full}" if full else f"tight as {some}" if some else "does not fit"
    here = hub.on_disk(row.hub, row.revision) is not None
    return ShelfLine(row.name, row.hub, row.licence, config.parameters, weights[WIDEST], weights, fits, here)


def run(args: argparse.Namespace) -> int:
    """List the shelf."""
    real("--memory", args.memory, low=0, above=True, optional=True)
    device = resolve_device(AUTO) if args.memory is None else torch.device("cpu")
    free = int(args.memory * 1e9) if args.memory else (memory() or (0, 0))[1]
    lines = []
    for row in SHELF.values():
        dtype = WIDEST
        if args.memory is None:
            dtype = str(resolve_dtype(AUTO, device, row.config.parameters)[0]).removeprefix("torch.")
        lines.append(line_of(row, device, dtype, free))
    if args.json:
        print(json.dumps([asdict(each) for each in lines]))
    else:
        print(text(lines))
    return 0


def text(lines: Sequence[ShelfLine]) -> str:
    """The table that people see."""
    rows: list[tuple[str, ...]] = [("name", "parameters", "download", "int8", "int4", "here")]
    for each in lines:
        few = (f"{each.memory_bytes[kind] / 1e9:.1f} GB" for kind in CPU_QUANTIZATIONS)
        here = each.fits + (", on disk" if each.on_disk else "")
        sizes = f"{each.parameters / 1e9:.1f} B", f"{each.download_bytes / 1e9:.1f} GB", *few
        rows.append((each.name, *sizes, here))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<>>>><"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )


def pull(args: argparse.Namespace) -> int:
    """Download a model, or the files that its newest revision changed, and say where they are."""
    row = SHELF.get(args.name)
    if row is None and not is_hub_id(args.name):
        raise UnknownNameError("model of the shelf", args.name, SHELF)
    announce_download(ModelSettings(args.name, quantization=AUTO, force=args.force), resolve_device(AUTO))
    repo, revision = (args.name, None) if row is None else (row.hub, row.revision)
    print(f"{args.name}: {hub.fetch(repo, revision, progress=args.progress)}")
    return 0

"""`remask models`: the shelf, with what fits this machine. `remask models pull` downloads one of its models.

The list comes without PyTorch, unless there may be a GPU, whose memory PyTorch tells.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import SHELF, Shelved, begun
from remask.checks import CPU_QUANTIZATIONS, Quantization
from remask.checks.values import real
from remask.engine.capacity import DeviceMemory, weight_bytes
from remask.engine.config import AUTO, EngineConfig
from remask.engine.fitting import Fit, cpu_quantizations, widest
from remask.machine.cpu import instructions, may_have_gpu, memory, usual_dtype
from remask.model.sizes import FORMATS

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
            widest form in which it is so, which is the one that a start takes; or `does not fit`. What
            `--quantization auto` takes may be narrower: the fastest of what has room. `-`: the memory is not known.
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


def line_of(row: Shelved, dtype: str, fit: Fit | None) -> ShelfLine:
    """What is told of `row`, which has the dtype by default, and a `fit` where the memory is known."""
    config = row.config
    kinds: list[Quantization | None] = [None, *cpu_quantizations(config)]
    weights = {kind or WIDEST: weight_bytes(config, FORMATS[WIDEST], 1, kind) for kind in kinds}
    fits = "-"
    if fit is not None:
        word = "fits as" if fit.whole else "tight as"
        fits = f"{word} {fit.quantization or dtype}" if fit.length else "does not fit"
    return ShelfLine(row.name, row.hub, row.licence, config.parameters, weights[WIDEST], weights, fits, _on_disk(row))


def _on_disk(row: Shelved) -> bool:
    """Whether all files of `row` are in the hub's cache, whose client is imported where some may be."""
    if not begun(row.hub):
        return False
    from remask.checkpoint import hub

    return hub.on_disk(row.hub, row.revision) is not None


def lines_of(free: int) -> list[ShelfLine]:
    """The lines of all models, of a CPU that is not this one with so many bytes of free memory."""
    room = DeviceMemory(free, free, 1.0)
    fits = {row.name: widest(row.config, FORMATS[WIDEST], room, EngineConfig()) for row in SHELF.values()}
    return [line_of(row, WIDEST, fits[row.name]) for row in SHELF.values()]


def run(args: argparse.Namespace) -> int:
    """List the shelf."""
    real("--memory", args.memory, low=0, above=True, optional=True)
    lines = [_line_here(row) for row in SHELF.values()] if args.memory is None else lines_of(int(args.memory * 1e9))
    print(json.dumps([asdict(each) for each in lines]) if args.json else text(lines))
    return 0


def _line_here(row: Shelved) -> ShelfLine:
    """What is told of `row` on this machine."""
    if may_have_gpu():
        # Imported here, as PyTorch takes seconds.
        from remask.loading import fit_on, room_on
        from remask.machine.device import resolve_device, resolve_dtype

        device, limits = resolve_device(AUTO), EngineConfig()
        if device.type == "cuda":
            dtype, _ = resolve_dtype(AUTO, device, row.config.parameters)
            room = room_on(device, None)
            assert room is not None
            return line_of(row, str(dtype).removeprefix("torch."), fit_on(row.config, dtype, device, room, limits))
    there = memory()
    name, _ = usual_dtype(row.config.parameters, instructions())
    fit = None if there is None else widest(row.config, FORMATS[name], DeviceMemory(*there, 1.0), EngineConfig())
    return line_of(row, name, fit)


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
    # Imported here, as PyTorch takes seconds, and a misspelt name is told before.
    from remask.checkpoint import hub
    from remask.loading import announce_download
    from remask.machine.device import resolve_device

    row = SHELF.get(args.name)
    announce_download(ModelSettings(args.name, force=args.force), resolve_device(AUTO))
    repo, revision = (args.name, None) if row is None else (row.hub, row.revision)
    print(f"{args.name}: {hub.fetch(repo, revision, progress=args.progress)}")
    return 0

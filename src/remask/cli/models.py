"""`remask models`: what one word starts, with what fits this machine. `remask models pull` downloads one of them.

The list comes without PyTorch, unless there may be a GPU, whose memory PyTorch tells.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from remask.checkpoint.files import raw_config
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import SHELF, Shelved, begun
from remask.checkpoint.source import find_source
from remask.checks import BUNDLED_MODELS, CPU_QUANTIZATIONS, SMOLLM2, Quantization
from remask.checks.values import real
from remask.cli.logs import tell_people
from remask.engine.capacity import DeviceMemory, weight_bytes
from remask.engine.config import AUTO, EngineConfig
from remask.engine.expected_speed import DATA_SHEETS, tokens_per_second
from remask.engine.fitting import Fit, cpu_quantizations, widest_fit
from remask.errors import CheckpointError
from remask.families import PRESETS, family_of
from remask.machine.cpu import BFLOAT16, instructions, may_have_gpu, memory, physical_cores, quota, usual_dtype
from remask.machine.speeds import measured
from remask.model.config import ModelConfig
from remask.model.sizes import FORMATS

WIDEST = "bfloat16"  # of CPUs that are not this one
CORES = 8  # of these
_APACHE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class ModelLine:
    """What is told of a model that a word starts.

    Attributes:
        name: the word.
        hub: its id on the Hugging Face hub; empty: it ships with remask, or with a package of its own.
        licence: that of its weights, as far as we know; empty: see its page.
        parameters: its weights.
        download_bytes: about what is downloaded: the weights as bfloat16; 0 of one that ships.
        memory_bytes: of the weights as bfloat16, int8 and int4.
        fits: `fits as FORM` where an engine that is made by default has room for canvases of the longest default length
            (of `max_num_seqs` of them on a CUDA device), `tight as FORM` where it has for shorter or fewer ones, in the
            widest form in which it is so, which is the one that a start takes; or `does not fit`. What
            `--quantization auto` takes may be narrower: the fastest of what has room. `-`: the memory is not known.
        on_disk: whether all of its files are here.
        tokens_per_second: how fast it writes; None: not known.
        speed: whether that was measured here, by the last answer of `remask generate --prompt` or `remask chat`, or is
            computed: what one request comes to at most, at one token a step, as int8 on a CPU.
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
        """Whether nothing is downloaded from a hub."""
        return not self.hub


def line_of(row: Shelved, dtype: str, fit: Fit | None, device: str | int | None) -> ModelLine:
    """What is told of a `row` of the shelf, which has the dtype by default, and a `fit` where the memory is known.

    `device` is what a speed is computed for, as of `tokens_per_second`; None: no speed is.
    """
    weights = _weights(row.config)
    line = ModelLine(
        *(row.name, row.hub, row.licence, row.config.parameters, weights[WIDEST], weights),
        *(_fits(dtype, fit), _on_disk(row)),
    )
    if device is None or (isinstance(device, int) and "int8" not in weights) or (fit is not None and not fit.length):
        return line
    return replace(line, tokens_per_second=tokens_per_second(row.config, row.cache, device), speed="computed")


def of_shipped(name: str, room: DeviceMemory | None, known: frozenset[str]) -> ModelLine:
    """What is told of a model that ships, on a CPU with the `known` instructions and this `room`.

    No speed is computed of so small a model, most of whose time is not that of products.
    """
    try:
        source = find_source(name)
    except CheckpointError:
        source = None  # the package of its weights is not installed
    if name == SMOLLM2:
        config = PRESETS["smollm2-135m"]
    else:
        assert source is not None
        raw = raw_config(source.weights)
        config = family_of(raw).config(raw)
    dtype, _ = usual_dtype(config.parameters, known)
    fit = None if room is None else widest_fit(config, FORMATS[dtype], room, EngineConfig())
    advised = None if source is None else source.usual.get("quantization")
    if fit is not None and advised in CPU_QUANTIZATIONS:
        fit = replace(fit, quantization=advised)
    return ModelLine(
        *(name, "", _APACHE, config.parameters, 0, _weights(config), _fits(dtype, fit), source is not None)
    )


def _weights(config: ModelConfig) -> dict[str, int]:
    """Bytes of the weights as `WIDEST` and quantized for CPUs, where they can be."""
    kinds: list[Quantization | None] = [None, *cpu_quantizations(config)]
    return {kind or WIDEST: weight_bytes(config, FORMATS[WIDEST], 1, kind) for kind in kinds}


def _fits(dtype: str, fit: Fit | None) -> str:
    if fit is None:
        return "-"
    word = "fits as" if fit.is_full else "tight as"
    return f"{word} {fit.quantization or dtype}" if fit.length else "does not fit"


def _on_disk(row: Shelved) -> bool:
    """Whether all files of `row` are in the hub's cache, whose client is imported where some may be."""
    if not begun(row.hub):
        return False
    from remask.checkpoint import hub

    return hub.on_disk(row.hub, row.revision) is not None


def lines_of(free: int) -> list[ModelLine]:
    """The lines of all models, those that ship first, of a CPU that is not this one with so many free bytes."""
    room = DeviceMemory(free, free, 1.0)
    fits = {row.name: widest_fit(row.config, FORMATS[WIDEST], room, EngineConfig()) for row in SHELF.values()}
    shelf = [line_of(row, WIDEST, fits[row.name], CORES) for row in SHELF.values()]
    return [*(of_shipped(name, room, BFLOAT16) for name in BUNDLED_MODELS), *shelf]


def lines_here() -> list[ModelLine]:
    """The lines of all models on this machine, those that ship first, with speeds that were measured."""
    there = memory()
    room = None if there is None else DeviceMemory(*there, 1.0)
    ships = [of_shipped(name, room, instructions()) for name in BUNDLED_MODELS]
    speeds, lines = measured(), [*ships, *(_line_here(row, room) for row in SHELF.values())]
    rates = [speeds.get(line.name, speeds.get(line.hub)) for line in lines]
    return [
        line if rate is None else replace(line, tokens_per_second=rate, speed="measured")
        for line, rate in zip(lines, rates, strict=True)
    ]


def run(args: argparse.Namespace) -> int:
    """List the models."""
    real("--memory", args.memory, low=0, above=True, optional=True)
    lines = lines_here() if args.memory is None else lines_of(int(args.memory * 1e9))
    if args.json:
        print(json.dumps([asdict(each) for each in lines]))
        return 0
    print(text(lines))
    cores = cores_here() if args.memory is None else CORES
    tell_people(
        args,
        "tokens/s: * measured here, by the last answer; others computed, what one request comes to at most"
        + ("" if may_have_gpu() and args.memory is None else f" on {cores} cores as int8"),
    )
    return 0


def cores_here() -> int:
    """Cores that a model may compute on here."""
    return max(1, min(physical_cores(), int(quota() or physical_cores())))


def _line_here(row: Shelved, room: DeviceMemory | None) -> ModelLine:
    """What is told of `row` on this machine, whose memory has this `room`."""
    if may_have_gpu():
        # Imported here, as PyTorch takes seconds.
        import torch

        from remask.loading import fit_on, room_on
        from remask.machine.device import resolve_device, resolve_dtype

        device, limits = resolve_device(AUTO), EngineConfig()
        if device.type == "cuda":
            dtype, _ = resolve_dtype(AUTO, device, row.config.parameters)
            on_card = room_on(device, None)
            assert on_card is not None
            name = torch.cuda.get_device_name(device).lower()
            sheet = next((each for each in DATA_SHEETS if each in name), None)
            fit = fit_on(row.config, dtype, device, on_card, limits)
            return line_of(row, str(dtype).removeprefix("torch."), fit, sheet)
    name, _ = usual_dtype(row.config.parameters, instructions())
    on_cpu = None if room is None else widest_fit(row.config, FORMATS[name], room, EngineConfig())
    return line_of(row, name, on_cpu, cores_here())


def text(lines: Sequence[ModelLine]) -> str:
    """The table that people see. A star stands behind a speed that was measured."""
    rows: list[tuple[str, ...]] = [("name", "weights", "download", "on disk", "licence", "memory", "tokens/s")]
    for each in lines:
        download = "ships" if each.ships else f"{each.download_bytes / 1e9:.1f} GB"
        rate = "-" if each.tokens_per_second is None else f"{each.tokens_per_second:.2g}"
        speed = f"{float(rate):g}" if rate != "-" else rate
        size = each.parameters / 1e6
        rows.append(
            (
                *(each.name, f"{size / 1e3:.1f} B" if size >= 50 else f"{size:.1f} M"),
                *(download, "yes" if each.on_disk else "no"),
                *(each.licence or "-", each.fits, speed + ("*" if each.speed == "measured" else " ")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<>>><<>"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )


def pull(args: argparse.Namespace) -> int:
    """Download a model, or the files that its newest revision changed, and say where they are."""
    if args.name in BUNDLED_MODELS:
        print(f"{args.name} ships: {find_source(args.name).weights}")
        return 0
    # Imported here, as PyTorch takes seconds, and a misspelt name is told before.
    from remask.checkpoint import hub
    from remask.loading import announce_download
    from remask.machine.device import resolve_device

    row = SHELF.get(args.name)
    announce_download(ModelSettings(args.name, force=args.force), resolve_device(AUTO))
    repo, revision = (args.name, None) if row is None else (row.hub, row.revision)
    print(f"{args.name}: {hub.fetch(repo, revision, progress=args.progress)}")
    return 0

"""Loads a model: in which numbers, with how many threads and in how many processes it computes, and why."""

import logging
from dataclasses import dataclass

import torch

from remask.checkpoint import hub
from remask.checkpoint.loaded import FoundModel, LoadedModel
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import shelved
from remask.checks import Quantization
from remask.engine.capacity import DeviceMemory, check_weights_fit, gigabytes, weight_bytes
from remask.engine.config import DEFAULT_UTILIZATION
from remask.engine.cpu_memory import resolve_quantization
from remask.errors import ConfigError
from remask.machine.cpu import CpuReading, memory, physical_cores
from remask.machine.device import Threads, free_memory, resolve_dtype, resolve_threads, set_threads
from remask.model.config import ModelConfig
from remask.model.quantised import check_quantization, described
from remask.model.ranks import Ranks, Shard
from remask.parallel import lead
from remask.sampling.whole_canvas import CANVAS, STEPS

log = logging.getLogger(__name__)

ANNOUNCED = 1e14
"""Operations of an answer, on a CPU, from which on they are announced: a quarter of an hour at 100 GFLOP/s."""
_FORCE = "Nothing was downloaded; --force goes on (force=True)"


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that has been loaded, and how that was chosen.

    Attributes:
        ranks: the processes that it is spread over.
        threads: those of each process.
        numbers: in which numbers it computes, and why: the first half of the start-up line.
    """

    loaded: LoadedModel
    ranks: Ranks
    threads: Threads
    numbers: str


def open_model(
    found: FoundModel, device: torch.device, utilization: float | None = None, since: CpuReading | None = None
) -> Opened:
    """Load what was `found` on `device`. What can be refused without the weights is, as reading them may take minutes.

    On CUDA it may take a share of `utilization` of the device's memory. The number of threads follows from what other
    processes have done `since` then. Raises `ConfigError` and `CheckpointError`.
    """
    if device.type == "cpu":
        _announce_work(found.config)
    ranks = found.settings.tensor_parallel
    usual = found.usual.get("quantization")
    dtype, quantization, numbers = _numbers(
        found.settings, found.config, device, utilization, found.quantization, usual
    )
    if ranks == 1:
        loaded = found.load(dtype, device, quantization=quantization)
        return Opened(loaded, Ranks(), _set_threads(found, device, since), numbers)
    threads = _set_threads(found, device, since)
    loaded, several = lead.start(found, dtype, device, threads.number, quantization)
    return Opened(loaded, several, threads, numbers)


def announce_download(settings: ModelSettings, device: torch.device | None, utilization: float | None = None) -> None:
    """Say what loading a model of the shelf will download, and in which numbers it will compute on `device`.

    None: it is not computed. Nothing is said, and the hub is not asked, where it is on this disk. Raises `ConfigError`
    where it fits neither the memory nor the disk, unless `settings.force`.
    """
    row = None if settings.load_format == "dummy" else shelved(settings.model)
    if row is None or hub.on_disk(row.hub, row.revision) is not None:
        return
    computed = ""
    if device is not None:
        try:
            dtype, kind, _ = _numbers(settings, row.config, device, utilization)
        except ConfigError as error:
            raise ConfigError(f"{row.name}: {error}. {_FORCE}") from error
        fits = "is forced" if settings.force else "fits"
        computed = f"; it {fits} on {device} as {kind or str(dtype).removeprefix('torch.')}"
    folder, free = hub.cache_disk()
    size = weight_bytes(row.config, torch.bfloat16)
    if size > free and not settings.force:
        raise ConfigError(
            f"{row.name}: the weights take {gigabytes(size)}, and the disk of {folder} has {gigabytes(free)} left: "
            f"free some, or set HF_HOME to a folder on another disk. {_FORCE if device else 'Nothing was downloaded'}"
        )
    log.warning("downloading %s (%s) into %s, %s%s", row.name, row.hub, folder, gigabytes(size), computed)


def _announce_work(config: ModelConfig) -> None:
    """Warn of what an answer takes, where a model denoises its whole canvas whatever an answer's length is."""
    if not config.whole_canvas:
        return
    rows = min(CANVAS, config.max_length)
    work = 2 * config.active_parameters * rows * STEPS
    if work > ANNOUNCED:
        log.warning(
            "each answer denoises a canvas of %d positions, and in %d steps this is %.1f PFLOP, %.0f hours at 100 "
            "GFLOP/s; its K and V are %s beside the weights. Fewer steps_per_block take less, and so does a "
            "uniform.canvas_length shorter than the model was trained with; both change the answer",
            *(rows, STEPS, work / 1e15, work / 1e11 / 3600, gigabytes(rows * 2 * config.kv_numbers)),
        )


def _numbers(
    settings: ModelSettings,
    config: ModelConfig,
    device: torch.device,
    utilization: float | None,
    stored: Quantization | None = None,
    usual: str | None = None,
) -> tuple[torch.dtype, Quantization | None, str]:
    """The dtype, the kind of few bits, and both with the reasons in words.

    Files may have `stored` a kind, and may name a `usual` one. Raises `ConfigError` where the weights do not fit.
    """
    ranks, room = settings.tensor_parallel, _room(device, utilization)
    dtype, why = resolve_dtype(settings.dtype, device, config.parameters)
    quantization, bits_why = resolve_quantization(
        settings.quantization, stored, config, dtype, device, room, ranks, usual
    )
    for rank in range(ranks):
        check_quantization(quantization, Shard(rank, ranks).part(config), device)
    if room is not None and not settings.force:
        check_weights_fit(config, dtype, room, ranks, apart=device.type == "cuda", quantization=quantization)
    name = str(dtype).removeprefix("torch.")
    return dtype, quantization, f"dtype={name} ({why}) quantization={described(quantization, device)} ({bits_why})"


def _room(device: torch.device, utilization: float | None) -> DeviceMemory | None:
    """What the weights may take; None where the system does not say."""
    if device.type == "cuda":
        free, total = free_memory(device)
        return DeviceMemory(total, free, utilization or DEFAULT_UTILIZATION)
    there = memory()
    return None if there is None else DeviceMemory(*there, 1.0)


def _set_threads(found: FoundModel, device: torch.device, since: CpuReading | None) -> Threads:
    """Set the number of threads that each process computes on, and return it."""
    asked, processes = found.settings.threads, found.settings.tensor_parallel
    if asked is None and device.type != "cpu":
        return Threads(torch.get_num_threads(), "PyTorch's own, as the model is on another device")
    threads = resolve_threads(asked, found.config.parameters // processes, found.settings.spare_cores, since)
    share = max(1, physical_cores() // processes)
    if asked is None and processes > 1 and threads.number > share:
        threads = Threads(share, f"{physical_cores()} cores for {processes} processes")
    set_threads(threads)
    return threads

"""Loads a model: in which numbers, with how many threads and in how many processes it computes, and why."""

import logging
from contextlib import suppress
from dataclasses import dataclass

import torch

from remask.checkpoint import hub
from remask.checkpoint.loaded import FoundModel, LoadedModel
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.shelf import shelf_entry
from remask.checks import Quantization
from remask.engine.capacity import DeviceMemory, check_weights_fit, gigabytes, weight_bytes
from remask.engine.config import AUTO, DEFAULT_UTILIZATION, EngineConfig
from remask.engine.cpu_memory import resolve_quantization
from remask.engine.fitting import CpuMemory, Fit, widest_fit
from remask.errors import ConfigError
from remask.machine.cpu import BFLOAT16, CpuReading, instructions, memory, physical_cores
from remask.machine.device import Threads, allocating, free_memory, resolve_dtype, resolve_threads, set_threads
from remask.model.config import ModelConfig
from remask.model.executors import resolve_executor
from remask.model.quantized import check_quantization, kernel_description
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
    found: FoundModel, device: torch.device, limits: EngineConfig | None = None, since: CpuReading | None = None
) -> Opened:
    """Load what was `found` on `device`. What can be refused without the weights is, as reading them may take minutes.

    `limits` are those of its engine. The number of threads follows from what other processes have done `since` then.
    Raises `ConfigError` and `CheckpointError`.
    """
    if device.type == "cpu":
        _announce_work(found.config)
    ranks = found.settings.tensor_parallel
    usual = found.default_names.get("quantization")
    numbers = _numbers(found.settings, found.config, device, limits or EngineConfig(), found.quantization, usual)
    if numbers.chosen is not None:
        log.warning("%s: %s", found.settings.model, numbers.chosen)
    dtype, quantization = numbers.dtype, numbers.quantization
    size = weight_bytes(found.config, dtype, ranks, quantization)
    what = f"{gigabytes(size)} of weights as {quantization or _name(dtype)}"
    less = "int8 or --quantization int4" if device.type == "cpu" else "fp8 or a higher --tensor-parallel"
    with allocating(what, f"--quantization {less}, or a smaller model", device):
        if ranks == 1:
            loaded = found.load(dtype, device, quantization=quantization)
            return Opened(loaded, Ranks(), _set_threads(found, device, since), numbers.words)
        threads = _set_threads(found, device, since)
        loaded, several = lead.start(found, dtype, device, threads.number, quantization)
    return Opened(loaded, several, threads, numbers.words)


def announce_download(settings: ModelSettings, device: torch.device | None, limits: EngineConfig | None = None) -> None:
    """Say what loading a model of the shelf will download, and in which numbers it will compute on `device`.

    None: it is not computed. Nothing is said, and the hub is not asked, where it is on this disk. Raises `ConfigError`
    where it fits neither the memory nor the disk, unless `settings.force`.
    """
    row = None if settings.load_format == "dummy" else shelf_entry(settings.model)
    if row is None or hub.on_disk(row.hub, row.revision) is not None:
        return
    computed = ""
    if device is not None:
        try:
            numbers = _numbers(settings, row.config, device, limits or EngineConfig())
        except ConfigError as error:
            raise ConfigError(f"{row.name}: {error}. {_FORCE}") from error
        fits = "is forced" if settings.force else "fits"
        computed = f"; it {fits} on {device} as {numbers.quantization or _name(numbers.dtype)}"
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


@dataclass(frozen=True, slots=True)
class _Numbers:
    """In which numbers a model computes.

    Attributes:
        dtype: of hidden states, and of what is not quantized.
        quantization: what its matrices are quantized to; None: they are of the dtype.
        words: both, with the reasons.
        chosen: what is told where matrices are quantized because of the memory alone; None: they are not.
    """

    dtype: torch.dtype
    quantization: Quantization | None
    words: str
    chosen: str | None = None


def _numbers(
    settings: ModelSettings,
    config: ModelConfig,
    device: torch.device,
    limits: EngineConfig,
    stored: Quantization | None = None,
    usual: str | None = None,
) -> _Numbers:
    """The dtype, and how matrices are kept.

    Files may have `stored` a kind, and may name a `usual` one. Where neither files nor settings say anything of
    precision, it is the widest that fits. Raises `ConfigError` where the weights do not fit.
    """
    ranks, room, on_cpu = settings.tensor_parallel, room_on(device, limits.gpu_memory_utilization), device.type == "cpu"
    dtype, dtype_reason = resolve_dtype(settings.dtype, device, config.parameters)
    is_automatic = (
        settings.dtype == AUTO and settings.quantization is None and stored is None and not (usual and on_cpu)
    )
    fit, chosen = None, None
    if is_automatic and room is not None and device.type in ("cpu", "cuda"):
        fit = fit_on(config, dtype, device, room, limits, ranks)
    if fit is not None and fit.quantization is not None:
        quantization: Quantization | None = fit.quantization
        quantization_reason = f"auto: {_name(dtype)} has no room"
        chosen = (
            f"as {_name(dtype)} the weights take {gigabytes(weight_bytes(config, dtype, ranks))}, of "
            f"{gigabytes(max(0, room.room if room else 0))} that are left: the matrices are {quantization}, with room "
            f"for canvases of {min(fit.length, fit.required)} tokens; --quantization and --dtype choose otherwise"
        )
    else:
        quantization, quantization_reason = resolve_quantization(
            settings.quantization, stored, config, dtype, device, room, ranks, usual
        )
    for rank in range(ranks):
        check_quantization(quantization, Shard(rank, ranks).part(config), device)
    if room is not None and not settings.force:
        native = not on_cpu or bool(BFLOAT16 & instructions())
        check_weights_fit(
            config, dtype, room, ranks, apart=device.type == "cuda", quantization=quantization, bfloat16=native
        )
        if on_cpu and fit is not None and not fit.length:
            raise CpuMemory.before_loading(config, dtype, quantization, room.room, ranks).shortage_error(
                fit.required, 0
            )
    kernel = kernel_description(quantization, device)
    words = f"dtype={_name(dtype)} ({dtype_reason}) quantization={kernel} ({quantization_reason})"
    return _Numbers(dtype, quantization, words, chosen)


def fit_on(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    room: DeviceMemory,
    limits: EngineConfig,
    ranks: int = 1,
) -> Fit:
    """The widest form that fits into `room` on `device`, a CPU or CUDA device; see `widest_fit`."""
    if device.type == "cpu":
        return widest_fit(config, dtype, room, limits, ranks)
    kinds = list[Quantization]()
    with suppress(ConfigError):
        check_quantization("fp8", Shard(0, ranks).part(config), device)
        kinds.append("fp8")
    return widest_fit(
        config, dtype, room, limits, ranks, kinds, resolve_executor("auto", config, device).attention(config)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def room_on(device: torch.device, utilization: float | None) -> DeviceMemory | None:
    """Return the memory that weights may use on `device`; None if the system does not tell it."""
    if device.type == "cuda":
        free, total = free_memory(device)
        return DeviceMemory(total, free, utilization or DEFAULT_UTILIZATION)
    machine_memory = memory()
    return None if machine_memory is None else DeviceMemory(*machine_memory, 1.0)


def _set_threads(found: FoundModel, device: torch.device, since: CpuReading | None) -> Threads:
    """Set the number of threads of this process, and return it with the reason."""
    thread_count, processes = found.settings.threads, found.settings.tensor_parallel
    if thread_count is None and device.type != "cpu":
        return Threads(torch.get_num_threads(), "PyTorch's own, as the model is on another device")
    threads = resolve_threads(thread_count, found.config.parameters // processes, found.settings.spare_cores, since)
    share = max(1, physical_cores() // processes)
    if thread_count is None and processes > 1 and threads.number > share:
        threads = Threads(share, f"{physical_cores()} cores for {processes} processes")
    set_threads(threads)
    return threads

"""Loads a model, and chooses the precision, the number of threads and the processes that compute it."""

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
from remask.machine.device import (
    Threads,
    allocating,
    dtype_name,
    resolve_dtype,
    resolve_threads,
    set_threads,
    trim_cuda_memory,
)
from remask.model.config import ModelConfig
from remask.model.executors import resolve_executor
from remask.model.quantized import check_quantization, kernel_description
from remask.model.ranks import Ranks, Shard
from remask.parallel import lead
from remask.sampling.whole_canvas import CANVAS, STEPS

log = logging.getLogger(__name__)

ANNOUNCED_WORK = 1e14
"""FLOPs of one answer on a CPU, above which a warning is logged: a quarter of an hour at 100 GFLOP/s."""
_FORCE = "Nothing was downloaded; --force goes on (force=True)"


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that has been loaded.

    Attributes:
        ranks: the processes that hold its parts.
        threads: the number of threads of each process, and the reason.
        precision: dtype and quantization with the reasons, the first half of the start-up line.
    """

    loaded: LoadedModel
    ranks: Ranks
    threads: Threads
    precision: str


def open_model(
    model: FoundModel, device: torch.device, limits: EngineConfig | None = None, reading: CpuReading | None = None
) -> OpenModel:
    """Load the weights of a model on `device`, in further processes if it has `tensor_parallel`, and set its threads.

    `limits` are those of its engine. By default the number of threads leaves out cores that other processes have used
    since `reading`. Raises `ConfigError`, before weights are read, if the settings or the memory do not allow the
    model, and `CheckpointError` if files cannot be used.
    """
    if device.type == "cpu":
        _announce_work(model.config)
    ranks = model.settings.tensor_parallel
    default = model.default_names.get("quantization")
    precision = _resolve_precision(
        model.settings, model.config, device, limits or EngineConfig(), model.quantization, default
    )
    if precision.notice is not None:
        log.warning("%s: %s", model.settings.model, precision.notice)
    dtype, quantization = precision.dtype, precision.quantization
    size = weight_bytes(model.config, dtype, ranks, quantization)
    weights = f"{gigabytes(size)} of weights as {quantization or dtype_name(dtype)}"
    smaller = "int8 or --quantization int4" if device.type == "cpu" else "fp8 or a higher --tensor-parallel"
    with allocating(weights, f"--quantization {smaller}, or a smaller model", device):
        if ranks == 1:
            loaded = model.load(dtype, device, quantization=quantization)
            return OpenModel(loaded, Ranks(), _set_threads(model, device, reading), precision.description)
        threads = _set_threads(model, device, reading)
        loaded, processes = lead.start(model, dtype, device, threads.count, quantization)
    return OpenModel(loaded, processes, threads, precision.description)


def announce_download(settings: ModelSettings, device: torch.device | None, limits: EngineConfig | None = None) -> None:
    """Log what loading a model of the shelf will download, and the precision in which `device` will compute it.

    `device` is None if it will not be computed. Does nothing, without a request to the hub, if the model is on this
    disk. Raises `ConfigError` if it does not fit into the memory or the disk, unless `settings.force`.
    """
    entry = None if settings.load_format == "dummy" else shelf_entry(settings.model)
    if entry is None or hub.on_disk(entry.hub, entry.revision) is not None:
        return
    computed = ""
    if device is not None:
        try:
            precision = _resolve_precision(settings, entry.config, device, limits or EngineConfig())
        except ConfigError as error:
            raise ConfigError(f"{entry.name}: {error}. {_FORCE}") from error
        fits = "is forced" if settings.force else "fits"
        computed = f"; it {fits} on {device} as {precision.quantization or dtype_name(precision.dtype)}"
    folder, free = hub.cache_disk()
    size = weight_bytes(entry.config, torch.bfloat16)
    if size > free and not settings.force:
        raise ConfigError(
            f"{entry.name}: the weights take {gigabytes(size)}, and the disk of {folder} has {gigabytes(free)} left: "
            f"free some, or set HF_HOME to a folder on another disk. {_FORCE if device else 'Nothing was downloaded'}"
        )
    log.warning("downloading %s (%s) into %s, %s%s", entry.name, entry.hub, folder, gigabytes(size), computed)


def _announce_work(config: ModelConfig) -> None:
    """Log a warning if the work of an answer is large. Only for models that denoise a whole canvas for any answer."""
    if not config.whole_canvas:
        return
    canvas_length = min(CANVAS, config.max_length)
    work = 2 * config.active_parameters * canvas_length * STEPS
    if work > ANNOUNCED_WORK:
        log.warning(
            "each answer denoises a canvas of %d positions, and in %d steps this is %.1f PFLOP, %.0f hours at 100 "
            "GFLOP/s; its K and V are %s beside the weights. Fewer steps_per_block take less, and so does a "
            "uniform.canvas_length shorter than the model was trained with; both change the answer",
            *(canvas_length, STEPS, work / 1e15, work / 1e11 / 3600),
            gigabytes(canvas_length * 2 * config.kv_numbers),
        )


@dataclass(frozen=True, slots=True)
class _Precision:
    """The number formats in which a model computes.

    Attributes:
        dtype: of hidden states, and of weights that are not quantized.
        quantization: of the matrices; None if they have the dtype.
        description: both, with the reasons.
        notice: a warning for users if only a lack of memory led to the quantization, else None.
    """

    dtype: torch.dtype
    quantization: Quantization | None
    description: str
    notice: str | None = None


def _resolve_precision(
    settings: ModelSettings,
    config: ModelConfig,
    device: torch.device,
    limits: EngineConfig,
    file_quantization: Quantization | None = None,
    default: str | None = None,
) -> _Precision:
    """Return the dtype and the quantization of a model on `device`. Raises `ConfigError` if the weights do not fit.

    `file_quantization` is that of the model's files, and `default` the name of the one that they recommend on a CPU. If
    neither files nor settings determine the precision, it is the widest that fits.
    """
    ranks = settings.tensor_parallel
    device_memory = memory_of(device, limits.gpu_memory_utilization)
    dtype, dtype_reason = resolve_dtype(settings.dtype, device, config.parameters)
    is_automatic = (
        settings.dtype == AUTO
        and settings.quantization is None
        and file_quantization is None
        and not (default and device.type == "cpu")
    )
    fit = None
    if is_automatic and device_memory is not None and device.type in ("cpu", "cuda"):
        fit = fit_on(config, dtype, device, device_memory, limits, ranks)
    notice = None
    if device_memory is not None and fit is not None and fit.quantization is not None:
        quantization: Quantization | None = fit.quantization
        quantization_reason = f"auto: {dtype_name(dtype)} has no room"
        notice = _fit_notice(fit, config, dtype, device_memory, ranks)
    else:
        quantization, quantization_reason = resolve_quantization(
            settings.quantization, file_quantization, config, dtype, device, device_memory, ranks, default
        )
    for rank in range(ranks):
        check_quantization(quantization, Shard(rank, ranks).part(config), device)
    if device_memory is not None and not settings.force:
        _check_memory(config, dtype, quantization, device, device_memory, ranks=ranks, fit=fit)
    kernel = kernel_description(quantization, device)
    description = f"dtype={dtype_name(dtype)} ({dtype_reason}) quantization={kernel} ({quantization_reason})"
    return _Precision(dtype, quantization, description, notice)


def _fit_notice(fit: Fit, config: ModelConfig, dtype: torch.dtype, device_memory: DeviceMemory, ranks: int) -> str:
    """The warning that the matrices are quantized because the weights have no room as `dtype`."""
    return (
        f"as {dtype_name(dtype)} the weights take {gigabytes(weight_bytes(config, dtype, ranks))}, of "
        f"{gigabytes(max(0, device_memory.room))} that are left: the matrices are {fit.quantization}, with room "
        f"for canvases of {min(fit.length, fit.required)} tokens; --quantization and --dtype choose otherwise"
    )


def _check_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization | None,
    device: torch.device,
    device_memory: DeviceMemory,
    *,
    ranks: int,
    fit: Fit | None,
) -> None:
    """Raise `ConfigError` if the weights do not fit, or on a CPU, if the `fit` leaves no room for a canvas."""
    on_cpu = device.type == "cpu"
    check_weights_fit(
        config,
        dtype,
        device_memory,
        ranks,
        apart=device.type == "cuda",
        quantization=quantization,
        bfloat16=not on_cpu or bool(BFLOAT16 & instructions()),
    )
    if on_cpu and fit is not None and not fit.length:
        before = CpuMemory.before_loading(config, dtype, quantization, device_memory.room, ranks)
        raise before.shortage_error(fit.required, 0)


def fit_on(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    device_memory: DeviceMemory,
    limits: EngineConfig,
    ranks: int = 1,
) -> Fit:
    """The widest precision that fits into `device_memory` on `device`, a CPU or a CUDA device; see `widest_fit`."""
    if device.type == "cpu":
        return widest_fit(config, dtype, device_memory, limits, ranks)
    quantizations = list[Quantization]()
    with suppress(ConfigError):
        check_quantization("fp8", Shard(0, ranks).part(config), device)
        quantizations.append("fp8")
    attention = resolve_executor("auto", config, device).attention(config)
    return widest_fit(config, dtype, device_memory, limits, ranks, quantizations, attention)


def memory_of(device: torch.device, utilization: float | None) -> DeviceMemory | None:
    """Return the memory of `device`, None if unknown. Only the share `utilization` of a CUDA device may be used."""
    if device.type == "cuda":
        return DeviceMemory(*trim_cuda_memory(device), utilization or DEFAULT_UTILIZATION)
    machine_memory = memory()
    return None if machine_memory is None else DeviceMemory(*machine_memory, 1.0)


def _set_threads(model: FoundModel, device: torch.device, reading: CpuReading | None) -> Threads:
    """Set the number of threads of this process, and return it with the reason."""
    thread_count = model.settings.threads
    processes = model.settings.tensor_parallel
    if thread_count is None and device.type != "cpu":
        return Threads(torch.get_num_threads(), "PyTorch's own, as the model is on another device")
    threads = resolve_threads(thread_count, model.config.parameters // processes, model.settings.spare_cores, reading)
    max_threads = max(1, physical_cores() // processes)
    if thread_count is None and processes > 1 and threads.count > max_threads:
        threads = Threads(max_threads, f"{physical_cores()} cores for {processes} processes")
    set_threads(threads)
    return threads

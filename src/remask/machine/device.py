"""Chooses the device, the number format and the number of CPU threads. `auto` depends on the machine."""

import errno
import functools
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from remask.checks.values import check_whole
from remask.errors import ConfigError, IntegrityError, RankLostError, UnknownNameError
from remask.machine.cpu import (
    CpuReading,
    cores,
    instructions,
    measure_others_use,
    memory,
    physical_cores,
    quota,
    usual_dtype,
)

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Operations of a smaller model end before a second thread has started its part, and each waits for the slower thread.
PARAMETERS_A_THREAD = 2_000_000


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of CPU threads, and the reason for it in words."""

    count: int
    reason: str


def resolve_device(name: str) -> torch.device:
    """The device `name`; "auto": the first CUDA device, or the CPU. Raises `ConfigError` if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        usable = "'auto', 'cpu' or 'cuda'" if torch.cuda.is_available() else "'auto' or 'cpu'"
        raise ConfigError(f"device {name!r} cannot be used ({reason}); use {usable}") from error
    return device


_NO_MEMORY = "DefaultCPUAllocator"
# Parts of PyTorch's errors that mean that the device itself has failed.
_DEVICE_FAILED = ("CUDA error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error", "device-side assert")


def is_fatal(error: Exception) -> bool:
    """Whether the device or the engine's memory cannot be trusted after `error`."""
    if isinstance(error, IntegrityError | RankLostError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _DEVICE_FAILED)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error)


@contextmanager
def allocating(noun: str, advice: str, device: torch.device) -> Iterator[None]:
    """Raise `ConfigError` if memory runs out in the block.

    `noun` is what the block allocates, in the plural, and `advice` says how to need less memory, after "Use".
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        total_and_free = memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[::-1]
        free = "" if total_and_free is None else f" ({total_and_free[1] / 1e9:.2f} GB are left)"
        raise ConfigError(
            f"the memory of {device} ran out while {noun} were allocated{free}: other programs or a limit have it. "
            f"Use {advice}"
        ) from error


def trim_cuda_memory(device: torch.device) -> tuple[int, int]:
    """Release unused memory of a CUDA device, and return its total and free bytes.

    That is memory of objects in reference cycles, such as an engine and its parts, and PyTorch's cache.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` in settings, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, device: torch.device, parameters: int) -> tuple[torch.dtype, str]:
    """The number format `name` for a model of `parameters` weights, and the reason for the choice in words.

    "auto" is bfloat16 on accelerators, and that of `usual_dtype` on CPUs. Raises `UnknownNameError` for unknown names.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UnknownNameError("dtype", name, ["auto", *DTYPES])
        return DTYPES[name], "as asked"
    if device.type != "cpu":
        return torch.bfloat16, "auto: an accelerator"
    usual_name, reason = usual_dtype(parameters, instructions())
    return DTYPES[usual_name], reason


def resolve_threads(count: int | None, parameters: int, reserved_cores: int, start: CpuReading | None) -> Threads:
    """Return the number of CPU threads for a model of so many `parameters`, and the reason.

    A number that somebody has set is kept: `count`, one in the environment, or one given to `torch.set_num_threads`.
    Otherwise it is the smallest number that the model's size, the cores less `reserved_cores`, a container's quota and
    other processes allow.

    Args:
        count: the number that the user gives; None: there is none.
        reserved_cores: cores that other threads of this process need.
        start: the reading from which on the use by other processes is measured; None: it is not.

    Raises `ConfigError` if `count` is not a whole number >= 1.
    """
    check_whole("threads", count, low=1, optional=True)
    if count is not None:
        return Threads(count, "as asked")
    current = torch.get_num_threads()
    variable = next((name for name in THREAD_VARIABLES if os.environ.get(name)), None)
    if variable is not None:
        first_level = os.environ[variable].partition(",")[0]  # of nested loops
        if current in _chosen_thread_counts() and first_level.isdecimal() and int(first_level):
            current = int(first_level)  # not what an earlier model was given
        return Threads(current, f"from {variable}")
    logical, physical = cores(), physical_cores()
    if current not in {logical, physical} | _chosen_thread_counts():  # else it is PyTorch's default, or ours
        return Threads(current, "as this process has set it")
    reserved = f", {reserved_cores} of them left to HTTP" if reserved_cores else ""
    limits = [
        (parameters // PARAMETERS_A_THREAD, f"{parameters / 1e6:.3g} million parameters keep no more busy"),
        (physical - reserved_cores, f"{physical} cores{reserved}"),
    ]
    if (cpu_quota := quota()) is not None and cpu_quota < physical:
        limits.append(
            (int(cpu_quota) - reserved_cores, f"the container may use {cpu_quota:g} of {logical} cores{reserved}")
        )
    if (others := measure_others_use(start)) is not None:
        free_cores = int(logical - others.used + 0.5)
        limits.append(
            (free_cores - reserved_cores, f"other processes use {others.used:.1f} of {logical} cores{reserved}")
        )
    allowed_count, reason = min(limits, key=lambda limit: limit[0])
    return Threads(max(1, allowed_count), reason)


def set_threads(threads: Threads) -> None:
    """Make PyTorch compute on this number of threads, in the whole process."""
    if threads.count != torch.get_num_threads():
        torch.set_num_threads(threads.count)
        _chosen_thread_counts().add(threads.count)


@functools.cache
def _chosen_thread_counts() -> set[int]:
    """The numbers of threads that `set_threads` has set, so that a later model does not take them for the user's."""
    return set()

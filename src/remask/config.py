"""Chooses the device and the number format. `auto` depends on the machine."""

import logging
import time

import torch

from remask.errors import ConfigError, UnknownNameError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_GAIN = 1.2  # speed-up from which on `auto` takes bfloat16; below it the accuracy of float32 is worth more


def resolve_device(name: str) -> torch.device:
    """Return the device. `auto` is the first CUDA device, or the CPU if there is none.

    Raises `ConfigError` if the device cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason}); use 'auto', 'cpu' or 'cuda'") from error
    return device


def resolve_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the number format and the reason for the choice, in words.

    `auto` is bfloat16 on accelerators. On a CPU it times a matrix product in both formats: only some CPUs have
    instructions for bfloat16, and without them it is slower than float32. Raises `UnknownNameError` for other names.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UnknownNameError("dtype", name, ["auto", *DTYPES])
        return DTYPES[name], "as asked"
    if device.type != "cpu":
        return torch.bfloat16, "auto: an accelerator"
    gain = matmul_seconds(torch.float32) / matmul_seconds(torch.bfloat16)
    dtype = torch.bfloat16 if gain >= MIN_GAIN else torch.float32
    return dtype, f"auto: bfloat16 matrix products run at {gain:.1f}x float32's speed on this CPU"


def matmul_seconds(dtype: torch.dtype, size: int = 768, tries: int = 5) -> float:
    """Return the shortest time, in seconds, of a `size` by `size` matrix product on the CPU."""
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(tries + 1):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best

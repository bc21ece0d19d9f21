"""Device and number format: what `auto` means on the machine at hand, and why."""

import logging
import time

import torch

from remask.errors import ConfigError, UnknownNameError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORTH_IT = 1.2  # gain of bfloat16 matrix products below which float32's accuracy is kept


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises `ConfigError` for a device that is not there."""
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
    """The number format, and a phrase that says why it was chosen.

    `auto` is bfloat16 on accelerators. On a CPU both formats are timed on one matrix product, as only some CPUs have
    bfloat16 matrix instructions and emulation is slower than float32.
    """
    if name != "auto":
        if name not in DTYPES:
            raise UnknownNameError("dtype", name, ["auto", *DTYPES])
        return DTYPES[name], "as asked"
    if device.type != "cpu":
        return torch.bfloat16, "auto: an accelerator"
    gain = matmul_seconds(torch.float32) / matmul_seconds(torch.bfloat16)
    dtype = torch.bfloat16 if gain >= WORTH_IT else torch.float32
    return dtype, f"auto: bfloat16 matrix products run at {gain:.1f}x float32's speed on this CPU"


def matmul_seconds(dtype: torch.dtype, size: int = 768, tries: int = 5) -> float:
    """Best time of a square matrix product of `size` on the CPU."""
    a = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(tries + 1):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best

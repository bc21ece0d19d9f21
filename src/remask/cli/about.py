"""`remask --version --json`: an installation, for reports of faults. Imports PyTorch only if there may be a GPU."""

import json
import platform
from importlib import metadata
from typing import Any

from remask import __version__
from remask.machine.cpu import BFLOAT16, cores, instructions, may_have_gpu, memory

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "gguf", "triton", "fastapi", "remask-lab", "remask-caches")
_REPORTED_INSTRUCTIONS = BFLOAT16 | {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "i8mm", "sve"}


def about() -> dict[str, Any]:
    """Return versions (None if a package is not installed), the processor, bytes of memory, and CUDA devices."""
    devices = list[str]()
    if may_have_gpu():
        import torch

        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "remask": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "instructions": sorted(instructions() & _REPORTED_INSTRUCTIONS),
        "memory": (memory() or (None,))[0],
        "cuda": devices,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def print_about() -> None:
    """Print `about` as JSON."""
    print(json.dumps(about(), indent=1))


def _version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

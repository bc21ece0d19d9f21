"""The machine, the library versions and the commit of a measurement. Importing this module imports no PyTorch."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remask import __version__
from remask.machine.cpu import CpuReading, OthersUse, measure_others_use

if TYPE_CHECKING:
    from remask.llm import LLM

BUSY = 0.1  # share of the cores, used by others, from which on the machine counts as busy


def host() -> dict[str, object]:
    """The processor, its number of cores, and the operating system."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()}


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, from Linux's `cpuinfo` or else from Python."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that ran or waited for a core, on average over the last minute. None if the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def machine(llm: "LLM") -> dict[str, object]:
    """The hardware and the settings that decide the speed of `llm`, as records hold them; on CUDA also `gpu`."""
    import torch

    device, processor = llm.model.device, host()
    facts: dict[str, object] = {
        "device": str(device),
        "cpu": processor["cpu"],
        "cores": processor["cores"],
        "threads": torch.get_num_threads(),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "system": processor["system"],
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def processor_text(facts: Mapping[str, Any]) -> str:
    """The processor of a `machine` as reports show it: the GPU or the CPU, and the number of threads."""
    return f"{facts.get('gpu', facts['cpu'])} ({facts['threads']} threads)"


def conditions(since: CpuReading | None) -> dict[str, object]:
    """What else the machine did since the reading `since`; a value is None if the system does not say.

    `others` holds the seconds watched, the number of cores, and how many of them other processes `used` and the host of
    a virtual machine has `stolen`, on average. `busy` is a warning if others used `BUSY` of the cores or more, else
    None.
    """
    others = measure_others_use(since)
    load = load_average()
    return {
        "load_average": load,
        "others": None if others is None else asdict(others),
        "busy": None if others is None or others.used < BUSY * others.cores else _busy(others, load),
    }


def _busy(others: OthersUse, load: float | None) -> str:
    """The warning that the machine was busy."""
    average = "" if load is None else f", load average {load:.1f}"
    host = f", {others.stolen:.1f} of them the virtual machine's host" if others.stolen >= BUSY else ""
    return (
        f"The machine was busy: others used {others.used:.1f} of its {others.cores} cores{host}{average}. Times "
        "are longer than on an idle machine, and their ratios less certain."
    )


def versions() -> dict[str, str]:
    """Versions of the libraries that decide results."""
    import numpy as np
    import torch
    import transformers

    return {
        "remask": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str | None:
    """The checkout's commit in 12 digits, with `+changes` if tracked files differ from it. None outside a checkout.

    Changes below `benchmarks` and `docs` do not count, as measurements write them.
    """
    folder = Path(__file__).parent
    name = git(folder, "rev-parse", "--short=12", "HEAD")
    if name is None:
        return None
    excluded = (":(top,exclude)benchmarks", ":(top,exclude)docs")
    changes = git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
    return name + ("+changes" if changes else "")


def git(folder: Path, *arguments: str) -> str | None:
    """The stripped output of `git` in a folder; None if it fails, such as outside a checkout."""
    try:
        process = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.strip()

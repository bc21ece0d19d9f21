"""What a measurement was made on."""

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch
import transformers

from remask import __version__
from remask.llm import LLM


def machine(llm: LLM) -> dict[str, object]:
    """Hardware and settings that decide speed."""
    device = llm.model.device
    facts: dict[str, object] = {
        "device": str(device),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "system": platform.platform(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def versions() -> dict[str, str]:
    """Library versions that decide results."""
    return {
        "remask": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
    }


def commit() -> str | None:
    """The checkout's commit, with `+changes` where files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    found = _git(folder, "rev-parse", "--short=12", "HEAD")
    if found is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return found + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

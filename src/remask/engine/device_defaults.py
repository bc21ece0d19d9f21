"""What was found to be right and fast on a device, kept in a small file that every start reads.

`scripts/gpu` writes it. An entry is for one device, one state of this package's code and one pair of PyTorch and
Triton, so what was proven of other code is not taken over.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from remask.checks.values import flag, json_object, one_of
from remask.engine.config import DeviceDefaults
from remask.errors import RemaskError
from remask.machine.device import cache_folder
from remask.machine.disk import write_whole

log = logging.getLogger(__name__)

PROVEN = ("triton", "torch")


def defaults_file() -> Path:
    """The file of this machine's devices: `devices.json` in the cache folder."""
    return cache_folder() / "devices.json"


def device_key(device: torch.device) -> str:
    """What an entry is for: the device's name, and the code that was proven on it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return " | ".join([name, f"remask {code_digest()}", f"torch {torch.__version__}", f"triton {_triton()}"])


def read_defaults(device: torch.device, file: Path | None = None) -> DeviceDefaults | None:
    """The defaults of `device`; None where nothing was proven on it with this code.

    A file that cannot be used is named in a warning.
    """
    file = file or defaults_file()
    if not file.exists():
        return None
    try:
        entry = _entries(file).get(device_key(device))
        if entry is None:
            return None
        for name in ("overlap", "graphs"):
            flag(name, entry.get(name))
        attention: Any = entry.get("attention")
        one_of("attention", attention, PROVEN)
    except (RemaskError, OSError) as error:
        log.warning("%s is not used: %s; run scripts/gpu again, or remove the file", file, error)
        return None
    return DeviceDefaults(attention, entry["overlap"], entry["graphs"], f"proven on this device, {file}")


def write_defaults(device: torch.device, found: Mapping[str, Any], file: Path | None = None) -> Path:
    """Keep what was `found` of `device`: "attention", "overlap", "graphs" and "why". Entries of others stay.

    Returns the file. Raises `OutputError` where it cannot be written.
    """
    file = file or defaults_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        entries = _entries(file) if file.exists() else {}
    except RemaskError as error:
        log.warning("%s is written anew: %s", file, error)
        entries = {}
    entries[device_key(device)] = dict(found)
    write_whole("the device's defaults", file, json.dumps(entries, indent=2) + "\n")
    return file


@cache
def code_digest() -> str:
    """A hash of this package's code, in hexadecimal."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _entries(file: Path) -> dict[str, Any]:
    return dict(json_object(str(file), file.read_text(encoding="utf-8")))


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None

"""Reading recorded data that are kept compressed."""

import gzip
import json
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor


def folder(root: Path, name: str, names: Collection[str]) -> Path:
    """The checkpoint folder of the toy model `name`, which must be one of `names`."""
    if name not in names:
        raise KeyError(f"no golden model {name!r}; there are {', '.join(names)}")
    return root / name


@cache
def read_json(path: Path) -> dict[str, Any]:
    """A `.json.gz` file; the same object for the same path, to be treated as read-only."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        data: dict[str, Any] = json.load(file)
    return data


@cache
def read_tensors(path: Path) -> dict[str, Tensor]:
    """A `.safetensors.gz` file; the same object for the same path, to be treated as read-only."""
    with gzip.open(path) as file:
        return dict(load(file.read()))


@cache
def unpacked(path: Path) -> bytes:
    """A file, or what the `.gz` beside its name holds."""
    if path.is_file():
        return path.read_bytes()
    with gzip.open(path.with_name(f"{path.name}.gz")) as file:
        return file.read()

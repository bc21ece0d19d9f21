"""Recorded runs of Sumi; `README.md` beside this file says what they are."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.goldens import archive
from tests.goldens.archive import read_json

ROOT = Path(__file__).parent
MODELS = ("plain", "biased")


@cache
def folder(name: str) -> Path:
    """The checkpoint of a model."""
    return archive.folder(ROOT, name, MODELS)


def config(name: str) -> dict[str, Any]:
    """Its config.json."""
    found: dict[str, Any] = json.loads((folder(name) / "config.json").read_text(encoding="utf-8"))
    return found


def logits(name: str) -> dict[str, Any]:
    """Logits of some rows of one canvas."""
    return read_json(folder(name) / "logits.json.gz")


def reverse(name: str) -> dict[str, Any]:
    """Grids of log-SNRs, and steps of the reverse process of two rows."""
    return read_json(folder(name) / "reverse.json.gz")


def runs(name: str) -> list[dict[str, Any]]:
    """The runs of a model."""
    found: list[dict[str, Any]] = read_json(folder(name) / "runs.json.gz")["runs"]
    return found

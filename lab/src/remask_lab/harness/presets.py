"""The settings under which a paper ran its benchmarks, by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from remask.checks.values import check_choice

_FOLDER = Path(__file__).parent / "presets"


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How one task is run: sampling parameters, number of worked examples, and settings of caches by their names."""

    sampling: Mapping[str, Any]
    shots: int = 0
    caches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def task_settings(preset: str, task: str) -> TaskSettings:
    """The settings of `task` in `preset`. Raises `UnknownNameError` where there is no such preset, or task in it."""
    check_choice("--preset", preset, preset_names())
    content = tomllib.loads((_FOLDER / f"{preset}.toml").read_text(encoding="utf-8"))
    tasks, caches = content["tasks"], content.get("caches", {})
    check_choice(f"task of preset {preset}", task, tasks)
    return TaskSettings(**{**tasks[task], "caches": {**caches, **tasks[task].get("caches", {})}})

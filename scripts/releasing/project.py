"""The distributions of a release, where they are built, and how commands run."""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
DIST, OUT = ROOT / "dist", ROOT / "out" / "release"
PROJECTS: Final = {"remask": ROOT, "remask-lab": ROOT / "lab", "remask-caches": ROOT / "caches"}


class ReleaseError(Exception):
    """A step of a release has failed or found a fault; the text says which."""


def project(name: str) -> dict[str, Any]:
    """Return the table `project` of a distribution's `pyproject.toml`."""
    table: dict[str, Any] = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def run(words: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    """Run a command in the root of the repository. Raises `ReleaseError` if it fails."""
    if status := subprocess.run([*map(str, words)], cwd=ROOT, env=env).returncode:
        raise ReleaseError(f"this failed with status {status}: {' '.join(map(str, words))}")


def tool(name: str, *words: str) -> None:
    """Run a program of this environment. Raises `ReleaseError` if it fails."""
    run([Path(sys.executable).with_name(name), *words])

"""Installs packages for a test: a folder with the files and the metadata that an installer would write."""

import importlib
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parent / "package"

Groups = Mapping[str, Mapping[str, str]]


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Put `folder` on the module search path, and forget the modules in it afterwards."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name, module in sys.modules.items() if _is_in(module, folder)]:
            del sys.modules[name]
        importlib.invalidate_caches()


def _is_in(module: object, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


def write_package(folder: Path, name: str, version: str, groups: Groups, modules: Mapping[str, str]) -> None:
    """Write modules, and the metadata of the distribution that provides them."""
    folder.mkdir(parents=True, exist_ok=True)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in own.items()) for group, own in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def write_example(folder: Path) -> None:
    """Install the package in `package`, by what its `pyproject.toml` says."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_package(folder, project["name"], project["version"], project["entry-points"], {})
    shutil.copytree(PACKAGE / "remask_example", folder / "remask_example", ignore=shutil.ignore_patterns("__pycache__"))

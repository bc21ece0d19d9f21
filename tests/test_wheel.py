"""The wheel, outside of the repository: what a user installs has all that it needs, and runs the demo.

The environment is fresh but for the dependencies, which are those of the environment that runs the tests.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.releasing.artefacts import Artefact

ROOT = Path(__file__).parents[1]
BOUND_S = 300  # for a machine that runs other tests; the demo of 8 questions takes seconds

if importlib.util.find_spec("hatchling") is None:
    pytest.skip("needs hatchling: pip install hatchling", allow_module_level=True)


def run(words: Sequence[str | Path], folder: Path) -> str:
    """Standard output of a process that knows nothing of the repository."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=folder, env=env, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build(ROOT, folder)


def build(project: Path, folder: Path) -> Path:
    """The wheel of the project in a folder of the working tree."""
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(words, cwd=project, check=True, capture_output=True, timeout=BOUND_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment into which the wheel and that of the laboratory were installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    install: list[str | Path] = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    install.append(build(ROOT / "lab", tmp_path_factory.mktemp("lab")))
    run([sys.executable, "-m", "pip", "--python", programs / "python", *install], folder)
    (packages,) = folder.rglob("site-packages")
    # A path in a .pth file comes after the environment's own packages, and .pth files found there are not followed: so
    # an editable installation beside the dependencies stays unseen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return programs


def test_the_wheel_holds_the_models_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "remask/bundled_tariff/model.safetensors",
        "remask/bundled_uniform/model.safetensors",
        "remask/smollm2/adapter_model.safetensors",
        "remask/smollm2/remask.json",
        "remask/smollm2_blocks/adapter_model.safetensors",
        "remask/smollm2_blocks/remask.json",
        "remask/tables/bundled-tariff.json",
        "remask/checkpoint/shelf.txt",
        "remask/families/shapes.txt",
        "remask/server/playground/page/index.html",
        "remask/server/playground/page/vendor/marked.esm.js",
    ):
        assert needed in names
    assert list(Artefact(wheel).faults()) == []


def test_its_metadata_names_every_licence(wheel: Path) -> None:
    """Also that of the Markdown reader that it carries, which is not the program's."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT AND BSD-3-Clause"
    files = metadata.get_all("License-File", [])
    assert sorted(files) == ["LICENSE", "src/remask/server/playground/page/vendor/LICENSE.marked"]
    texts = [archive.read(name.replace("METADATA", f"licenses/{file}")).decode() for file in sorted(files)]
    assert "Apache License" in texts[0]
    assert all("Permission is hereby granted" in text and "Copyright (c)" in text for text in texts[1:])


def test_private_parts_of_others_have_upper_bounds(wheel: Path) -> None:
    """And what is tested lies within them."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
    asked = [Requirement(each) for each in Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in pinned if "==" in line)
    for package in ("torch", "triton"):
        (bounds,) = {each.specifier for each in asked if each.name == package}
        assert {each.operator for each in bounds} == {">=", "<"}, package
        assert tested[package] in bounds


@pytest.mark.thorough
def test_its_bench_runs_elsewhere(environment: Path, tmp_path: Path) -> None:
    where = run([environment / "python", "-c", "import remask, remask_lab; print(remask.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(environment.parent), "the wheel's own package is meant"
    words = ["--quiet", "bench", "--model", "bundled", "--requests", "8", "--rounds", "1"]
    text = run([environment / "remask", *words], tmp_path)
    for cache in ("none", "reuse", "bicache"):
        assert f"| {cache}" in text
    assert "commit unknown" in text, "it knows no repository"

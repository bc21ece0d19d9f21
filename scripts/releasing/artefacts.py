"""The checks of wheels and sdists, and of whether the repository is ready to be published."""

import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from packaging.metadata import Metadata

from scripts.releasing.project import DIST, PROJECTS, ROOT, ReleaseError, project, tool

LARGEST: Final = 52_000_000  # bytes of a wheel, of which 40 million are the adapters of smollm2 and smollm2-blocks
LEFTOVERS: Final = re.compile(r"(^|/)(__pycache__|\.[\w-]+_cache|\.venv[\w-]*|\.git|[^/]*\.egg-info)(/|$)|\.pyc$")
TESTS: Final = re.compile(r"(^|/)(tests?|conftest\.py|test_\w+\.py)(/|$)")
LINK: Final = re.compile(r"(!?)(\[[^\[\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


@dataclass(frozen=True)
class Artefact:
    """A wheel or an sdist."""

    path: Path

    @cached_property
    def files(self) -> dict[str, int]:
        """Sizes of its files in bytes by their names; those of an sdist are told without its folder."""
        if self.is_wheel:
            with zipfile.ZipFile(self.path) as wheel:
                return {each.filename: each.file_size for each in wheel.infolist() if not each.is_dir()}
        with tarfile.open(self.path) as sdist:
            return {each.name.partition("/")[2]: each.size for each in sdist.getmembers() if not each.isdir()}

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel."""
        return self.path.suffix == ".whl"

    @cached_property
    def metadata(self) -> Metadata:
        """Its metadata; raises `ReleaseError` where a field is wrong."""
        if self.is_wheel:
            with zipfile.ZipFile(self.path) as wheel:
                data = wheel.read(self.named("METADATA"))
        else:
            with tarfile.open(self.path) as sdist:
                file = sdist.extractfile(f"{self.path.name.removesuffix('.tar.gz')}/PKG-INFO")
                assert file is not None
                data = file.read()
        try:
            return Metadata.from_email(data)
        except ExceptionGroup as errors:
            raise ReleaseError(f"{self.path.name}: {'; '.join(map(str, errors.exceptions))}") from errors

    def named(self, file: str) -> str:
        """The name of a file of the metadata of a wheel."""
        (name,) = (each for each in self.files if re.fullmatch(rf"[^/]+\.dist-info/{re.escape(file)}", each))
        return name

    def faults(self) -> Iterator[str]:
        """What is wrong with it."""
        metadata, names = self.metadata, list(self.files)
        package = metadata.name.replace("-", "_")
        if metadata.license_expression is None:
            yield "it names no licence"
        if metadata.requires_python is None or not metadata.summary or not metadata.description:
            yield "it says no version of Python, no summary or no description"
        for needed in metadata.requires_dist or []:
            if needed.name.startswith("remask-") or needed.name == "remask" != metadata.name:
                if str(needed.specifier) not in ("", f"=={metadata.version}") or needed.url:
                    yield f"it needs {needed}, which is of another release"
            elif needed.url:
                yield f"it needs {needed}, which no index has"
        yield from (f"{name} is a leftover" for name in names if LEFTOVERS.search(name))
        licences = {str(file) for file in metadata.license_files or []}
        if "LICENSE" not in licences:
            yield "the program's licence is not named"
        present = {name.partition(".dist-info/licenses/")[2] for name in names} if self.is_wheel else set(names)
        yield from (f"the licence {file} is named and not there" for file in licences - present)
        # What is vendored brings its licence, which must be named beside the program's.
        sources = {f"src/{name}" if self.is_wheel else name for name in names}
        vendored = (name for name in sources if re.match(rf"src/{package}/(.*/)?(LICEN[CS]E|COPYING|NOTICE)", name))
        yield from (f"the licence {name} is there and not named" for name in vendored if name not in licences)
        if self.is_wheel:
            yield from self._faults_of_a_wheel(package)

    def _faults_of_a_wheel(self, package: str) -> Iterator[str]:
        names = list(self.files)
        top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        if top != {package}:
            yield f"it installs {', '.join(sorted(top))}, and should install {package} alone"
        if f"{package}/py.typed" not in names:
            yield "it has no py.typed, so no checker of types reads its annotations"
        yield from (f"{name} is a test" for name in names if TESTS.search(name))
        if self.path.stat().st_size > LARGEST:
            yield f"it has {self.path.stat().st_size} bytes, more than {LARGEST}"

    def unpublishable(self) -> Iterator[str]:
        """What would be wrong with it on an index, beside `faults`."""
        if not self.metadata.project_urls:
            yield "it names no address: build with --repository ADDRESS"
        if found := LINK.search(self.metadata.description or ""):
            yield f"its README links to {found[3]}, which an index does not have"


def check(publish: bool) -> None:
    """Print the sizes of what is in `dist/`; raises `ReleaseError` if anything is wrong with it."""
    artefacts = [Artefact(path) for path in sorted(DIST.iterdir())]
    kinds = sorted((artefact.metadata.name, artefact.is_wheel) for artefact in artefacts)
    if kinds != sorted((name, is_wheel) for name in PROJECTS for is_wheel in (False, True)):
        raise ReleaseError(f"{DIST} should hold a wheel and an sdist of each of {', '.join(PROJECTS)}: build them")
    for artefact in artefacts:
        print(f"\n{artefact.path.name}: {artefact.path.stat().st_size / 1e6:.2f} MB, {len(artefact.files)} files")
        for name, size in sorted(artefact.files.items(), key=lambda item: -item[1])[:8]:
            print(f"  {size / 1e6:8.2f} MB  {name}")
    tool("twine", "check", "--strict", *(str(artefact.path) for artefact in artefacts))
    # Each package has modules that are equal to others, such as empty `__init__.py`.
    wheels = [str(artefact.path) for artefact in artefacts if artefact.is_wheel]
    tool("check-wheel-contents", "--ignore", "W002", *wheels)
    tool("zizmor", "--offline", "--no-progress", "--quiet", ".github")
    faults = [f"{artefact.path.name}: {fault}" for artefact in artefacts for fault in artefact.faults()]
    if publish:
        faults += [f"{artefact.path.name}: {fault}" for artefact in artefacts for fault in artefact.unpublishable()]
        faults += unready(project("remask")["version"], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if faults:
        raise ReleaseError("\n".join(faults))


def unready(version: str, changes: str) -> Iterator[str]:
    """Why the repository is no release `version` yet, whose `changes` are the text of the changelog."""
    for name in PROJECTS:
        if project(name)["version"] != version:
            yield f"{name} has the version {project(name)['version']}, and remask {version}"
    if heading(version, changes) is None:
        yield f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'"
    tag = os.environ.get("GITHUB_REF_NAME", f"v{version}")
    if tag != f"v{version}":
        yield f"the tag is {tag}, and should be v{version}"


def heading(version: str, changes: str) -> re.Match[str] | None:
    """The heading of a released version in the text of the changelog."""
    return re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE)


def notes(version: str, changes: str) -> str:
    """What the changelog says of a version; raises `ReleaseError` where it has no such heading."""
    found = heading(version, changes)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'")
    return changes[found.end() :].split("\n## ")[0].strip() + "\n"

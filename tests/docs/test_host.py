"""What a host reads of the repository: workflows, forms for issues, and files that say how to tell and to cite."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from remask import __version__
from remask.cli import main
from remask.cli.about import PACKAGES

ROOT = Path(__file__).parents[2]
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_anybody_can_run(path: Path) -> None:
    """Steps are targets of the Makefile, or scripts; actions are named by commits; rights are those that are needed."""
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step["uses"])
                assert step["uses"].startswith("actions/"), "the host's own"
            else:
                command, _, target = step["run"].partition(" ")
                assert (command == "make" and f"\n{target}:" in makefile) or (ROOT / command).is_file()


def test_versions_of_python_are_those_that_the_project_names() -> None:
    tested = yaml.safe_load((HOST / "workflows" / "test.yml").read_text(encoding="utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tested["jobs"]["check-and-test"]["strategy"]["matrix"]["python"] == named


def test_forms_ask_for_what_a_report_needs() -> None:
    for path in sorted((HOST / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        fields = form.get("body", [])
        assert path.name == "config.yml" or {"name", "description"} <= form.keys()
        assert len({field["id"] for field in fields}) == len(fields)
        if path.name in ("fault.yml", "model.yml"):
            (version,) = [field for field in fields if field["id"] == "version"]
            assert version["attributes"]["label"] == "remask --version --json"
            assert version["validations"]["required"]


def test_the_version_for_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["remask"] == __version__
    assert told["packages"].keys() == set(PACKAGES)
    assert told["cores"] >= 1
    assert isinstance(told["instructions"], list)


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    for paper in cited["references"]:
        number = paper["url"].rpartition("/")[2]
        assert paper["authors"] == [{"name": f"The authors of arXiv {number}"}]
        pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "caches" / "README.md", *(ROOT / "src").rglob("*.py")]
        assert any(number in page.read_text(encoding="utf-8") for page in pages), number

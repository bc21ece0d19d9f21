"""What a host reads of the repository: workflows, forms for issues, and files that say how to tell and to cite."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from remask import __version__
from remask.cli import main
from remask.cli.about import PACKAGES
from scripts.releasing.__main__ import STEPS

ROOT = Path(__file__).parents[2]
HOST = ROOT / ".github"
WORKFLOWS = sorted((HOST / "workflows").glob("*.yml"))


# Jobs that may do more than read, and the actions that are not the host's own, all named here.
RIGHTS = {
    "attest": {"attestations": "write", "contents": "read", "id-token": "write"},
    "publish": {"id-token": "write"},
    "announce": {"contents": "write"},
    "version": {"contents": "write"},
    "scorecard": {"contents": "read", "id-token": "write"},
    "analyze": {"contents": "read", "security-events": "write"},
}
OF_OTHERS = {"pypa/gh-action-pypi-publish": "publish", "ossf/scorecard-action": "scorecard"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_anybody_can_run(path: Path) -> None:
    """Steps are targets of the Makefile, or scripts; actions are named by commits; rights are those that are needed."""
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == RIGHTS.get(name, {"contents": "read"})
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            if "uses" in step:
                action, _, commit = step["uses"].partition("@")
                assert re.fullmatch(r"[0-9a-f]{40}", commit)
                assert action.startswith(("actions/", "github/")) or OF_OTHERS[action] == name
            else:
                command, *words = shlex.split(step["run"])
                assert (command == "make" and f"\n{words[0]}:" in makefile) or (ROOT / command).is_file()
                assert "${{" not in step["run"], "a shell would run what an event says"


def test_a_release_is_published_when_all_else_has_passed() -> None:
    jobs = yaml.safe_load((HOST / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    steps = " ".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    called = {*steps.split(), *jobs["versions"]["strategy"]["matrix"]["step"]}
    assert {*STEPS, "announce"} <= called
    assert jobs["publish"]["needs"] == "attest"
    assert {*jobs["attest"]["needs"]} == {*jobs} - {"attest", "publish", "announce"}


def test_versions_of_python_are_those_that_the_projects_name() -> None:
    for name, job in (("test", "check-and-test"), ("release", "install")):
        workflow = yaml.safe_load((HOST / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        for folder in (ROOT, ROOT / "lab", ROOT / "caches"):
            named = re.findall(r"Python :: (3\.\d+)", (folder / "pyproject.toml").read_text(encoding="utf-8"))
            assert workflow["jobs"][job]["strategy"]["matrix"]["python"] == named


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

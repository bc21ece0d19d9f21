"""The page on extending remask shows the code that the tests run."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from remask.cli import main
from tests.plugins.installed import PACKAGE

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_code_is_the_example_packages(example: Path) -> None:
    shown = blocks("python")
    for name in ("policy", "family", "rule"):
        assert (PACKAGE / "remask_example" / f"{name}.py").read_text(encoding="utf-8") in shown
    (test,) = [block for block in shown if "assert" in block]
    exec(compile(test, str(PAGE), "exec"), {})


@pytest.mark.usefixtures("example")
def test_the_commands_of_the_policy_give_right_answers(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("bash") if "late-rows" in block]
    commands = [shlex.split(line) for line in block.splitlines() if line.startswith("remask generate")]
    assert len(commands) == 2
    for command in commands:
        file = command.index("--input") + 1
        command[file] = str(PAGE.parents[1] / command[file])
        assert main(["--quiet", *command[1:]]) == 0
        answers = map(json.loads, capsys.readouterr().out.splitlines())
        said = {answer["id"]: answer["text"].split("## ")[1] for answer in answers}
        assert said == {"q0": "laurel", "q1": "meadow", "q2": "river", "q3": "quarry"}


def test_the_entry_points_are_the_example_packages() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = [tomllib.loads(block)["project"]["entry-points"] for block in blocks("toml")]
    for group, entries in project["entry-points"].items():
        assert {group: entries} in shown

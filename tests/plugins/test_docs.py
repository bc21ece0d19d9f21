"""The page on extending remask shows the code that the tests run."""

import re
import tomllib
from pathlib import Path

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


def test_the_entry_points_are_the_example_packages() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = [tomllib.loads(block)["project"]["entry-points"] for block in blocks("toml")]
    for group, entries in project["entry-points"].items():
        assert {group: entries} in shown

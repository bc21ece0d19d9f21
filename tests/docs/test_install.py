"""Extras, names and files that the pages mention exist, and nothing is promised that is not so yet."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_every_extra_that_is_named_exists_and_every_one_is_told_of() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for page in PAGES:
        named = re.findall(r"(?:remask|\.|whl)\[([a-z,]+)\]", page.read_text(encoding="utf-8"))
        assert {extra for each in named for extra in each.split(",")} <= extras, page.name
    assert set(re.findall(r"^\| `([a-z]+)` \|", INSTALL, re.MULTILINE)) == extras


def test_the_wheel_is_called_as_it_is_built() -> None:
    assert f"dist/remask-{PROJECT['version']}-py3-none-any.whl[" in INSTALL


def test_a_first_installation_is_from_the_repository() -> None:
    """An index has no remask yet, so no page begins with one."""
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("serving", "quickstart"))):
        first = re.search(r"^```\w*\n(?:.*\n)*?.*pip install (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert first is not None
        assert first[1].startswith("'.["), page.name


def test_the_demo_brings_what_serve_needs_and_says_how_to_call_it() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (needs,) = re.findall(r"^demo: \.venv/installed-(\S+)$", makefile, re.MULTILINE)
    assert {"lab", "server"} <= set(needs.split(","))
    recipe = makefile.split("\ndemo:")[1].split("\ntest:")[0]
    assert recipe.index("scripts/demo") < recipe.index(".venv/bin/remask serve smollm2")


def test_what_is_quiet_is_shown_where_it_fails(tmp_path: Path) -> None:
    """On a terminal or not, success says nothing, and a failure shows its end, names the file and keeps the status."""
    log = tmp_path / "pip.log"
    for script, status in (("echo fine", 0), ("seq 100; echo broken >&2; exit 3", 3)):
        command = [str(ROOT / "scripts" / "quietly"), str(log), "bash", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (status, "")
        assert log.read_text().endswith("broken\n" if status else "fine\n")
    assert done.stderr.splitlines()[13:] == ["100", "broken", *done.stderr.splitlines()[-2:]]
    assert done.stderr.splitlines()[-1] == f"All that it said is in {log}"


def test_ci_begins_with_the_two_commands_of_the_readme() -> None:
    """Letter for letter, with no extra and no variable, before anything else is installed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "```\nmake demo\n```" in readme
    assert "\n`make test` runs " in readme
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if re.match(r" *step ", line)]
    assert steps[:2] == ['step "make demo" make demo', 'step "make test" make test']
    before = "\n".join(lines[: lines.index(steps[0])])
    assert not re.search(r"\b(pip|apt-get|EXTRAS|PYTEST_ADDOPTS)\b", before)


def test_the_readme_and_the_manual_are_short() -> None:
    """As `scripts/size.py` counts them; the notebook is no part of the manual."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert len(readme.split()) <= 1300
    manual = (page for page in PAGES[1:] if page.parent.name != "lab")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in manual) <= 50_000


PACKAGE = ROOT / "src" / "remask"


def test_files_and_rooms_that_the_design_names_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    named |= {name for name in re.findall(r"`((?:\w+/)+\w+)`", text) if name.split("/")[0] in rooms}
    assert len(named) > 40
    assert [name for name in sorted(named) if not any((base / name).exists() for base in (PACKAGE, ROOT))] == []

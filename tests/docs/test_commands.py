"""Commands in the documentation: the real parser takes those in code blocks and tables."""

import re
import shlex
from pathlib import Path

import pytest

from remask.cli.main import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])


def commands(page: Path) -> list[str]:
    """Whole commands: lines of code blocks, and what stands in a table with an option that has a value.

    A line `remask NAME: ...` is what a command says.
    """
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    found = re.findall(r"^(?:\.venv/bin/)?(remask (?!\w+: ).*?)(?:\s+#.*)?$", blocks, re.MULTILINE)
    for row in re.findall(r"^\|.*$", text, re.MULTILINE):
        found += re.findall(r"`(remask [^`]*--\S+ [^`-][^`]*)`", row)
    return found


def exit_code(command: str) -> int:
    """What the parser ends the process with; 0 if it accepts the command."""
    try:
        parse(shlex.split(command)[1:])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_commands_are_found() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 50
    assert any("analyze depth" in command for command in commands(ROOT / "docs" / "lab" / "analysis.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_taken(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A block that begins with the name of a file shows what is in it.
    for text, name in re.findall(
        r"^```yaml\n(# (\S+\.yaml)\n.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        assert exit_code(command) == 0, f"{command}\n{capsys.readouterr().err}"

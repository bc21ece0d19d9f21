"""docs/commands.md: written from the parsers, with every option that the help of each command tells of."""

import re
from pathlib import Path

import pytest

from remask.cli.commands import all_commands
from remask.cli.parser import Parser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")


def test_every_option_of_every_help_is_there(page: str) -> None:
    """Of commands without subjects, whose own help lists all."""
    every = page.split("\n## Options of every command\n")[1].split("\n## ")[0]
    for name, command in all_commands().items():
        parser = Parser(prog=f"remask {name}")
        command.add_arguments(parser)
        if parser._subparsers is not None:
            assert f"\n## `remask {name} " in page
            continue
        told = set(re.findall(r"^ {2}(?:-h, )?(--[\w-]+)", parser.format_help(), re.MULTILINE)) - {"--help"}
        assert len(told) > 2, name
        section = page.split(f"\n## `remask {name}`\n")[1].split("\n## ")[0]
        named = set(re.findall(r"`(--[\w-]+)`", section + every))
        assert told <= named, f"remask {name}"
        described = set(re.findall(r"^\| `(--[\w-]+)`", page, re.MULTILINE))
        assert told <= described, f"remask {name}"

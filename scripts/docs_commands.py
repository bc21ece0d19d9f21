"""Writes docs/commands.md from the parsers of the command line: `python scripts/docs_commands.py`.

An option that several commands declare alike stands once, in a table of its own, and each of these commands names it.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from remask.cli.commands import all_commands
from remask.cli.parser import Parser

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
SHARED = 3  # commands that declare an option alike, from which on it stands in the table of shared ones
HEAD = """# Commands and options

Every command of `remask` and all that it takes, as `remask COMMAND --help` tells it: `python scripts/docs_commands.py`
writes this page from the parsers. An option is written `--name value` or `--name=value`.
[`remask serve`](#remask-serve) reads options from a file as well (`--config`). Those that vLLM also has mean the same.

"""
EVERY = """## Options of every command
They stand before the command or after it.

"""
COMMON = """## Options of several commands
Each command names those that it takes. Where it means something else by one, or has another default, the option
stands in its own table.

"""
# Where more is said of an option.
SEE = {
    "--attention": "design.md#work-lists",
    "--batch-invariant": "replays.md#the-same-answer-in-any-company",
    "--cache": "policies.md",
    "--depth-table": "policies.md#the-depth-table",
    "--gpu-memory-utilization": "models.md#memory",
    "--graphs": "design.md#graphs",
    "--model": "models.md",
    "--overlap": "design.md#passes-that-overlap",
    "--prefix-match": "design.md#prefixes-of-several-lengths",
    "--prefix-sharing": "design.md#prefixes-that-nobody-names",
    "--priority-key": "limits.md",
    "--allowed-hosts": "security.md#names",
    "--quantization": "models.md#few-bits",
    "--sampling": "sampling.md",
    "--skip-weight-check": "limits.md#limits",
    "--store-budget-tokens": "models.md#memory",
    "--tensor-parallel": "models.md#several-devices",
    "--threads": "operation.md#threads",
}


class Row(NamedTuple):
    """An option, or an argument without a dash: its names, its values, its default and its meaning, as Markdown."""

    names: str
    values: str
    default: str
    meaning: str

    @property
    def line(self) -> str:
        """The row of a table."""
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in self) + " |\n"


def page() -> str:
    """The whole page."""
    parsers = dict(all_parsers())
    rows = {name: [*rows_of(parser)] for name, parser in parsers.items()}
    declared = Counter(row for each in rows.values() for row in each)
    every = [row for row, number in declared.items() if number == len(rows)]
    common = dict[str, Row]()
    for row, number in declared.most_common():
        if SHARED <= number < len(rows):
            common.setdefault(row.names, row)
    shared = [row for row in declared if row in common.values()]
    owners = dict[Row, str]()
    parts = [HEAD, EVERY, table(every), "\n", COMMON, table(shared), "\n"]
    for name, parser in parsers.items():
        parts += [f"## `{name}`\n", f"{sentence(parser.description)}\n\n"]
        left = [row for row in rows[name] if row not in every and row not in shared]
        own = [row for row in left if owners.setdefault(row, name) == name]
        if own:
            parts += [table(own), "\n"]
        for owner in dict.fromkeys(owners[row] for row in left if row not in own):
            parts.append(also([row for row in left if owners[row] == owner], f"as of [`{owner}`](#{anchor(owner)})"))
        parts.append(
            also([row for row in rows[name] if row in shared], "[as of several commands](#options-of-several-commands)")
        )
        if parser.epilog:
            lines = parser.epilog.partition("\n")[2].splitlines()
            parts.append("".join(["```\n", *(f"{line.strip()}\n" for line in lines), "```\n\n"]))
    return "".join(parts).rstrip("\n") + "\n"


def also(rows: list[Row], where: str) -> str:
    """A paragraph that names options whose meaning stands elsewhere."""
    names = ", ".join(row.names.partition(",")[0] for row in rows)
    return f"{names}: {where}.\n\n" if rows else ""


def anchor(title: str) -> str:
    """The anchor of a heading."""
    return title.replace(" ", "-")


def all_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser of each command, and of each subject of those that have some, by the words that lead there."""
    for name, command in all_commands().items():
        parser = Parser(prog=f"remask {name}", description=command.summary)
        command.add_arguments(parser)
        yield from leaves(parser)


def leaves(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """`parser`, or those of its subjects."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog, parser
    for action in below:
        told = {each.dest: each.help for each in action._choices_actions}
        for name, each in action.choices.items():
            each.prog, each.description = f"{parser.prog} {name}", each.description or told[name]
            yield from leaves(each)


def rows_of(parser: argparse.ArgumentParser) -> Iterator[Row]:
    """A row for each option of a command."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings or [str(action.metavar or action.dest)])
        default = shown(parser, action)
        meaning = " ".join(formatter._expand_help(action).split()) if action.help else ""
        if default:  # the column says it
            meaning = re.sub(rf" \(default:? {re.escape(default.strip('`'))}\)$", "", meaning)
        if meaning[1:2].islower():
            meaning = meaning[0].lower() + meaning[1:]
        see = SEE.get(action.option_strings[0]) if action.option_strings else None
        yield Row(names, values(action), default, escaped(meaning) + (f" ([more]({see}))" if see else ""))


def values(action: argparse.Action) -> str:
    """What an option takes."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return ", ".join(f"`{each}`" for each in action.choices)
    kinds = {int: "whole number", float: "number"}
    kind = kinds.get(action.type, str(action.metavar or "text"))  # type: ignore[call-overload]
    told = f"`{kind}`" if kind.isupper() or not kind.replace(" ", "").isalpha() else kind
    return f"{told}, one or more" if action.nargs in ("+", "*") else told


def shown(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The default of an option; empty where leaving it out asks for nothing."""
    if action.required:
        return "required"
    value = parser.get_default(action.dest)
    if value is None or value is False or value == [] or value == argparse.SUPPRESS or action.nargs == 0:
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def table(rows: list[Row]) -> str:
    """Rows as a table."""
    return "| option | values | default | meaning |\n|---|---|---|---|\n" + "".join(row.line for row in rows)


def sentence(text: str | None) -> str:
    """What a parser says of a command, as a sentence."""
    told = (text or "").strip().rstrip(".")
    return escaped(f"{told[:1].upper()}{told[1:]}.")


def escaped(text: str) -> str:
    """`text` of a help as Markdown: what looks like HTML is text."""
    return text.replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

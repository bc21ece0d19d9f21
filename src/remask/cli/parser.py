"""The parser of the command line: names the word nearest to a misspelled one, and shows the usage of its command.

`--config FILE` names a YAML or JSON file of flags, which those on the command line override. A key of the file is a
flag without its dashes, or the name of a group of the command's help with an object of the group's flags.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from remask.cli.logs import add_log_options
from remask.errors import LEFT, ConfigError, UnknownNameError

_EXAMPLES = "examples:\n"
_FIRST = ("--version",)  # options that stand before the command
CONFIG: Final = "--config"
ALL: Final = "--help=all"
FURTHER: Final = "further options"
SHOWN: Mapping[str, Sequence[str]] = {
    "model": ("model", "device", "dtype", "quantization"),
    "adapters": ("adapters",),
    "engine": ("max_num_seqs", "max_model_len", "gpu_memory_utilization"),
    "answers": ("cache", "sampling", "served_model_name"),
    "server": ("host", "port", "api_key"),
    FURTHER: (),
}
"""Of groups of options that few people need, those that `--help` shows; `--help=all` shows all."""


def examples(*commands: str) -> str:
    """Return the end of a command's help, which shows whole `commands`. It is the parser's `epilog`."""
    return _EXAMPLES + "\n".join(f"  {command}" for command in commands)


class Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples as they are, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of the whole line. Parsers of subcommands are of this class too.

    Each refuses what it does not know by itself, so that an error stands under the usage of its own command, and each
    has the options of `remask.cli.logs`, so that they may stand before the command or after it.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, **settings})
        self._messages = self.add_argument_group("messages, on stderr")
        add_log_options(self._messages)

    def format_help(self) -> str:
        """Return the help with all options. What all commands have in common comes last."""
        self._action_groups.sort(key=lambda group: group is self._messages)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Print what `--help` shows: the options that most people need, or all where that leaves none out."""
        whole, left = self.format_help(), 0
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            named = SHOWN.get(group.title or "")
            shown = [each for each in group._group_actions if named is None or each.dest in named]
            left += len(group._group_actions) - len(shown)
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        also = f", and {CONFIG} FILE sets them" if CONFIG in self._option_string_actions else ""
        formatter.add_text(f"{left} more options: '{self.prog} {ALL}' lists them{also}.")
        formatter.add_text(self.epilog)
        self._print_message(f"{self._brief_usage()}\n{formatter.format_help()}" if left else whole, file or sys.stdout)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse `args`, all of which must be known. Unknown options are named before required ones are missed."""
        words = sys.argv[1:] if args is None else list(args)
        self._look_over(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"{' '.join(map(repr, rest))} cannot be used here")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print what the command needs, the error, and where all options are listed. Ends the process with status 2."""
        self.exit(
            2, f"{self._brief_usage()}{self.prog}: error: {message}\n'{self.prog} {ALL}' lists all that it takes.\n"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # The base class hides that nobody reads any more.
        (file or sys.stderr).write(message)

    def _look_over(self, words: Sequence[str]) -> None:
        """Answer `--help=all`, and refuse options that there are not."""
        known = self._option_string_actions
        for word in words:
            # What follows the first word that is no option is the command's own parser's to judge.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            name, _, value = word.partition("=")
            if name == "--help" and value:
                if word != ALL:
                    self.error(f"there is no {word}; give --help for the usual options, {ALL} for all")
                self._print_message(self.format_help(), sys.stdout)
                self.exit()
            if not name.startswith("--") or " " in name or name in known:
                continue
            if not (self.allow_abbrev and any(option.startswith(name) for option in known)):
                path = f"{self.prog.removeprefix('remask ')} {name}"
                left = str(UnknownNameError("option", path, ())) if path in LEFT else None
                self.error(left or _unknown_option(name, known))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "/".join(action.option_strings) or str(action.metavar or action.dest).lower()
            raise argparse.ArgumentError(None, str(UnknownNameError(what, str(value), map(str, action.choices))))

    def _brief_usage(self) -> str:
        """The usage without the options that may be left out, which would fill the screen."""
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        one_of = {id(action) for group in groups for action in group._group_actions}
        needed = [a for a in self._actions if a.required or not a.option_strings or id(a) in one_of]
        formatter = self._get_formatter()
        formatter.add_usage(None, needed, groups)
        return f"{formatter.format_help().rstrip()} [options]\n"


def _unknown_option(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    if name in _FIRST:
        return f"{name} stands before the command: remask {name} COMMAND"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")


def with_config(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return `argv` of a command with the flags of its `--config` file inserted before its own, which then win.

    Raises `ConfigError` if the file cannot be read, or holds anything but an object of the flags of `parser`.
    """
    known = [flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help"]
    path = _named(argv, known) if CONFIG in known else None
    if path is None:
        return list(argv)
    sections = {
        (group.title or "").partition(",")[0]: [flag for each in group._group_actions for flag in each.option_strings]
        for group in parser._action_groups
    }
    # A flag that takes several values would take a word that stands after it, too.
    own = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    return [*argv[:own], *_flags(path, _load(path), known, sections), *argv[own:]]


def _named(argv: Sequence[str], known: Collection[str]) -> str | None:
    """Return the file that the last `--config`, or its abbreviation, names; None without one."""
    found = None
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != CONFIG and [flag for flag in known if flag.startswith(name)] != [CONFIG]:
            continue
        if equals:
            found = value
        elif index + 1 < len(argv):
            found = argv[index + 1]
    return found


def _load(path: str) -> dict[str, Any]:
    import yaml

    try:
        # JSON is YAML. The safe loader makes plain values only.
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{CONFIG}: cannot read {path!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{CONFIG}: {path!r} must hold an object of flags, such as 'port: 8000'")
    return value


def _flags(
    path: str, values: Mapping[str, Any], known: Collection[str], sections: Mapping[str, Collection[str]]
) -> Iterator[str]:
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        if key in sections and isinstance(value, dict):
            yield from _flags(f"{path}, section {key}", value, sections[key], {})
            continue
        if name == CONFIG:
            raise ConfigError(f"{CONFIG}: {path!r} names another file of flags; only one is allowed")
        if name not in known:
            raise UnknownNameError(f"flag in {path!r}", str(key), (flag.removeprefix("--") for flag in known))
        off = f"--no-{name.removeprefix('--')}"
        if value is None or (value is False and off not in known):
            raise ConfigError(
                f"{CONFIG}: {key!r} is {value!r} in {path!r}; a flag is switched off by leaving it out, and where "
                "the value is the word off it stands in quotes, as YAML reads it as false"
            )
        if isinstance(value, list):
            yield name
            yield from map(_word, value)
        elif isinstance(value, bool):
            yield name if value else off
        else:
            yield f"{name}={_word(value)}"  # one word, as a value may begin as a flag does


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)

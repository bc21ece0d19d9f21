"""The parser of the command line: names the word nearest to a misspelled one, and shows the usage of its command.

`--config FILE` names a YAML or JSON file of flags, which those on the command line override. A key of the file is a
flag without its dashes, or the name of a group of the command's help with an object of the group's flags.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, NoReturn

from remask.cli.logs import add_log_options
from remask.errors import REPLACEMENTS, ConfigError, UnknownNameError

_EXAMPLES = "examples:\n"
_GLOBAL_OPTIONS = ("--version",)  # which come before the command
CONFIG: Final = "--config"
ALL: Final = "--help=all"
FURTHER: Final = "further options"
COMMON_OPTIONS: Mapping[str, Sequence[str]] = {
    "model": ("model", "device", "dtype", "quantization"),
    "adapters": ("adapters",),
    "engine": ("max_num_seqs", "max_model_len", "gpu_memory_utilization"),
    "answers": ("cache", "sampling", "served_model_name"),
    "server": ("host", "port", "api_key"),
    FURTHER: (),
}
"""The options that `--help` shows of large groups, by the title of the group; `--help=all` shows all of them."""


def examples(*commands: str) -> str:
    """Return the `epilog` of a parser, which lists complete command lines."""
    return _EXAMPLES + "\n".join(f"  {command}" for command in commands)


class Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples as they are, so that they can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """The parser of the whole command line, of one command, or of a subcommand.

    Each parser refuses unknown options itself, so that the error is printed with the usage of its own command, and each
    has the options of `remask.cli.logs`, so that they may stand before or after the command.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Formatter, **kwargs})
        self._messages = self.add_argument_group("messages, on stderr")
        add_log_options(self._messages)

    def format_help(self) -> str:
        """Return the help with all options. The options that all commands share come last."""
        self._action_groups.sort(key=lambda group: group is self._messages)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        """Print the help of `--help`: the common options, or all options if these are all common."""
        full_help = self.format_help()
        hidden_count = 0
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            common = COMMON_OPTIONS.get(group.title or "")
            actions = [action for action in group._group_actions if common is None or action.dest in common]
            hidden_count += len(group._group_actions) - len(actions)
            formatter.start_section(group.title)
            formatter.add_arguments(actions)
            formatter.end_section()
        config_hint = f", and {CONFIG} FILE sets them" if CONFIG in self._option_string_actions else ""
        formatter.add_text(f"{hidden_count} more options: '{self.prog} {ALL}' lists them{config_hint}.")
        formatter.add_text(self.epilog)
        message = f"{self._brief_usage()}\n{formatter.format_help()}" if hidden_count else full_help
        self._print_message(message, file or sys.stdout)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse `args`, and end the process with an error on unknown ones, which are reported before missing ones."""
        words = sys.argv[1:] if args is None else list(args)
        self._check_options(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"{' '.join(map(repr, unknown))} cannot be used here")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Print a short usage, the error, and how to list all options, then end the process with status 2."""
        self.exit(
            2, f"{self._brief_usage()}{self.prog}: error: {message}\n'{self.prog} {ALL}' lists all that it takes.\n"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # The base class ignores an `OSError`, such as that of a closed pipe.
        (file or sys.stderr).write(message)

    def _check_options(self, words: Sequence[str]) -> None:
        """Print the full help for `--help=all`, and end the process with an error on the first unknown option."""
        options = self._option_string_actions
        for word in words:
            # The parser of the command checks all words behind the command.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            name, _, value = word.partition("=")
            if name == "--help" and value:
                if word != ALL:
                    self.error(f"there is no {word}; give --help for the usual options, {ALL} for all")
                self._print_message(self.format_help(), sys.stdout)
                self.exit()
            if not name.startswith("--") or " " in name or name in options:
                continue
            if not (self.allow_abbrev and any(flag.startswith(name) for flag in options)):
                path = f"{self.prog.removeprefix('remask ')} {name}"
                self.error(
                    str(UnknownNameError("option", path, ())) if path in REPLACEMENTS else _option_hint(name, options)
                )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise `ArgumentError`, which names the nearest choice, if `value` is not one of the option's choices."""
        if action.choices is not None and value not in action.choices:
            kind = "/".join(action.option_strings) or str(action.metavar or action.dest).lower()
            raise argparse.ArgumentError(None, str(UnknownNameError(kind, str(value), map(str, action.choices))))

    def _brief_usage(self) -> str:
        """Return the usage without optional options."""
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        alternatives = [action for group in groups for action in group._group_actions]
        actions = [
            action for action in self._actions if action.required or not action.option_strings or action in alternatives
        ]
        formatter = self._get_formatter()
        formatter.add_usage(None, actions, groups)
        return f"{formatter.format_help().rstrip()} [options]\n"


def _option_hint(name: str, options: Collection[str]) -> str:
    """Return an error about the unknown option `name`, with the nearest of `options` if one is similar."""
    if name in _GLOBAL_OPTIONS:
        return f"{name} comes before the command: remask {name} COMMAND"
    matches = difflib.get_close_matches(name, options, n=1)
    return f"there is no option {name}" + (f"; did you mean {matches[0]}?" if matches else "")


def with_config(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words of a command with the flags of its `--config` file inserted before its own, which then win.

    Returns `argv` unchanged without `--config`. Raises `ConfigError` if the file cannot be read, or is not an object of
    flags of `parser`.
    """
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help"]
    path = _config_path(argv, flags) if CONFIG in flags else None
    if path is None:
        return list(argv)
    sections = {
        (group.title or "").partition(",")[0]: [
            flag for action in group._group_actions for flag in action.option_strings
        ]
        for group in parser._action_groups
    }
    # Behind positional arguments, as a flag that takes several values would take these too.
    first_flag = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    words = _config_flags(path, _load_config(path), flags, sections)
    return [*argv[:first_flag], *words, *argv[first_flag:]]


def _config_path(argv: Sequence[str], flags: Collection[str]) -> str | None:
    """Return the value of the last `--config`, or of an abbreviation of it; None without one."""
    path = None
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name != CONFIG and [flag for flag in flags if flag.startswith(name)] != [CONFIG]:
            continue
        if equals:
            path = value
        elif index + 1 < len(argv):
            path = argv[index + 1]
    return path


def _load_config(path: str) -> dict[str, Any]:
    """Read a YAML or JSON object. Raises `ConfigError` if the file cannot be read or holds anything else."""
    import yaml

    try:
        # JSON is YAML. The safe loader makes plain values only.
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{CONFIG}: cannot read {path!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{CONFIG}: {path!r} must hold an object of flags, such as 'port: 8000'")
    return value


def _config_flags(
    path: str, values: Mapping[str, Any], flags: Collection[str], sections: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield the words of the flags in `values`; `sections` holds the flags of each group of options, by its title."""
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        if key in sections and isinstance(value, dict):
            yield from _config_flags(f"{path}, section {key}", value, sections[key], {})
            continue
        if name == CONFIG:
            raise ConfigError(f"{CONFIG}: {path!r} names another file of flags; only one is allowed")
        if name not in flags:
            raise UnknownNameError(f"flag in {path!r}", str(key), (flag.removeprefix("--") for flag in flags))
        negation = f"--no-{name.removeprefix('--')}"
        if value is None or (value is False and negation not in flags):
            raise ConfigError(
                f"{CONFIG}: {key!r} is {value!r} in {path!r}; a flag is switched off by leaving it out, and where "
                "the value is the word off, put it in quotes, as YAML reads it as false"
            )
        if isinstance(value, list):
            yield name
            yield from map(_flag_value, value)
        elif isinstance(value, bool):
            yield name if value else negation
        else:
            yield f"{name}={_flag_value(value)}"  # one word, as a value may begin with a dash


def _flag_value(value: Any) -> str:
    return json.dumps(value, default=_date_text) if isinstance(value, dict) else str(value)


def _date_text(value: Any) -> str:
    """Return a date of YAML, which an unquoted text may be read as, as text. Raises `ConfigError` on other values."""
    if isinstance(value, date):
        return str(value)
    raise ConfigError(
        f"{CONFIG}: {value!r} is no value of JSON; give a text, a number, true, false, a list or an object"
    )

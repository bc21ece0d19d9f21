"""The parser of the command line: names the word nearest to a misspelled one, and shows the usage of its command."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from remask.cli.logs import add_log_options
from remask.errors import UnknownNameError

_EXAMPLES = "examples:\n"
_FIRST = ("--version",)  # options that stand before the command


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
        """Return the help. What all commands have in common comes last."""
        self._action_groups.sort(key=lambda group: group is self._messages)
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse `args`, all of which must be known. Unknown options are named before required ones are missed."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown_options(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"{' '.join(map(repr, rest))} cannot be used here")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print what the command needs, the error, and where all options are listed. Ends the process with status 2."""
        self.exit(
            2, f"{self._brief_usage()}{self.prog}: error: {message}\n'{self.prog} --help' lists all that it takes.\n"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # The base class hides that nobody reads any more.
        (file or sys.stderr).write(message)

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        known = self._option_string_actions
        for word in words:
            # What follows the first word that is no option is the command's own parser's to judge.
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            if not name.startswith("--") or " " in name or name in known:
                continue
            if not (self.allow_abbrev and any(option.startswith(name) for option in known)):
                self.error(_unknown_option(name, known))

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

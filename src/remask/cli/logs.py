"""What a command prints on stderr: the log, and notices to people. Results go to standard output."""

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from remask.machine.log_format import TEXT, JsonFormatter, logs_json

log = logging.getLogger(__name__)

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
QUIET, LEVEL, FORMAT = "--quiet", "--log-level", "--log-format"
VALUE_OPTIONS = (LEVEL, FORMAT)  # the options below that take a word after them
DEFAULTS = {"quiet": False, "log_level": None, "log_format": FORMATS[0]}
_PROJECT_LOGGERS = ("remask", "remask_lab")
_HTTP_LOGGERS = ("httpx", "httpx2")  # they log every request at info


def add_log_options(group: argparse._ActionsContainer) -> None:
    """Add the options of every command. They have no defaults, as they may stand before or after the command."""
    group.add_argument(
        QUIET,
        action="store_true",
        default=argparse.SUPPRESS,
        help="no banner, no progress bars, and only warnings and errors in the log",
    )
    group.add_argument(
        LEVEL,
        choices=LEVELS,
        default=argparse.SUPPRESS,
        help="minimum level of the log on stderr (default: info for serve and deploy, warning for all others)",
    )
    group.add_argument(
        FORMAT,
        choices=FORMATS,
        default=argparse.SUPPRESS,
        help="json: an object a line, and nothing else on stderr (default text)",
    )


def requested_format(words: Sequence[str]) -> str:
    """Return `--log-format` of the words of a command line before they are parsed; "text" if it is not valid."""
    log_format = FORMATS[0]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == FORMAT:
            log_format = value if equals else "".join(words[index + 1 : index + 2])
    return log_format if log_format in FORMATS else FORMATS[0]


class StderrLog:
    """The log of a command on stderr, within a `with` block. Its end restores the levels of all loggers."""

    def __init__(self) -> None:
        self._handler = _Stderr()
        self._levels: dict[str, int] = {}

    def __enter__(self) -> "StderrLog":
        self._levels = {name: logging.getLogger(name).level for name in ("", *_PROJECT_LOGGERS, *_HTTP_LOGGERS)}
        logging.getLogger().addHandler(self._handler)
        self.configure("warning", FORMATS[0])
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def configure(self, level: str, log_format: str) -> None:
        """Set the level, one of `LEVELS`, and the format, one of `FORMATS`."""
        self._handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT))
        logging.captureWarnings(log_format == "json")
        number = logging.getLevelNamesMapping()[level.upper()]
        for name in _PROJECT_LOGGERS:
            logging.getLogger(name).setLevel(number)
        # Debug messages of other packages are not of interest.
        logging.getLogger().setLevel(max(number, logging.INFO))
        for name in _HTTP_LOGGERS:
            logging.getLogger(name).setLevel(max(number, logging.WARNING))


def print_error(text: str) -> None:
    """Print an error as a line on stderr, or as an entry of the log if the log is JSON."""
    if logs_json():
        log.error("%s", text)
    else:
        print(text, file=sys.stderr)


def print_notice(args: argparse.Namespace, text: str) -> None:
    """Print `text` on stderr, unless `--quiet` or `--log-format json` was given."""
    if args.people:
        print(text, file=sys.stderr, flush=True)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stderr` is at the moment, which tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

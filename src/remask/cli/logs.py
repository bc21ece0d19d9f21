"""What a command says beside its results, all of it on stderr: the log, and what people are told."""

import argparse
import logging
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

from remask.machine.log_format import TEXT, JsonFormatter, logs_json

log = logging.getLogger(__name__)

LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
QUIET, LEVEL, FORMAT = "--quiet", "--log-level", "--log-format"
WITH_VALUE = (LEVEL, FORMAT)  # the options below that take a word after them
DEFAULTS = {"quiet": False, "log_level": None, "log_format": FORMATS[0]}
_OWN = ("remask", "remask_lab")
# These libraries log every request that they send.
_CHATTY = ("httpx", "httpx2")


def add_log_options(group: argparse._ActionsContainer) -> None:
    """Add the options of every command. They have no defaults, as they may stand before the command or after it."""
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
        help="least level of the log on stderr (default: info for serve and deploy, warning for all others)",
    )
    group.add_argument(
        FORMAT,
        choices=FORMATS,
        default=argparse.SUPPRESS,
        help="json: an object a line, and nothing else on stderr (default text)",
    )


def asked_format(words: Sequence[str]) -> str:
    """The format of the log that `words` of a command line ask for, as it is needed before they are parsed."""
    found = FORMATS[0]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == FORMAT:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found if found in FORMATS else FORMATS[0]


class StderrLog:
    """The log of a command on stderr, as long as a `with` block runs; then everything is as it was before."""

    def __init__(self) -> None:
        self._handler = _Stderr()
        self._levels: dict[str, int] = {}

    def __enter__(self) -> "StderrLog":
        self._levels = {name: logging.getLogger(name).level for name in ("", *_OWN, *_CHATTY)}
        logging.getLogger().addHandler(self._handler)
        self.set("warning", FORMATS[0])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)

    def set(self, level: str, form: str) -> None:
        """Take another level, one of `LEVELS`, and another format, one of `FORMATS`."""
        self._handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
        logging.captureWarnings(form == "json")
        number = logging.getLevelNamesMapping()[level.upper()]
        for name in _OWN:
            logging.getLogger(name).setLevel(number)
        # Nobody asks for what other packages say to those who debug them.
        logging.getLogger().setLevel(max(number, logging.INFO))
        for name in _CHATTY:
            logging.getLogger(name).setLevel(max(number, logging.WARNING))


def tell(text: str) -> None:
    """Say on stderr what went wrong: a line of its own, which is one of the log where that is JSON."""
    if logs_json():
        log.error("%s", text)
    else:
        print(text, file=sys.stderr)


def tell_people(args: argparse.Namespace, text: str) -> None:
    """Print `text` on stderr, unless `args` ask for quiet or for nothing but JSON there."""
    if args.people:
        print(text, file=sys.stderr, flush=True)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what is standard error at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

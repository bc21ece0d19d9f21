"""Entry point: parses the command line, runs one command, turns errors into exit codes."""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Container, Sequence

from remask import __version__
from remask.cli import config_file
from remask.cli.commands import Command, all_commands, missing
from remask.cpu import wait_passively
from remask.errors import RemaskError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a write comes to where no more fits

_SILENT = frozenset({"--quiet", "-h", "--help"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run `remask`. Returns the exit status: 0 for success, 1 if some requests failed, 2 if nothing could be run."""
    wait_passively()
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except RemaskError as error:
        print(f"remask: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.WARNING if args.quiet else logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr
    )
    # These libraries log every request that they send.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        status: int = _run(args)
    except RemaskError as error:
        print(f"remask {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        _drop_output()
        return 141  # as if ended by SIGPIPE
    except OSError as error:
        # Files have errors of their own, which name them, so what has no name here is standard output.
        if error.filename is not None or error.errno not in FULL:
            raise
        _drop_output()
        print(f"remask {args.command}: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"remask {args.command}: interrupted", file=sys.stderr)
        return 130
    return status


def _drop_output() -> None:
    """Let what is printed go nowhere. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        raise missing(error, args.extra) from error
    return status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`. The attribute `run` of the result runs the command.

    Only the command that `argv` names is imported. If `argv` is invalid, prints the usage and ends the process.
    """
    known = all_commands()
    words = _joined(list(argv), known)
    place = _place(words)
    chosen = words[place] if place < len(words) else None
    parser = argparse.ArgumentParser(prog="remask", description="Inference engine for diffusion language models.")
    parser.add_argument("--version", action="version", version=f"remask {__version__}")
    parser.add_argument("--quiet", action="store_true", help="warnings and errors only, no progress bars")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in known.items():
        own = commands.add_parser(name, help=command.summary)
        if name == chosen:
            if command.opening is not None and not _SILENT & set(words):
                print(f"remask {name}: {command.opening}", file=sys.stderr, flush=True)
            _fill(own, command)
            if name == "serve":
                words = [*words[: place + 1], *config_file.expand(words[place + 1 :], _flags(own))]
    return parser.parse_args(words)


def _fill(parser: argparse.ArgumentParser, command: Command) -> None:
    module = command.load()
    parser.set_defaults(run=getattr(module, "run", None), extra=command.extra)
    module.add_arguments(parser)


def _place(words: list[str]) -> int:
    """Return the index of the command in `words`; their number if there is no command."""
    return next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))


def _joined(words: list[str], known: Container[str]) -> list[str]:
    """Return `words` with a command of two words, such as `bench serve`, joined to one."""
    place = _place(words)
    name = " ".join(words[place : place + 2])
    return [*words[:place], name, *words[place + 2 :]] if name in known else words


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that the file of `remask serve --config` may hold."""
    return [flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help"]

"""Entry point: parses the command line, runs one command, turns errors into exit codes."""

import argparse
import logging
import os
import sys
from collections.abc import Container, Sequence

from remask import __version__
from remask.cli import chat, config_file, deploy, generate, inspect, profile, serve
from remask.errors import RemaskError
from remask_lab.cli import analyze, bench, bench_serve, demo, evaluate, profile_ops

COMMANDS = (generate, serve, deploy, chat, demo, bench, bench_serve, profile, profile_ops, analyze, evaluate, inspect)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `remask`. Returns the exit status: 0 all well, 1 some requests failed, 2 nothing could be done."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
    except RemaskError as error:
        print(f"remask: error: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(
        level=logging.WARNING if args.quiet else logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr
    )
    # Libraries that log every request of their own would drown ours.
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        status: int = args.run(args)
    except RemaskError as error:
        print(f"remask {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if ended by SIGPIPE
    except KeyboardInterrupt:
        print(f"remask {args.command}: interrupted", file=sys.stderr)
        return 130
    return status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `argv`; `run` among them runs the command. What cannot be parsed ends the process, with usage."""
    parser = argparse.ArgumentParser(prog="remask", description="Inference engine for diffusion language models.")
    parser.add_argument("--version", action="version", version=f"remask {__version__}")
    parser.add_argument("--quiet", action="store_true", help="warnings and errors only, no progress bars")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    words = _joined(list(argv), commands.choices)
    return parser.parse_args(_with_config_file(words, commands.choices["serve"]))


def _place(words: list[str]) -> int:
    """Where the command stands."""
    return next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))


def _joined(words: list[str], known: Container[str]) -> list[str]:
    """`words` with a command of two words, such as `bench serve`, as one."""
    place = _place(words)
    name = " ".join(words[place : place + 2])
    return [*words[:place], name, *words[place + 2 :]] if name in known else words


def _with_config_file(words: list[str], serve_parser: argparse.ArgumentParser) -> list[str]:
    """`words` with the flags of the file that `remask serve --config` names."""
    place = _place(words)
    if words[place : place + 1] != ["serve"]:
        return words
    flags = [flag for flag in serve_parser._option_string_actions if flag.startswith("--") and flag != "--help"]
    return [*words[: place + 1], *config_file.expand(words[place + 1 :], flags)]

"""Entry point: parses the command line, runs one command, turns errors into exit codes."""

import argparse
import logging
import sys
from collections.abc import Sequence

from remask import __version__
from remask.cli import bench, demo, generate, profile, serve
from remask.errors import RemaskError

COMMANDS = (generate, serve, demo, bench, profile)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `remask`. Returns the exit status: 0 all well, 1 some requests failed, 2 nothing could be done."""
    parser = argparse.ArgumentParser(prog="remask", description="Inference engine for diffusion language models.")
    parser.add_argument("--version", action="version", version=f"remask {__version__}")
    parser.add_argument("--quiet", action="store_true", help="warnings and errors only, no progress bars")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING if args.quiet else logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr
    )
    # Libraries that log every request of their own would drown ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        status: int = args.run(args)
    except RemaskError as error:
        print(f"remask {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"remask {args.command}: interrupted", file=sys.stderr)
        return 130
    return status

"""Entry point: parses the command line, runs one command, turns errors into exit codes."""

import argparse
import atexit
import difflib
import errno
import gc
import logging
import os
import sys
from collections.abc import Collection, Sequence

from remask import __version__
from remask.checks.plugins import install_command
from remask.cli.about import print_about
from remask.cli.commands import ALIASES, LAB_COMMANDS, MOVED_COMMANDS, all_commands
from remask.cli.logs import DEFAULTS, VALUE_OPTIONS, StderrLog, print_error, print_notice, requested_format
from remask.cli.parser import Parser, examples, with_config
from remask.errors import REPLACEMENTS, ConfigError, RemaskError, UnknownNameError
from remask.machine.cpu import wait_passively
from remask.machine.log_format import logs_json

log = logging.getLogger(__name__)

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_MAX_REASON = 200  # characters that are shown of a message of the system
_BROKEN_PIPE_STATUS, _INTERRUPT_STATUS = 141, 130  # of a process that SIGPIPE or SIGINT ended: 128 and its number
_EXAMPLES = ("remask demo", "remask generate --model bundled --input requests.jsonl --cache bicache")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `remask`. Returns the exit status: 0 for success, 1 if some requests failed, 2 if nothing could be run."""
    wait_passively()
    atexit.unregister(_skip_final_collection)
    atexit.register(_skip_final_collection)
    words = sys.argv[1:] if argv is None else argv
    with StderrLog() as stderr:
        stderr.configure("warning", requested_format(words))
        try:
            return _main(words, stderr)
        finally:
            gc.unfreeze()  # what commands froze


def _skip_final_collection() -> None:
    """Freeze all objects, as a collection at the end of the process takes half a second with PyTorch.

    Does nothing with Triton, which reports objects that are not freed.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _main(words: Sequence[str], stderr: StderrLog) -> int:
    """Parse and run the command line. Returns the exit status. Raises errors as `_report_unexpected` does."""
    program = "remask"
    try:
        try:
            if sorted(words) == ["--json", "--version"]:
                print_about()
                return 0
            args = parse(words)
            program = f"remask {args.command}"
            stderr.configure(args.log_level, args.log_format)
            if args.early is not None:
                args.early(args)
            if args.opening is not None and vars(args).get("base_url") is None:  # else a server has loaded the model
                print_notice(args, f"{program}: {args.opening}")
            status: int = args.run(args)
            return status
        finally:
            sys.stdout.flush()  # at exit Python would flush it too, but an error could not be reported any more
    except RemaskError as error:
        print_error(f"{program}: error: {error}")
        return 2
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        _discard_output()
        return _BROKEN_PIPE_STATUS
    except OSError as error:
        # An error of any other file names that file, so one without a name is standard output's.
        if error.filename is None and error.errno in FULL_DISK_ERRORS:
            _discard_output()
            print_error(f"{program}: error: standard output cannot be written: {error.strerror}")
            return 2
        return _report_unexpected(program, error)
    except KeyboardInterrupt:
        print_error(f"{program}: interrupted")
        return _INTERRUPT_STATUS
    except Exception as error:
        return _report_unexpected(program, error)


def _report_unexpected(program: str, error: Exception) -> int:
    """Report an error that is not a `RemaskError`, and return the exit status.

    Raises `error` again, for its traceback, unless memory ran out or the log is JSON.
    """
    if _is_out_of_memory(error):
        reason = (str(error) or type(error).__name__).splitlines()[0][:_MAX_REASON]
        print_error(
            f"{program}: error: the memory of this machine ran out ({reason}): use a lower --max-num-seqs or "
            "--max-model-len, or --quantization int8"
        )
        return 2
    if not logs_json():
        raise error
    log.critical("%s failed", program, exc_info=error)
    return 1


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the machine or, if PyTorch was imported, of a device."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from remask.machine.device import is_out_of_memory

    return is_out_of_memory(error)


def _discard_output() -> None:
    """Redirect standard output to the null device, as Python would report the error again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`, the words after the program's name. The attribute `run` of the result runs the command.

    Imports the options of the command that `argv` names, and of no other. Prints the usage and ends the process if
    `argv` is invalid. Raises `ConfigError` if a package that the command needs is missing.
    """
    commands = all_commands()
    words = _normalize_command(list(argv), commands)
    command_index = _find_command(words)
    command_name = words[command_index] if command_index < len(words) else None
    parser = Parser(
        prog="remask",
        description="Inference engine for diffusion language models.",
        epilog=examples(*_EXAMPLES),
        allow_abbrev=False,
    )
    version_help = "print it; with --json also packages, processor and devices, for reports"
    parser.add_argument("--version", action="version", version=f"remask {__version__}", help=version_help)
    parser.set_defaults(**DEFAULTS, early=None)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        subparser = subparsers.add_parser(name, aliases=aliases, help=command.summary)
        if name == command_name:
            command.add_arguments(subparser)
            words = [*words[: command_index + 1], *with_config(words[command_index + 1 :], subparser)]
    args = parser.parse_args(words)
    command = commands[args.command]
    args.opening = command.opening
    args.banner = command.banner
    args.log_level = args.log_level or ("warning" if args.quiet else command.log_level)
    args.people = not args.quiet and args.log_format == "text"
    args.progress = args.people
    return args


def _find_command(words: list[str]) -> int:
    """Return the index of the command in `words`, or `len(words)` if there is none."""
    option_values = {index + 1 for index, word in enumerate(words) if word in VALUE_OPTIONS}
    for index, word in enumerate(words):
        if not word.startswith("-") and index not in option_values:
            return index
    return len(words)


def _normalize_command(words: list[str], commands: Collection[str]) -> list[str]:
    """Return `words` with a command of two words, such as `models pull`, as one, and an alias replaced by its command.

    Raises `UnknownNameError` if the second word of a command is misspelled or the command has left, and `ConfigError`
    if the command has moved or its package is not installed.
    """
    index = _find_command(words)
    first = words[index : index + 1]
    if first and first[0] in ALIASES:
        return [*words[:index], ALIASES[first[0]], *words[index + 1 :]]
    pair = " ".join(words[index : index + 2])
    for name in (pair, *first):
        if name in REPLACEMENTS and "--" not in name:  # the command's own parser refuses options that have left
            raise UnknownNameError("command", name, commands)
        if name in MOVED_COMMANDS:
            raise ConfigError(f"there is no command {name!r} any more; use {MOVED_COMMANDS[name]}")
        if name in LAB_COMMANDS and name not in commands:
            raise ConfigError(f"the command {name!r} is part of remask-lab; install it with: {install_command('lab')}")
    if pair in commands:
        return [*words[:index], pair, *words[index + 2 :]]
    pairs = [command for command in commands if " " in command and command.split()[:1] == first]
    if " " in pair and difflib.get_close_matches(pair, pairs, n=1, cutoff=0.8):
        raise UnknownNameError("command", pair, commands)
    return words

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
from remask.checks.plugins import install_line
from remask.cli.about import print_about
from remask.cli.commands import ALSO, LABORATORY, MOVED, all_commands
from remask.cli.logs import DEFAULTS, WITH_VALUE, StderrLog, asked_format, tell, tell_people
from remask.cli.parser import Parser, examples, with_config
from remask.errors import LEFT, ConfigError, RemaskError, UnknownNameError
from remask.machine.cpu import wait_passively
from remask.machine.log_format import logs_json

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a write comes to where no more fits

_SHOWN = 200  # characters of what the system says
_EXAMPLES = ("remask demo", "remask generate --model bundled --input requests.jsonl --cache bicache")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `remask`. Returns the exit status: 0 for success, 1 if some requests failed, 2 if nothing could be run."""
    wait_passively()
    atexit.unregister(_end_quickly)
    atexit.register(_end_quickly)
    words = sys.argv[1:] if argv is None else argv
    with StderrLog() as stderr:
        stderr.set("warning", asked_format(words))
        try:
            return _main(words, stderr)
        finally:
            gc.unfreeze()  # what commands froze


def _end_quickly() -> None:
    """Let the end of the process look for no garbage, which takes half a second with PyTorch.

    Not with Triton, which reports what is not freed.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _main(words: Sequence[str], stderr: StderrLog) -> int:
    program = "remask"
    try:
        try:
            if sorted(words) == ["--json", "--version"]:
                print_about()
                return 0
            args = parse(words)
            program = f"remask {args.command}"
            stderr.set(args.log_level, args.log_format)
            if args.early is not None:
                args.early(args)
            if args.opening is not None and vars(args).get("base_url") is None:  # whatever is there has loaded it
                tell_people(args, f"{program}: {args.opening}")
            status: int = args.run(args)
            return status
        finally:
            sys.stdout.flush()  # Python would do so at exit, where nothing can be said of an error
    except RemaskError as error:
        tell(f"{program}: error: {error}")
        return 2
    except BrokenPipeError:
        # The reader of the output has closed the pipe.
        _drop_output()
        return 141  # as if ended by SIGPIPE
    except OSError as error:
        # Files have errors of their own, which name them, so what has no name here is standard output.
        if error.filename is None and error.errno in FULL:
            _drop_output()
            tell(f"{program}: error: standard output cannot be written: {error.strerror}")
            return 2
        return _unforeseen(program, error)
    except KeyboardInterrupt:
        tell(f"{program}: interrupted")
        return 130
    except Exception as error:
        return _unforeseen(program, error)


def _unforeseen(program: str, error: Exception) -> int:
    """Tell an error that no check foresaw, and return the exit status. Raises it where it is for developers."""
    if _exhausted(error):
        reason = (str(error) or type(error).__name__).splitlines()[0][:_SHOWN]
        tell(
            f"{program}: error: the memory of this machine ran out ({reason}): use a lower --max-num-seqs or "
            "--max-model-len, or --quantization int8"
        )
        return 2
    if not logs_json():
        raise error
    log.critical("%s failed", program, exc_info=error)
    return 1


def _exhausted(error: Exception) -> bool:
    """Whether memory ran out. PyTorch, if it is not imported, has not allocated any."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from remask.machine.device import is_out_of_memory

    return is_out_of_memory(error)


def _drop_output() -> None:
    """Let what is printed go nowhere. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`. The attribute `run` of the result runs the command.

    Only the options of the command that `argv` names are imported. If `argv` is invalid, prints the usage and ends the
    process. Raises `ConfigError` where a package that the command needs is missing.
    """
    known = all_commands()
    words = _joined(list(argv), known)
    place = _place(words)
    chosen = words[place] if place < len(words) else None
    parser = Parser(
        prog="remask",
        description="Inference engine for diffusion language models.",
        epilog=examples(*_EXAMPLES),
        allow_abbrev=False,
    )
    about = "print it; with --json also packages, processor and devices, for reports"
    parser.add_argument("--version", action="version", version=f"remask {__version__}", help=about)
    parser.set_defaults(**DEFAULTS, early=None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in known.items():
        own = commands.add_parser(name, aliases=[each for each in ALSO if ALSO[each] == name], help=command.summary)
        if name == chosen:
            command.add_arguments(own)
            words = [*words[: place + 1], *with_config(words[place + 1 :], own)]
    args = parser.parse_args(words)
    used = known[args.command]
    args.opening, args.banner = used.opening, used.banner
    args.log_level = args.log_level or ("warning" if args.quiet else used.log_level)
    args.people = not args.quiet and args.log_format == "text"
    args.progress = args.people
    return args


def _place(words: list[str]) -> int:
    """Return the index of the command in `words`; their number if there is no command."""
    taken = {index + 1 for index, word in enumerate(words) if word in WITH_VALUE}
    return next(
        (index for index, word in enumerate(words) if not word.startswith("-") and index not in taken), len(words)
    )


def _joined(words: list[str], known: Collection[str]) -> list[str]:
    """Return `words` with a command of two words, such as `models pull`, joined to one, and another name as its own.

    Raises `UnknownNameError` where the second of them is misspelled or the command has left, and `ConfigError` on a
    command that has moved, or whose package is not installed.
    """
    place = _place(words)
    if words[place : place + 1] and words[place] in ALSO:
        return [*words[:place], ALSO[words[place]], *words[place + 1 :]]
    name = " ".join(words[place : place + 2])
    for each in (name, *words[place : place + 1]):
        if each in LEFT and "--" not in each:  # options are their command's to refuse
            raise UnknownNameError("command", each, known)
        if each in MOVED:
            raise ConfigError(f"there is no command {each!r} any more; use {MOVED[each]}")
        if each in LABORATORY and each not in known:
            raise ConfigError(f"the command {each!r} is part of remask-lab; install it with: {install_line('lab')}")
    if name in known:
        return [*words[:place], name, *words[place + 2 :]]
    pairs = [each for each in known if words[place : place + 1] == each.split()[:1] and " " in each]
    if " " in name and difflib.get_close_matches(name, pairs, n=1, cutoff=0.8):
        raise UnknownNameError("command", name, known)
    return words

"""What the measurements share: how they are declared, how they end, and times of calls that take turns."""

import argparse
import importlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from remask.checks.values import check_whole
from remask.errors import RemaskError
from remask.machine.disk import write_whole
from remask_lab.records.machine import commit, machine

if TYPE_CHECKING:
    from remask.llm import LLM
    from remask_lab.records.record import Record

ON = "--dtype float32 --device auto"
"""The options that choose where a model runs."""
_LEAST = {"questions": 0, "prefix": 0, "depths": 0}  # of numbers that may be smaller than 1
_ANY = {"INT": int, "STR": str}


@dataclass(frozen=True, slots=True)
class Shown:
    """A result, and the text that is printed in place of its JSON."""

    data: "Mapping[str, Any] | Record"
    text: str


def run_named(command: str, doc: str | None, measurements: Mapping[str, tuple[str, str]]) -> int:
    """Run the one of a command's `measurements` that the first word names. Returns the exit status.

    Each is the module of a function of its name, and its options with their defaults. Only that module is imported.
    """
    parser = command_parser(doc, command)
    parser.add_argument("name", choices=measurements)
    name = parser.parse_args(sys.argv[1:2]).name
    return run_command(partial(run_measurement, command, name, *measurements[name], sys.argv[2:]))


def run_measurement(command: str, name: str, module: str, usage: str, words: Sequence[str]) -> None:
    """Parse `words` by `usage` and `--json`, run, print what was found, and write it where `--json` says.

    The function's docstring is the help. A mapping gets the options beside its figures. Raises `ConfigError` on whole
    numbers that are too small.
    """
    run = getattr(importlib.import_module(module), name)
    parser = command_parser(inspect.getdoc(run), f"{command} {name}")
    add_options(parser, f"{usage} --json STR".strip())
    args = parser.parse_args(words)
    for option, value in vars(args).items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, int) and not isinstance(each, bool):
                check_whole(f"--{option.replace('_', '-')}", each, low=_LEAST.get(option, 1))
    found = run(args)
    if found is None:
        return
    data, text = (found.data, found.text) if isinstance(found, Shown) else (found, None)
    if isinstance(data, Mapping):
        options = {option: value for option, value in vars(args).items() if option != "json"}
        result = json.dumps({**options, **data}, indent=2)
        print(result if text is None else text)
        if args.json:
            write_whole("the result", args.json, result + "\n")
        return
    print(json.dumps(data.data, indent=2) if text is None else text)
    if args.json:
        from remask_lab.records.record import write_record

        write_record(args.json, data)


def add_options(parser: argparse.ArgumentParser, usage: str) -> None:
    """Add the options of a command line with its defaults: "--rounds 3 --caches none,reuse --depths 1 2 --threads INT".

    Several words make a list, and so do dots behind one; none a flag. INT and STR stand for what is None unless given.
    """
    for option in usage.removeprefix("--").split(" --"):
        name, *words = option.split()
        if not words:
            parser.add_argument(f"--{name}", action="store_true")
        elif words[0] in _ANY:
            parser.add_argument(f"--{name}", type=_ANY[words[0]])
        else:
            several = len(words) > 1 or words[0].endswith("...")
            values = [_typed(word.removesuffix("...")) for word in words]
            many, default = ("*", values) if several else (None, values[0])
            text = "default: %(default)s"
            parser.add_argument(f"--{name}", nargs=many, type=type(values[0]), default=default, help=text)


def _typed(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def command_parser(doc: str | None, words: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with a docstring; `words` name the command behind `python -m remask_lab`."""
    prog = None if words is None else f"python -m remask_lab {words}"
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_command(main: Callable[[], None]) -> int:
    """Run a command. Returns 0, or 2 after printing an error that the user can mend."""
    try:
        main()
    except RemaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(llm: "LLM", **figures: Any) -> dict[str, Any]:
    return {"machine": machine(llm), "commit": commit(), **figures}


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    turns: int,
    seconds: Callable[[Callable[[], object]], float],
    first: int = 1,
) -> dict[str, list[float]]:
    """What `seconds` says of each call in every turn; the `first` turns, which make kernels, do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + first):
        for name, call in calls.items():
            taken = seconds(call)
            if turn >= first:
                times[name].append(taken)
    return times


def ratio_and_range(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median ratio of two that took turns, and its range."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}


def cpu_seconds(act: Callable[[], object]) -> float:
    """CPU time of this process in a call, that of all threads."""
    start = time.process_time()
    act()
    return time.process_time() - start

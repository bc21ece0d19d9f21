"""The command line of the measurements, and times of calls that take turns."""

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
_MINIMUMS = {"questions": 0, "prefix": 0, "depths": 0}  # of the options whose minimum is not 1
_TYPES = {"INT": int, "STR": str}


@dataclass(frozen=True, slots=True)
class Printout:
    """A result, and the text that is printed in place of its JSON."""

    data: "Mapping[str, Any] | Record"
    text: str


def run_named(command: str, doc: str | None, measurements: Mapping[str, tuple[str, str]]) -> int:
    """Run the measurement that the command line's first argument names. Returns the exit status.

    `measurements` are, by name, the module with the function of that name, and options as `add_options` takes them.
    Only that module is imported.
    """
    parser = command_parser(doc, command)
    parser.add_argument("name", choices=measurements)
    name = parser.parse_args(sys.argv[1:2]).name
    return run_command(partial(run_measurement, command, name, *measurements[name], sys.argv[2:]))


def run_measurement(command: str, name: str, module: str, usage: str, arguments: Sequence[str]) -> None:
    """Parse `arguments` by `usage`, run the function `name` of `module`, and print its result.

    The function's docstring is the help. `--json` names a file for the result. A mapping is written with the options
    beside it, a record as it is. Raises `ConfigError` on whole numbers that are too small.
    """
    measurement = getattr(importlib.import_module(module), name)
    parser = command_parser(inspect.getdoc(measurement), f"{command} {name}")
    add_options(parser, f"{usage} --json STR".strip())
    args = parser.parse_args(arguments)
    for option, value in vars(args).items():
        for number in value if isinstance(value, list) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                check_whole(f"--{option.replace('_', '-')}", number, low=_MINIMUMS.get(option, 1))
    result = measurement(args)
    if result is None:
        return
    data, text = (result.data, result.text) if isinstance(result, Printout) else (result, None)
    if isinstance(data, Mapping):
        options = {option: value for option, value in vars(args).items() if option != "json"}
        json_text = json.dumps({**options, **data}, indent=2)
        print(json_text if text is None else text)
        if args.json:
            write_whole("the result", args.json, json_text + "\n")
        return
    print(json.dumps(data.data, indent=2) if text is None else text)
    if args.json:
        from remask_lab.records.record import write_record

        write_record(args.json, data)


def add_options(parser: argparse.ArgumentParser, usage: str) -> None:
    """Add the options of `usage`, which is a command line of their defaults: "--rounds 3 --depths 1 2 --threads INT".

    An option without a value is a flag, one with several values or with "..." behind its only one a list, and one with
    INT or STR has that type and the default None.
    """
    for option in usage.removeprefix("--").split(" --"):
        name, *words = option.split()
        if not words:
            parser.add_argument(f"--{name}", action="store_true")
        elif words[0] in _TYPES:
            parser.add_argument(f"--{name}", type=_TYPES[words[0]])
        else:
            is_list = len(words) > 1 or words[0].endswith("...")
            values = [_parse_value(word.removesuffix("...")) for word in words]
            nargs, default = ("*", values) if is_list else (None, values[0])
            text = "default: %(default)s"
            parser.add_argument(f"--{name}", nargs=nargs, type=type(values[0]), default=default, help=text)


def _parse_value(word: str) -> int | float | str:
    """`word` as a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def command_parser(doc: str | None, words: str | None = None) -> argparse.ArgumentParser:
    """A parser with the docstring `doc` as its help; `words` are the command after `python -m remask_lab`."""
    prog = None if words is None else f"python -m remask_lab {words}"
    return argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_command(main: Callable[[], None]) -> int:
    """Run `main`. Returns 0, or 2 after printing a `RemaskError`."""
    try:
        main()
    except RemaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(llm: "LLM", **figures: Any) -> dict[str, Any]:
    """`figures` with the machine and the commit."""
    return {"machine": machine(llm), "commit": commit(), **figures}


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    turns: int,
    seconds: Callable[[Callable[[], object]], float],
    first: int = 1,
) -> dict[str, list[float]]:
    """`seconds(call)` of each call in every turn. `first` further turns, which compile kernels, come first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + first):
        for name, call in calls.items():
            duration = seconds(call)
            if turn >= first:
                times[name].append(duration)
    return times


def ratio_and_range(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median and the range of the ratios of two series that took turns."""
    ratios = [our_value / their_value for our_value, their_value in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process during a call."""
    start = time.process_time()
    call()
    return time.process_time() - start

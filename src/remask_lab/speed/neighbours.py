"""What busy neighbours cost: the time of a command alone on the machine, and beside processes that never pause.

    python -m remask_lab.speed.neighbours [--command demo] [--neighbours 2] [--threads auto,1,2] [--rounds 3]

Runs `remask demo`, or `remask bench` on the bundled model, each time in a process of its own, so that the start counts
too. Turns alone and turns beside the neighbours alternate. Each neighbour is a process of this command's priority that
computes without end. The aim is a `ratio` of at most 2 with `auto`, for which the command chooses its number of
threads. The turns alone say what others used meanwhile: on a machine with other work their times are no idle ones.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from remask.checks.values import one_of, whole
from remask.machine.cpu import read_cpu
from remask.machine.disk import write_whole
from remask_lab.records.machine import commit, conditions, host
from remask_lab.speed.command import REMASK, command_parser, run_command

AUTO = "auto"
NEIGHBOUR = (sys.executable, "-c", "while True: pass")
COMMANDS: Mapping[str, Sequence[str]] = {
    "demo": ("demo", "--picture", "depth.png"),
    "bench": ("bench", "--model", "bundled-tariff", "--requests", "48", "--rounds", "1"),
}


def main() -> None:
    """Measure, print one JSON object, and write it where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--command", default="demo", help="demo or bench (default demo)")
    parser.add_argument("--requests", type=int, help="questions that the command asks (default: its own number)")
    parser.add_argument("--neighbours", type=int, default=2, help="processes that compute without end (default 2)")
    parser.add_argument("--threads", default=AUTO, help="numbers of threads to compare (default auto)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    args = parser.parse_args()
    one_of("--command", args.command, COMMANDS)
    whole("--neighbours", args.neighbours, low=1)
    whole("--rounds", args.rounds, low=1)
    words = [*REMASK, "--quiet", *COMMANDS[args.command]]
    words += [] if args.requests is None else ["--requests", str(args.requests)]
    contenders = {
        name: [*words, *([] if name == AUTO else ["--threads", name])]
        for name in dict.fromkeys(args.threads.split(","))
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    alone: list[dict[str, object]] = []
    for _ in range(args.rounds):
        for name, command in contenders.items():
            began = read_cpu()
            idle = seconds(command)
            alone.append(conditions(began))
            with neighbours(args.neighbours):
                turns[name].append((idle, seconds(command)))
    result = {
        "machine": host(),
        "commit": commit(),
        "command": " ".join(COMMANDS[args.command]),
        "neighbours": args.neighbours,
        "rounds": args.rounds,
        "threads": {name: summary(each) for name, each in turns.items()},
        "alone": alone,
    }
    text = json.dumps(result, indent=2)
    if args.json:
        write_whole("the result", args.json, text + "\n")
    print(text)


def seconds(command: Sequence[str]) -> float:
    """Time that a process takes in a folder of its own. Raises `CalledProcessError` where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(folder))
        return time.perf_counter() - start


@contextmanager
def neighbours(number: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that compute without end, as long as the block lasts."""
    with ExitStack() as stack:
        started = []
        for _ in range(number):
            started.append(stack.enter_context(subprocess.Popen(NEIGHBOUR)))
            stack.callback(started[-1].kill)
        yield started


def summary(turns: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians over rounds, and ranges, of pairs of seconds alone and beside neighbours."""
    figures = {
        "alone_s": [alone for alone, _ in turns],
        "beside_s": [beside for _, beside in turns],
        "ratio": [beside / alone for alone, beside in turns],
    }
    found: dict[str, Any] = {}
    for name, values in figures.items():
        found[name] = statistics.median(values)
        found[f"{name}_range"] = [min(values), max(values)]
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))

"""CPU time of starting Python, PyTorch and remask.

    python -m remask_lab.speed.startup [--rounds 7] [--json FILE]

Runs bare Python, `import torch`, `import remask`, `remask --version` and `remask --help` in turns, each in a process of
its own, and takes the CPU time of the process, user and system together. One round before the others fills the caches
of files. Each time is reported in seconds, in seconds above bare Python, and as a ratio to `import torch`: medians over
rounds, and ranges.
"""

import json
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from remask.checks.values import whole
from remask.machine.disk import write_whole
from remask_lab.records.machine import commit, host
from remask_lab.speed.command import REMASK, command_parser, run_command

PYTHON, TORCH = "python -c pass", "python -c 'import torch'"
COMMANDS: Mapping[str, Sequence[str]] = {
    PYTHON: (sys.executable, "-c", "pass"),
    TORCH: (sys.executable, "-c", "import torch"),
    "python -c 'import remask'": (sys.executable, "-c", "import remask"),
    "remask --version": (*REMASK, "--version"),
    "remask --help": (*REMASK, "--help"),
}


def main() -> None:
    """Measure, print one JSON object, and write it where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    args = parser.parse_args()
    whole("--rounds", args.rounds, low=1)
    rounds = [{name: cpu_seconds(words) for name, words in COMMANDS.items()} for _ in range(args.rounds + 1)][1:]
    result = {
        "machine": {**host(), "python": platform.python_version()},
        "commit": commit(),
        "rounds": args.rounds,
        "results": {name: summary(name, rounds) for name in COMMANDS},
    }
    text = json.dumps(result, indent=2)
    if args.json:
        write_whole("the result", args.json, text + "\n")
    print(text)


def cpu_seconds(words: Sequence[str]) -> float:
    """User and system time of a process and its children. Raises `CalledProcessError` where the process fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def summary(name: str, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The time of one command, and how it compares with bare Python and with PyTorch in the same rounds."""
    figures = {
        "cpu_s": [each[name] for each in rounds],
        "above_python_s": [each[name] - each[PYTHON] for each in rounds],
        "ratio_to_torch": [each[name] / each[TORCH] for each in rounds],
    }
    found: dict[str, Any] = {}
    for figure, values in figures.items():
        found[figure] = statistics.median(values)
        found[f"{figure}_range"] = [min(values), max(values)]
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))

"""`python -m remask_lab audits NAME`: measures one thing of audits, and prints it. benchmarks/README.md has them."""

import argparse
import sys
from functools import partial

from remask_lab.audits import measure
from remask_lab.speed.command import run_command, run_measurement

MODEL = "--model smollm2 --task town --task-settings {} --sampling {} --seed 7"
MEASUREMENTS = {
    "learned": (measure.learned, f"{MODEL} --learn 24 --questions 400 --pages 200 --depth 6 --at-once 1"),
    "changed": (measure.changed, "--model smollm2 --before 64 --after 264 --seed 7"),
    "ordered": (measure.ordered, "--model smollm2 --caches block-dual,dllm-cache,dkv-decode --audits 30 --seed 7"),
    "moved": (measure.moved, f"{MODEL} --questions 96 --pages 48"),
    "simulated": (measure.simulated, "--input STR --depth 8 --draws 2000 --seed 7"),
}


def main() -> int:
    """Run the measurement that the first word names. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m remask_lab audits", description=__doc__)
    parser.add_argument("name", choices=MEASUREMENTS)
    name = parser.parse_args(sys.argv[1:2]).name
    run, usage = MEASUREMENTS[name]
    return run_command(partial(run_measurement, run, usage, sys.argv[2:], name, command="audits"))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m remask_lab speed NAME`: measures one thing, and prints it. benchmarks/README.md says what each asks."""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from remask_lab.speed.command import ON, run_command, run_measurement

MEASUREMENTS: Mapping[str, tuple[str, str]] = {
    "large": (
        "large",
        "--model llada-8b --quantization int8 --dtype auto --block 32 --prompt 64 --threads 1 --turns 5",
    ),
    "llama_cpp": (
        "llama_cpp",
        "--model llada-100m --kinds f32,q8_0,q4_0 --prompt 512 --response 64 --steps INT --block 32 --threads 1 "
        "--turns 3",
    ),
    "policies": (
        "policies",
        f"--model llada-100m {ON} --batch 4 --prompt 512 --prefix 480 --response 256 --block-length 32 --steps 32",
    ),
    "start": ("start", "--model smollm2 --turns 2"),
    "uniform": (
        "policies",
        f"--model gidd-100m {ON} --canvas 2048 --prompt 128 --block-length 32 --steps 32 --full-steps 4",
    ),
}
"""The module of each measurement, which has a function of its name, and its options with their defaults."""


def measure(name: str, words: Sequence[str]) -> None:
    """Run a measurement. Only its module is imported."""
    module, usage = MEASUREMENTS[name]
    run_measurement(getattr(importlib.import_module(f"remask_lab.speed.{module}"), name), usage, words, name)


def main() -> int:
    """Run the measurement that the first word names. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m remask_lab speed", description=__doc__)
    parser.add_argument("name", choices=MEASUREMENTS)
    name = parser.parse_args(sys.argv[1:2]).name
    return run_command(partial(measure, name, sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())

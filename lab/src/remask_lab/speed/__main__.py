"""`python -m remask_lab speed NAME`: measures one thing, and prints it. benchmarks/README.md says what each asks."""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from remask_lab.speed.command import ON, run_command, run_measurement

MEASUREMENTS: Mapping[str, tuple[str, str]] = {
    "depth_rule": ("accuracy", "--requests 100 --samples 32"),
    "host": (
        "host",
        "--rounds 2 --against STR --overlap --no-lists --policies none block-dual bicache+block-dual "
        "--canvases 1024 4096 --requests 1 8 32 128",
    ),
    "invariance": (
        "engines",
        f"--model llada-100m {ON} --caches none,reuse,block-dual --requests 4 --concurrency 4 --prompt 256 "
        "--response 64 --block-length 16 --steps 16 --rounds 3",
    ),
    "large": (
        "large",
        "--model llada-8b --quantization int8 --dtype auto --block 32 --prompt 64 --threads 1 --turns 5",
    ),
    "llama_cpp": (
        "llama_cpp",
        "--model llada-100m --kinds f32,q8_0,q4_0 --prompt 512 --response 64 --steps INT --block 32 --threads 1 "
        "--turns 3",
    ),
    "parts": (
        "accuracy",
        "--requests 100 --prompts 4 --documents 5 --depths 1 2 3 4 6 8 --intervals 16... --ratios 0.0 0.1 0.2 0.5 1.0",
    ),
    "policies": (
        "policies",
        f"--model llada-100m {ON} --batch 4 --prompt 512 --prefix 480 --response 256 --block-length 32 --steps 32",
    ),
    "quantised": ("engines", f"--model llada-100m {ON} --kinds int8,int4 --rows 1 32 256 --rounds 5 --questions 40"),
    "routing": ("routing", "--fronts client,vllm-router,ray --requests 40 --prefixes 8 --budget 1300"),
    "serving": (
        "serving",
        f"--cache bicache --clients 8 --requests 64 --prefixes 4 --rows 68 --rounds 5 --threads INT {ON}",
    ),
    "sharing": (
        "engines",
        f"--model sdar-100m {ON} --requests 100 --prompt 1000 --own 24 --response 32 --concurrency 8 --rounds 1",
    ),
    "uniform": (
        "policies",
        f"--model gidd-100m {ON} --canvas 2048 --prompt 128 --block-length 32 --steps 32 --full-steps 4",
    ),
    "within_request": ("accuracy", "--requests 40 --seeds 1 2 3"),
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

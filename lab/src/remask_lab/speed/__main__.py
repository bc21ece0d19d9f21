"""`python -m remask_lab speed NAME`: measures one thing, and prints it. benchmarks/README.md says what each asks."""

import sys
from collections.abc import Mapping

from remask_lab.speed.command import ON, run_named

MEASUREMENTS: Mapping[str, tuple[str, str]] = {
    "large": (
        "remask_lab.speed.large",
        "--model llada-8b --quantization int8 --dtype auto --block 32 --prompt 64 --threads 1 --turns 5",
    ),
    "llama_cpp": (
        "remask_lab.speed.llama_cpp",
        "--model llada-100m --kinds f32,q8_0,q4_0 --prompt 512 --response 64 --steps INT --block 32 --threads 1 "
        "--turns 3",
    ),
    "policies": (
        "remask_lab.speed.policies",
        f"--model llada-100m {ON} --batch 4 --prompt 512 --prefix 480 --response 256 --block-length 32 --steps 32",
    ),
    "start": ("remask_lab.speed.start", "--model smollm2 --turns 2"),
    "uniform": (
        "remask_lab.speed.policies",
        f"--model gidd-100m {ON} --canvas 2048 --prompt 128 --block-length 32 --steps 32 --full-steps 4",
    ),
}


def main() -> int:
    """Run the measurement that the first word names. Returns the exit status."""
    return run_named("speed", __doc__, MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m remask_lab audits NAME`: runs one measurement of audits. benchmarks/README.md describes them."""

import sys

from remask_lab.speed.command import run_named

MODEL = "--model smollm2 --task town --task-settings {} --sampling {} --seed 7"
OPTIONS = {
    "learned": f"{MODEL} --learn 24 --questions 400 --pages 200 --depth 6 --at-once 1",
    "changed": "--model smollm2 --before 64 --after 264 --seed 7",
    "ordered": "--model smollm2 --caches block-dual,dllm-cache,dkv-decode --audits 30 --seed 7",
    "moved": f"{MODEL} --questions 96 --pages 48",
    "simulated": "--input STR --depth 8 --draws 2000 --seed 7",
}
MEASUREMENTS = {name: ("remask_lab.audits.measure", usage) for name, usage in OPTIONS.items()}


def main() -> int:
    """Run the measurement that the first word names. Returns the exit status."""
    return run_named("audits", __doc__, MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(main())

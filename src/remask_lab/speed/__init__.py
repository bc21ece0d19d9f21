"""Commands that measure speed, as ratios taken side by side in one run. benchmarks/README.md lists them."""

from remask.machine.cpu import wait_passively

wait_passively()  # as `remask` does; the commands import PyTorch after this

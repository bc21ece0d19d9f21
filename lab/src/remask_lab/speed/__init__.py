"""Commands that measure speed, as ratios taken side by side in one run. benchmarks/README.md lists them."""

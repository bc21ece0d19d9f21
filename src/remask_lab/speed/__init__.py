"""Measurements of speed: ratios taken side by side in one run. Each file is a command; see README.md."""

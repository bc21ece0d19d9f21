"""The `remask` command."""

from remask.cli.main import main

__all__ = ["main"]

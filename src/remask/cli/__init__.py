"""The command line: `remask COMMAND`."""

from remask.cli.main import main

__all__ = ["main"]

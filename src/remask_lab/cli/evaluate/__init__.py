"""`remask eval`: measures how good a model is. Each module is one subject."""

import argparse
import importlib


def run(args: argparse.Namespace) -> int:
    """Measure what the subject says. Each has a module of its name, of which only that one is imported."""
    status: int = importlib.import_module(f"{__name__}.{args.subject.replace('-', '_')}").run(args)
    return status

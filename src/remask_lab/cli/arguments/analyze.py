"""The options of `remask analyze`, those of its subjects among them."""

import argparse
import importlib
import pkgutil

from remask.cli.parser import examples
from remask_lab.arguments import subjects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each subject."""
    found = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name in subject_names():
        subject = importlib.import_module(f"{subjects.__name__}.{name}")
        own = found.add_parser(name.replace("_", "-"), help=subject.SUMMARY, epilog=examples(*subject.EXAMPLES))
        subject.add_arguments(own)


def subject_names() -> list[str]:
    """Modules of `remask_lab.arguments.subjects`, in alphabetical order."""
    return [module.name for module in pkgutil.iter_modules(subjects.__path__)]

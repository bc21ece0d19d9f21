"""`remask analyze SUBJECT`: runs a subject, prints its outcome, and keeps it.

A subject is one module of `remask_lab.subjects`. It has

- `SUMMARY`, a line of `remask analyze --help`,
- `EXAMPLES`, two commands with which its own help ends,
- `add_arguments(parser)`, which adds its options, those of `remask_lab.arguments.results` among them,
- `measure(args) -> Outcome`.

Its name is that of the module, with hyphens. Nothing else has to know of it.
"""

import argparse
import importlib
import pkgutil

from remask.cli.parser import examples
from remask_lab import subjects
from remask_lab.arguments.results import check_result_options, keep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each subject."""
    found = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name in subject_names():
        subject = importlib.import_module(f"{subjects.__name__}.{name}")
        own = found.add_parser(name.replace("_", "-"), help=subject.SUMMARY, epilog=examples(*subject.EXAMPLES))
        subject.add_arguments(own)
        own.set_defaults(measure=subject.measure)


def subject_names() -> list[str]:
    """Modules of `remask_lab.subjects`, in alphabetical order."""
    return [module.name for module in pkgutil.iter_modules(subjects.__path__)]


def run(args: argparse.Namespace) -> int:
    """Measure, print, and keep what was asked for."""
    check_result_options(args)
    keep(args, args.measure(args))
    return 0

"""`remask analyze SUBJECT`: runs a subject, prints its outcome, and keeps it.

A subject is two modules of one name, which is that of the command with underscores for hyphens. Nothing else has to
know of it. The one in `remask_lab.arguments.subjects` imports no PyTorch and has

- `SUMMARY`, a line of `remask analyze --help`,
- `EXAMPLES`, two commands with which its own help ends,
- `add_arguments(parser)`, which adds its options, those of `remask_lab.arguments.results` among them.

The one in `remask_lab.subjects` has `measure(args) -> Outcome`.
"""

import argparse
import importlib

from remask_lab import subjects
from remask_lab.asked.results import check_result_options, keep


def run(args: argparse.Namespace) -> int:
    """Measure, print, and keep what was asked for."""
    check_result_options(args)
    subject = importlib.import_module(f"{subjects.__name__}.{args.subject.replace('-', '_')}")
    keep(args, subject.measure(args))
    return 0

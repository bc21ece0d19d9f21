"""The options of `remask eval`: one file a subject."""

import argparse

from remask_lab.cli.arguments.evaluate import gen_ppl, likelihood, questions, tasks

SUBJECTS = (tasks, questions, likelihood, gen_ppl)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's subjects."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for subject in SUBJECTS:
        subject.add_parser(subjects)

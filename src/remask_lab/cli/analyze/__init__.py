"""`remask analyze`: one module a subject."""

import argparse

from remask_lab.cli.analyze import (
    compare,
    decoding,
    depth,
    drift,
    features,
    grid,
    leakage,
    memory,
    precision,
    prefix_similarity,
    reuse,
    steps,
    sweep,
)

SUBJECTS = (
    drift,
    decoding,
    features,
    steps,
    grid,
    compare,
    precision,
    memory,
    prefix_similarity,
    depth,
    reuse,
    sweep,
    leakage,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's subjects."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for subject in SUBJECTS:
        subject.add_parser(subjects)

"""`remask analyze`: one module a subject."""

from typing import Any

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


def add_parser(commands: Any) -> None:
    """Register the command and its subjects."""
    parser = commands.add_parser("analyze", help="look into a model while it denoises")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for subject in SUBJECTS:
        subject.add_parser(subjects)

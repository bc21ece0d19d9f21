"""Where a result goes: options for a file and for pictures, and the writing of both."""

import argparse
from dataclasses import replace
from typing import Any

from remask.cli.options import check_folder
from remask_lab.drawing import check_drawing
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import as_json, write_record


def add_result_options(parser: Any) -> None:
    """Add the options that say where the result goes."""
    parser.add_argument("--output", metavar="FILE", help="where the numbers go, as JSON")
    parser.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")


def check_result_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where the result could not be kept: a long measurement must not end in that."""
    check_folder("--output", args.output)
    check_folder("--plots", args.plots)
    if args.plots is not None:
        check_drawing()


def keep(args: argparse.Namespace, outcome: Outcome) -> None:
    """Print an outcome, and write its record and its pictures as far as they are asked for."""
    print(outcome.text)
    record = outcome.record
    if outcome.reading:
        print(f"\n{outcome.reading}")
        record = replace(record, data={**as_json(record.data), "reading": outcome.reading})
    if args.output is not None:
        write_record(args.output, record)
        print(f"\nSaved as {args.output}")
    if args.plots is not None:
        for path in outcome.draw(args.plots):
            print(f"Picture: {path}")

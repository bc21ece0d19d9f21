"""What subjects do with a result: print its reading, keep its record, draw its pictures."""

import argparse
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from remask.cli.options import check_folder
from remask_lab.records.record import Record, as_json, write_record

WIDTH = 100


def add_result_options(parser: Any) -> None:
    """Where the result goes."""
    parser.add_argument("--output", metavar="FILE", help="where the numbers go, as JSON")
    parser.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")


def check_result_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where they name no place: a long measurement must not end in one."""
    check_folder("--output", args.output)
    check_folder("--plots", args.plots)


def tell(args: argparse.Namespace, record: Record, reading: str, plot: Callable[[str], list[Path]]) -> None:
    """Print `reading`, and keep `record` with it and the pictures that `plot` draws into a folder."""
    print(f"\n{textwrap.fill(reading, WIDTH)}")
    keep(args, replace(record, data={**as_json(record.data), "reading": reading}), lambda: plot(args.plots))


def keep(args: argparse.Namespace, record: Record, draw: Callable[[], list[Path]]) -> None:
    """Write `record` to `--output` and `draw` its pictures, as far as they are asked for, and say where they are."""
    if args.output is not None:
        write_record(args.output, record)
        print(f"\nSaved as {args.output}")
    if args.plots is not None:
        for path in draw():
            print(f"Picture: {path}")

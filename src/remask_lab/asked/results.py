"""A result put where its options say: the numbers, pictures and a page."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from remask.cli.options import check_folder
from remask.machine.disk import write_whole
from remask_lab.drawing import check_drawing
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import as_json, write_record


def check_result_options(args: argparse.Namespace) -> None:
    """Raise `ConfigError` where the result could not be kept: a long measurement must not end in that."""
    for name in ("output", "csv", "plots", "page"):
        check_folder(f"--{name}", _asked(args, name))
    if _asked(args, "plots") is not None:
        check_drawing()


def keep(args: argparse.Namespace, outcome: Outcome) -> None:
    """Print an outcome, and write its record, its pictures and its page as far as they are asked for."""
    print(outcome.text)
    record = outcome.record
    if outcome.reading:
        print(f"\n{outcome.reading}")
        record = replace(record, data={**as_json(record.data), "reading": outcome.reading})
    output, plots, page = (_asked(args, name) for name in ("output", "plots", "page"))
    if output is not None:
        write_record(output, record)
        print(f"\nSaved as {output}")
    if plots is not None and outcome.draw is not None:
        keep_pictures(outcome.draw, plots)
    if page is not None and outcome.page is not None:
        write_whole("--page:", page, outcome.page())
        print(f"Page: {page}")


def keep_pictures(draw: Callable[[str], list[Path]], folder: str) -> None:
    """Let `draw` write its pictures into the folder, and name them."""
    for path in draw(folder):
        print(f"Picture: {path}")


def _asked(args: argparse.Namespace, name: str) -> str | None:
    """The place given to an option; None without one, and of subjects that do not have the option."""
    place: str | None = vars(args).get(name)
    return place

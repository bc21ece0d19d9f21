"""Options that give values to what a line of requests leaves out."""

import argparse
from typing import Any


class FieldsAction(argparse.Action):
    """Prints the fields of a request, then ends the process as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print the list and exit with status 0."""
        # Imported here, as the fields' values need NumPy, and the option is seldom given.
        from remask.cli.fields_help import listing

        print(listing())
        parser.exit()


def add_default_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that give values to what a line leaves out."""
    parser.add_argument(
        "--cache",
        default="none",
        metavar="SPEC",
        help="policy, composition, or FILE.py:CLASS",
    )
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    parser.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters, on top of the model's own; a line's come on top of these",
    )
    parser.add_argument("--help-fields", action=FieldsAction, nargs=0, help="list the fields of a request and exit")

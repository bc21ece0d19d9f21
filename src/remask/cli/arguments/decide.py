"""The options of `remask decide`."""

import argparse

from remask.cli.arguments.options import add_engine_options, add_model_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="JSON object with state and questions ('-': standard input)"
    )
    parser.add_argument(
        "--cache",
        default="none",
        metavar="SPEC",
        help="policy, composition, or FILE.py:CLASS",
    )
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    add_model_options(parser)
    add_engine_options(parser)

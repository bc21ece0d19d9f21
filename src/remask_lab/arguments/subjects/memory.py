"""The options of `remask analyze memory`."""

import argparse

from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.shape import add_shape_options

SUMMARY = "bytes that cache policies keep between passes, and their formulas"
EXAMPLES = (
    "remask analyze memory --model bundled --caches none,reuse,bicache",
    "remask analyze memory --model bundled --requests 8 --prefix-tokens 256 --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--caches", help="policies, separated by commas (default: every one that the model can have)")
    parser.add_argument("--cache-config", metavar="JSON", help='settings, as one object per policy: {"bicache": {}}')
    add_result_options(parser)
    add_shape_options(parser)

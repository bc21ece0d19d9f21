"""The options of `remask generate`."""

import argparse

from remask.cli.arguments.lines import add_default_options
from remask.cli.arguments.options import add_engine_options, add_model_options, add_tensor_parallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its answer is printed as text")
    source.add_argument("--input", metavar="FILE", help="JSONL, one request a line ('-': standard input)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of --prompt")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--canvas", metavar="JSON", help="parts of --prompt's answer: fixed text, and holes to fill")
    shape.add_argument("--suffix", metavar="TEXT", help="text that follows --prompt's answer, which fills the gap")
    parser.add_argument("--output", metavar="FILE", help="JSONL answers (default: standard output)")
    add_default_options(parser)
    parser.add_argument("--trace", action="store_true", help="write which positions became final in which step")
    add_model_options(parser)
    add_tensor_parallel(parser)
    add_engine_options(parser)

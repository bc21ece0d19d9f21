"""Options that say which requests a subject watches."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options


def add_request_options(parser: argparse.ArgumentParser, *, depths: bool = False) -> None:
    """Add the options for requests, sampling, the result and the model; `depths` is that of `add_model_options`."""
    add_source_options(parser)
    add_result_options(parser)
    add_model_options(parser, depths=depths)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for requests and how they are sampled."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    source.add_argument("--input", metavar="FILE", help="JSONL of requests, as 'generate' takes it, without a cache")
    parser.add_argument(
        "--sampling",
        metavar="JSON",
        help="sampling parameters, on top of the model's own; a line's come on top of these",
    )
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")

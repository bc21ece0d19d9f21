"""Options of requests of random tokens and of one shape, for commands that measure a machine and not answers."""

import argparse

from remask.cli.arguments.options import add_model_options


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """How many requests run together, how long they are, and on which model."""
    group = parser.add_argument_group("requests, of random tokens")
    group.add_argument("--requests", type=int, default=4, metavar="N", help="run at a time (default 4)")
    group.add_argument("--prefix-tokens", type=int, default=192, metavar="P", help="that they share (default 192)")
    group.add_argument("--prompt-tokens", type=int, default=64, metavar="Q", help="after these (default 64)")
    group.add_argument("--max-tokens", type=int, default=128, metavar="G", help="response length (default 128)")
    group.add_argument("--sampling", metavar="JSON", help="further sampling parameters")
    group.add_argument("--seed", type=int, default=2024, help="of the tokens")
    add_model_options(parser)

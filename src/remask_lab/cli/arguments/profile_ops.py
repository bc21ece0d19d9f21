"""The options of `remask profile-ops`."""

import argparse

from remask_lab.arguments.shape import add_shape_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Run requests of random tokens together under a cache policy, and report the time of each operation: "
        "attention, MLP, projections, head, norms, sampling, packing and the rest."
    )
    parser.add_argument("--cache", default="none", help="cache policy or composition (default none)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="profile the first N steps (default 32)")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="K", help="turns with and without instruments (default 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the full result to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline into this PNG file")
    add_shape_options(parser)

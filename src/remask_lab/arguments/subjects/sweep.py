"""The options of `remask analyze sweep`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options

SUMMARY = "throughput and accuracy over the threshold tau and the refresh interval R"
EXAMPLES = (
    "remask analyze sweep --model bundled --taus 0.9 0.97 --requests 16",
    "remask analyze sweep --model bundled --refresh-intervals 1 4 8 --output sweep.json --plots pictures",
)

CACHES = ("bicache", "bicache+block-dual")
REFRESH_INTERVAL = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.description = (
        "Each value of tau at one R, and each value of R at one tau. With --output, what an interrupted sweep has "
        "measured is kept, and the same command goes on from there."
    )
    parser.add_argument("--taus", type=float, nargs="*", metavar="TAU", help="values of tau; none leaves them out")
    parser.add_argument("--refresh-intervals", type=int, nargs="*", metavar="R", help="values of R, in the same way")
    tau_option(parser)
    parser.add_argument(
        "--refresh-interval",
        type=int,
        default=REFRESH_INTERVAL,
        help=f"R while tau changes (default {REFRESH_INTERVAL})",
    )
    parser.add_argument(
        "--caches", default=",".join(CACHES), help=f"policies, separated by commas (default {','.join(CACHES)})"
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    add_workload_options(parser, requests=48)
    add_result_options(parser)
    add_model_options(parser)

"""The options of `remask analyze reuse`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options

SUMMARY = "K/V reuse in deep layers in three settings; throughput and collapse of plain reuse"
EXAMPLES = (
    "remask analyze reuse --model bundled --requests 16 --plots pictures",
    "remask analyze reuse --model bundled --depth 4 --refresh-interval 4 --output reuse.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--depth", type=int, metavar="B", help="shallow layers (default: the depth table's)")
    parser.add_argument("--refresh-interval", type=int, default=8, metavar="R", help="default 8")
    parser.add_argument("--traced", type=int, default=8, metavar="N", help="requests compared by step (default 8)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    add_workload_options(parser, requests=48)
    add_result_options(parser)
    add_model_options(parser)

"""The options of `remask analyze curves`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options

SUMMARY = "accuracy against work, with every knob of every policy swept"
EXAMPLES = (
    "remask analyze curves --model bundled --dtype float32 --output curves.json --plots pictures",
    "remask analyze curves --model bundled --knobs '{\"bicache\": {\"depth\": [2, 4]}}' --sampling-knobs '{}'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.description = (
        "Every policy that can run the requests, at its defaults and with one knob moved at a time, in one run."
    )
    parser.add_argument(
        "--knobs", metavar="JSON", help='values of knobs, instead of the usual ones: {"bicache": {"depth": [0, 2]}}'
    )
    parser.add_argument(
        "--sampling-knobs", metavar="JSON", help='the same for the sampler: {"none": {"steps": [2, 4]}}'
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=1, metavar="K", help="turns of each point (default 1)")
    add_workload_options(parser, requests=200)
    add_result_options(parser)
    add_model_options(parser)

"""The options of `remask analyze prefix-similarity`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options

SUMMARY = "K/V of a shared prefix in its canvas against the prefix alone, by layer and step"
EXAMPLES = (
    "remask analyze prefix-similarity --model bundled --requests 8 --plots pictures",
    "remask analyze prefix-similarity --model bundled --tau 0.95 --official",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    add_workload_options(parser, requests=16)
    parser.add_argument("--official", action="store_true", help="the authors' profiler: one cosine per token")
    tau_option(parser)
    add_result_options(parser)
    add_model_options(parser, depths=False)

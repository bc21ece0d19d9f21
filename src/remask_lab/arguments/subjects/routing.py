"""The options of `remask analyze routing`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options

SUMMARY = "expert choices: how they change between steps, and how far caches move them, by layer"
EXAMPLES = (
    "remask analyze routing --model MODEL --task tariff --requests 40 --caches reuse,bicache,dllm-cache",
    "remask analyze routing --model llada-moe-tiny --load-format dummy --requests 2 --max-tokens 8 --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--caches", metavar="SPEC,...", help="policies beside none (default: what suits the model)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    add_workload_options(parser, requests=16)
    add_result_options(parser)
    add_model_options(parser)

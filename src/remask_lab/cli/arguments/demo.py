"""The options of `remask demo`."""

import argparse

from remask.cli.arguments.options import add_threads_option
from remask_lab.arguments.workload import add_task_options

PICTURE = "out/demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "No caching, all-layer reuse and BiCache on requests that share a system prompt; with --uniform no "
        "caching, block-prefix and uniform-cache on a model of uniform diffusion."
    )
    parser.add_argument("--uniform", action="store_true", help="run the bundled uniform model and its caches")
    add_task_options(parser)
    parser.add_argument("--requests", type=int, default=40, metavar="N", help="questions (default 40)")
    parser.add_argument("--picture", metavar="FILE", help=f"PNG or SVG file of the picture (default {PICTURE})")
    parser.add_argument("--seed", type=int, default=7, help="seed of the questions")
    add_threads_option(parser)
    parser.set_defaults(dtype="float32", device="auto", load_format="auto", depth_table=None, skip_weight_check=False)

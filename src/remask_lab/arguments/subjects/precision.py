"""The options of `remask analyze precision`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options

SUMMARY = "tokens that change where only rounding does: dtype, batch, kernel"
EXAMPLES = (
    "remask analyze precision --model bundled --requests 8",
    "remask analyze precision --model bundled --dtypes float32,bfloat16 --batch 4 --output precision.json",
)

DTYPES = "float32,bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--dtypes", default=DTYPES, metavar="D,...", help=f"the first is compared with ({DTYPES})")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="requests at a time, against one (default 8)")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="of the model's usual workload")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="random prompts of this length, on any model")
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload and of its requests")
    add_result_options(parser)
    add_model_options(parser, depths=False)

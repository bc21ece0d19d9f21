"""The options of `remask analyze depth`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask.cli.arguments.profile import add_rule_options, add_similarity_options, add_system_prompt_option
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options

SUMMARY = "depth of reuse by task and ratio, its convergence, and its stability under other system prompts"
EXAMPLES = (
    "remask analyze depth --model bundled --samples 8 --plots pictures",
    "remask analyze depth --model bundled --tau 0.95 --ratios 50 75 90 --output depth.json",
)

SAMPLES = 16  # requests per ratio and task, where no number is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a kind of task and its prompts, as 'profile --prompts' takes them; may be given again (default: those "
        "that the model's tokenizer reads)",
    )
    add_system_prompt_option(parser)
    tau_option(parser)
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", help="prefix ratios in percent")
    parser.add_argument("--samples", type=int, metavar="N", help=f"requests per ratio and task (default {SAMPLES})")
    parser.add_argument("--system-prompts", type=int, default=8, metavar="N", help="default 8")
    add_similarity_options(parser)
    parser.add_argument(
        "--behind-masks",
        action="store_true",
        help="what requests share stands behind the masks, as a suffix (default: in front, as a prefix)",
    )
    parser.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    parser.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default 0)")
    add_rule_options(parser)
    add_result_options(parser)
    add_model_options(parser, depths=False)

"""The options of `remask analyze leakage`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options

SUMMARY = "attention from a shared prefix to the rest over the ratio, and the depth that it guarantees"
EXAMPLES = (
    "remask analyze leakage --model bundled --samples 4 --plots pictures",
    "remask analyze leakage --model bundled --ratios 50 90 --output leakage.json",
)

RATIOS = (10, 30, 50, 70, 80, 90, 95)
SAMPLES = 4  # requests per ratio, where no number is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of messages, prompt or prompt_token_ids a line")
    tau_option(parser)
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", default=RATIOS, help="prefix ratios in percent")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"requests per ratio ({SAMPLES})")
    parser.add_argument("--steps", type=int, default=4, metavar="S", help="denoising steps of a request (default 4)")
    parser.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    parser.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default 0)")
    add_result_options(parser)
    add_model_options(parser, depths=False)

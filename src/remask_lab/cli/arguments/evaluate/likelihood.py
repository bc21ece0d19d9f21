"""The options of `remask eval likelihood`, and those of how noise is drawn."""

import argparse
from typing import Any

from remask.cli.arguments.options import add_model_options
from remask.cli.parser import examples
from remask.request.uniform_presets import ANCESTRAL
from remask_lab.likelihood.names import MAX_ROWS, SCHEDULES

FIELDS = ("prompt", "response", "choices", "answer")


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    parser = subjects.add_parser(
        "likelihood",
        help="log-likelihoods of responses, and multiple choice by them",
        epilog=examples(
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Base --prompts pairs.jsonl --output likelihood.json",
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Instruct --prompts questions.jsonl --chat --mc-samples 32",
        ),
    )
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSONL of prompt and response, or of prompt, choices and answer for multiple choice",
    )
    parser.add_argument("--fields", metavar="FIELD=NAME,...", help=f"names in FILE of {', '.join(FIELDS)}")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N lines only")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, the response its answer")
    add_draw_options(parser)
    parser.add_argument(
        "--max-rows", type=int, default=MAX_ROWS, metavar="N", help="most rows of a pass (default 4096)"
    )
    parser.add_argument("--output", metavar="FILE", help="write every response and its likelihood to FILE, as JSON")
    add_model_options(parser, depths=False)


def add_draw_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how noise is drawn."""
    parser.add_argument(
        "--mc-samples",
        type=int,
        default=128,
        metavar="N",
        help="draws for each response: sets of masks, or noise of a uniform model (default 128)",
    )
    parser.add_argument(
        "--mc-strata",
        type=int,
        default=8,
        metavar="N",
        help="spread the levels of noise of N draws evenly (default 8); 1: independent draws",
    )
    parser.add_argument(
        "--mc-no-exact",
        action="store_true",
        help="masked models: draw sets of masks even where all of them could be computed",
    )
    parser.add_argument(
        "--mc-levels", type=int, metavar="N", help="uniform models: steps of the chain of noise (default 1000)"
    )
    parser.add_argument(
        "--mc-schedule", choices=SCHEDULES, help="uniform models: how noise falls along the chain (default cosine)"
    )
    parser.add_argument(
        "--mc-sampler",
        choices=ANCESTRAL,
        help="uniform models: the sampler whose reverse step the bound is of (default ancestral)",
    )
    parser.add_argument(
        "--canvas-length",
        type=int,
        metavar="N",
        help="uniform models: positions of the canvas, noise behind the response (default: none behind it)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")

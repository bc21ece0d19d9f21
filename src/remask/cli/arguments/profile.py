"""The options of `remask profile`, and those that other measurements of depth share."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask.depth.rule import AT_BOUNDARY, OVER_LAYERS, OVER_REQUESTS, DepthRule
from remask.depth.settings import ProfileSettings

_DEFAULTS = ProfileSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of messages, prompt or prompt_token_ids a line")
    add_system_prompt_option(parser)
    parser.add_argument("--output", metavar="FILE", help="write the table to this file, as JSON")
    parser.add_argument("--plot", metavar="FILE", help="picture of the table, PNG or SVG")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--tau", type=float, default=_DEFAULTS.tau, help=f"similarity to exceed (default {_DEFAULTS.tau})"
    )
    group.add_argument("--ratios", type=int, nargs="+", metavar="R", help="prefix ratios in percent")
    group.add_argument(
        "--samples", type=int, metavar="N", help="requests per ratio (default: until the table is stable)"
    )
    group.add_argument(
        "--max-samples",
        type=int,
        default=_DEFAULTS.max_samples,
        metavar="N",
        help=f"most requests per ratio (default {_DEFAULTS.max_samples})",
    )
    add_similarity_options(group)
    group.add_argument(
        "--needed-layers",
        action="store_true",
        help="compute no layer that cannot change the depths at this tau: the same depths sooner, none at a lower tau",
    )
    group.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    group.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    group.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="seed of the choice of prompts (default 0)")
    add_rule_options(parser)
    add_model_options(parser, depths=False)


def add_system_prompt_option(parser: argparse.ArgumentParser) -> None:
    """Add `--system-prompt`."""
    parser.add_argument(
        "--system-prompt",
        metavar="FILE",
        help="text that begins every request, followed by diverse prompts, as in the paper (default: each "
        "conversation's own head)",
    )


def add_similarity_options(group: argparse._ActionsContainer) -> None:
    """Add the definitions of similarity."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("--official", action="store_true", help="the authors' profiler: no masks, cosine per token")
    either.add_argument(
        "--joint",
        action="store_true",
        help="one cosine over K and V as one vector, as the paper's equation 3 reads (default: the mean of two)",
    )


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Add the three parts of a depth table's rule."""
    rule = DepthRule()
    group = parser.add_argument_group("how depths follow from similarities")
    group.add_argument(
        "--over-layers",
        choices=OVER_LAYERS,
        default=rule.layers,
        help=f"layers that must exceed tau: all up to the depth, or the last alone (default {rule.layers})",
    )
    group.add_argument(
        "--over-requests",
        choices=OVER_REQUESTS,
        default=rule.requests,
        help=f"the least depth of the requests, the mean of their depths, or that of their mean similarities (default "
        f"{rule.requests})",
    )
    group.add_argument(
        "--at-boundary",
        choices=AT_BOUNDARY,
        default=rule.boundary,
        help=f"safe: the layer above the depth must exceed tau too (default {rule.boundary})",
    )


def rule_of(args: argparse.Namespace) -> DepthRule:
    """The rule that these options name."""
    return DepthRule(args.over_layers, args.over_requests, args.at_boundary)

"""Options of what measures similarities. Nothing here imports PyTorch or NumPy."""

import argparse

from remask_lab.similarity.rule import AT_BOUNDARY, OVER_LAYERS, OVER_REQUESTS, DepthRule


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
    """Add the three parts of the rule."""
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

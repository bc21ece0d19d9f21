"""Options of commands that measure similarities. Nothing here imports PyTorch or NumPy."""

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
    """Add `--official` and `--joint`, the definitions of similarity besides the default."""
    definitions = group.add_mutually_exclusive_group()
    definitions.add_argument(
        "--official", action="store_true", help="the authors' profiler: no masks, cosine per token"
    )
    definitions.add_argument(
        "--joint",
        action="store_true",
        help="one cosine over K and V as one vector, as the paper's equation 3 reads (default: the mean of two)",
    )


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Add `--over-layers`, `--over-requests` and `--at-boundary`, the three choices of a `DepthRule`."""
    default_rule = DepthRule()
    group = parser.add_argument_group("how depths follow from similarities")
    parts = {
        "layers": (OVER_LAYERS, "layers that must exceed tau: all up to the depth, or the last alone"),
        "requests": (
            OVER_REQUESTS,
            "the least depth of the requests, the mean of their depths, or that of their mean similarities",
        ),
        "boundary": (AT_BOUNDARY, "safe: the layer above the depth must exceed tau too"),
    }
    for name, (values, text) in parts.items():
        flag, default = f"--{'at' if name == 'boundary' else 'over'}-{name}", getattr(default_rule, name)
        group.add_argument(flag, choices=values, default=default, help=f"{text} (default {default})")


def rule_of(args: argparse.Namespace) -> DepthRule:
    """The rule that the options of `add_rule_options` name."""
    return DepthRule(args.over_layers, args.over_requests, args.at_boundary)

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
    usual = DepthRule()
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
        flag, default = f"--{'at' if name == 'boundary' else 'over'}-{name}", getattr(usual, name)
        group.add_argument(flag, choices=values, default=default, help=f"{text} (default {default})")


def rule_of(args: argparse.Namespace) -> DepthRule:
    """The rule that these options name."""
    return DepthRule(args.over_layers, args.over_requests, args.at_boundary)

"""Options that several of the laboratory's commands share, and checks of such options."""

import argparse

from remask.checks.values import whole
from remask.depth.settings import ProfileSettings


def tau_option(parser: argparse.ArgumentParser) -> None:
    """`--tau`, a share between 0 and 1."""
    default = ProfileSettings().tau
    parser.add_argument(
        "--tau", type=float, default=default, help=f"similarity that a layer must exceed (default {default})"
    )


def separated(text: str) -> list[str]:
    """Names between commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raise `ConfigError` where an option is smaller than `least` of its name. An option that is not given passes."""
    for name, low in least.items():
        whole(f"--{name.replace('_', '-')}", getattr(args, name), low=low, optional=True)

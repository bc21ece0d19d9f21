"""The options of `remask analyze features`."""

import argparse

from remask_lab.arguments.requests import add_request_options

SUMMARY = "similarity of K, V, attention and FFN outputs between passes, and how V foretells the others"
EXAMPLES = (
    "remask analyze features --model bundled-transit --prompt 'from abbey go 2 , where am i ?'",
    "remask analyze features --model bundled --input requests.jsonl --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument(
        "--ratio", type=float, default=0.25, metavar="RHO", help="share of the response that is picked (default 0.25)"
    )
    add_request_options(parser)

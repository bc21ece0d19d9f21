"""The options of `remask analyze steps`."""

import argparse

from remask_lab.arguments.requests import add_request_options

SUMMARY = "entropy, largest probability, token changes, drift, row-layers and milliseconds by pass"
EXAMPLES = (
    "remask analyze steps --model bundled-transit --prompt 'from abbey go 2 , where am i ?' --caches bicache",
    "remask analyze steps --model bundled --input requests.jsonl --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument("--caches", metavar="SPEC,...", help="policies beside none (default: what suits the model)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="timed turns of each policy (default 3)")
    add_request_options(parser, depths=True)

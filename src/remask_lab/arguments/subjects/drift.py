"""The options of `remask analyze drift`."""

import argparse

from remask_lab.arguments.requests import add_request_options

SUMMARY = "K/V drift, attention mass, entropy and token changes by region and pass"
EXAMPLES = (
    "remask analyze drift --model bundled-transit --prompt 'from abbey go 2 , where am i ?'",
    "remask analyze drift --model bundled --input requests.jsonl --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    add_request_options(parser)

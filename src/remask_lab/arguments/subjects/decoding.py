"""The options of `remask analyze decoding`."""

import argparse

from remask_lab.arguments.requests import add_request_options

SUMMARY = "how K and V move around the step that decodes a token, by layer"
EXAMPLES = (
    "remask analyze decoding --model bundled-transit --prompt 'from abbey go 2 , where am i ?'",
    "remask analyze decoding --model bundled --input requests.jsonl --plots pictures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument(
        "--window", type=int, default=8, metavar="N", help="passes before and after it that are reported (default 8)"
    )
    add_request_options(parser)

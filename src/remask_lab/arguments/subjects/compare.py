"""The options of `remask analyze compare`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.requests import add_source_options
from remask_lab.arguments.results import add_output_option, add_page_option

SUMMARY = "responses to the same prompts side by side, differences marked"
EXAMPLES = (
    """remask analyze compare --model bundled-transit --prompt 'from abbey go 2' --variants '["none", "reuse"]'""",
    """remask analyze compare --model bundled --input requests.jsonl --variants '["none", "bicache"]' --page x.html""",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.add_argument(
        "--variants",
        required=True,
        metavar="JSON",
        help='what to compare, the first one with all others: ["none", {"cache": "dkv-decode", '
        '"cache_config": {"refresh_interval": 4}, "sampling": {}}]',
    )
    add_page_option(parser)
    add_source_options(parser)
    add_output_option(parser)
    add_model_options(parser)

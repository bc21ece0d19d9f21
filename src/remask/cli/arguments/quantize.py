"""The options of `remask quantize`."""

import argparse

from remask.model.quantization_names import QUANTIZATIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--model", required=True, help="folder or hub id of a checkpoint, or a bundled model")
    parser.add_argument(
        "--quantization", required=True, metavar="|".join(QUANTIZATIONS), help="what the matrices are quantized to"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="new folder for the quantised checkpoint")

"""The options of `remask inspect`."""

import argparse

from remask.cli.arguments.lines import add_default_options
from remask.cli.arguments.options import add_engine_options, add_model_options, add_tensor_parallel
from remask.cli.commands import MODEL_EXAMPLES, STORE_EXAMPLES
from remask.cli.parser import examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    model = subjects.add_parser("model", help="family, shape, parameters, memory and policies, without loading weights")
    model.add_argument(
        "path", metavar="PATH", help="folder, GGUF file or hub id of a checkpoint, or the name of a preset"
    )
    model.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="say what fits into a device of this memory (default: this machine's)",
    )
    add_tensor_parallel(model)
    model.add_argument("--json", action="store_true", help="print JSON")
    model.epilog = examples(*MODEL_EXAMPLES)
    store = subjects.add_parser(
        "store", help="pages, which requests use them, and what was shared, for a file of requests"
    )
    store.epilog = examples(*STORE_EXAMPLES)
    store.add_argument("--input", required=True, metavar="FILE", help="JSONL of requests, as 'generate' takes it")
    add_default_options(store)
    store.add_argument("--json", action="store_true", help="print JSON")
    add_model_options(store)
    add_engine_options(store)

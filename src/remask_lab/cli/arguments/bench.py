"""The options of `remask bench`."""

import argparse

from remask.cli.arguments.options import add_batch_invariant, add_model_options, add_tensor_parallel
from remask.store.prefix_names import PREFIX_MATCHES
from remask_lab.arguments.results import add_plots_option
from remask_lab.arguments.workload import add_workload_options

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Compare cache policies side by side: on their own tasks for the bundled models, on GSM8K "
        "questions for a model with a chat template, and on random tokens for all others or where lengths are given. "
        "'remask bench serve' puts load on a running server."
    )
    parser.add_argument(
        "--caches",
        help="policies, separated by commas (default: what suits the model's kind, as none,reuse,bicache or "
        "none,block-prefix,uniform-cache); 'all' for every one and their usual compositions, in detail",
    )
    parser.add_argument("--cache-config", metavar="JSON", help='settings, as one object per policy: {"bicache": {}}')
    parser.add_argument("--depths", metavar="B,B,...", help="also bicache at these depths; 'all' for every one")
    parser.add_argument(
        "--baseline-steps",
        metavar="N,...",
        help="also 'none' in fewer steps: a number, 'half' of them, or as 'few' as compute the work of each cache; "
        "'off' for none of them (default: 1,half on a bundled model's questions)",
    )
    parser.add_argument(
        "--detail",
        action="store_true",
        help="also one request at a time, forwards, row-layers, cache ratio, staleness and extra memory",
    )
    parser.add_argument("--without-prefix", action="store_true", help="also 'none' without the shared prefix")
    parser.add_argument(
        "--prefix-match",
        default="exact",
        choices=PREFIX_MATCHES,
        help="longest: run turns of conversations, and compare reading the longest stored prefix with exact matches",
    )
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="C", help="requests that run at a time (default 8)"
    )
    add_batch_invariant(parser)
    add_workload_options(parser, requests=200)
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the full result to FILE")
    parser.add_argument("--csv", metavar="FILE", help="write the table's rows to FILE, with all that they measure")
    add_plots_option(parser)
    add_model_options(parser)
    add_tensor_parallel(parser)

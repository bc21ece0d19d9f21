"""The options of `remask analyze grid`."""

import argparse

from remask.cli.arguments.options import add_model_options
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_task_options

SUMMARY = "accuracy, speed, work and memory of policies over grids of their settings"
EXAMPLES = (
    """remask analyze grid --model bundled --cache bicache --grid '{"depth": [0, 4, 8]}' --requests 16""",
    """remask analyze grid --model bundled --cache reuse --sampling-grid '{"steps": [8, 16]}' --output grid.json""",
)

MEASURED = "cache_ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.description = (
        "Each policy at every combination of the values that vary. With --output, rows are written as they are "
        "measured, and rows that the file holds are not measured again."
    )
    parser.add_argument("--cache", required=True, metavar="SPEC,...", help="policies or compositions")
    parser.add_argument("--cache-config", metavar="JSON", help="settings that stay, as one object per policy")
    parser.add_argument(
        "--grid", metavar="JSON", help='settings that vary: {"prompt_interval": [1, 100], "ratio": [0]}'
    )
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters that stay")
    parser.add_argument("--sampling-grid", metavar="JSON", help='sampling parameters that vary: {"steps": [8, 16]}')
    parser.add_argument("--prompt-tokens", metavar="N,...", help="random prompts of these lengths, on any model")
    parser.add_argument("--concurrency", default="8", metavar="C,...", help="requests run at a time (default 8)")
    parser.add_argument("--without-delay", action="store_true", help="also dkv-decode without its one-step delay")
    add_task_options(parser)
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="of each point (default 32)")
    parser.add_argument("--rounds", type=int, default=1, metavar="K", help="turns of each policy (default 1)")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload and of its requests")
    parser.add_argument(
        "--beside", metavar="FILE,...", help="results of other models that pictures and reading show too"
    )
    parser.add_argument("--x", metavar="AXIS", help=f"what the pictures' lines run over: an axis, or {MEASURED}")
    add_result_options(parser)
    add_model_options(parser)

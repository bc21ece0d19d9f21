"""The options of `remask eval questions`."""

from typing import Any

from remask.cli.arguments.options import add_engine_options, add_model_options
from remask.cli.parser import examples
from remask_lab.arguments.workload import add_workload_options


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    parser = subjects.add_parser(
        "questions",
        help="questions of a bundled model's task, or GSM8K, under several cache policies",
        description="Held-out questions of the task that a model is made for, or of --task, drawn by a program: no "
        "data set is read. Every policy answers the same questions.",
        epilog=examples(
            "remask eval questions --model bundled --caches none,reuse,bicache",
            'remask eval questions --model bundled-tariff --task tariff --task-settings \'{"kinds": ["plan"]}\'',
        ),
    )
    parser.add_argument("--caches", default="none", help="policies, separated by commas (default none)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    parser.add_argument(
        "--output", metavar="FILE", help="write every row to FILE, as JSON; the same command resumes from it"
    )
    add_workload_options(parser, requests=200)
    add_model_options(parser)
    add_engine_options(parser)

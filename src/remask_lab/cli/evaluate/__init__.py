"""`remask eval`: one module a subject."""

from typing import Any

from remask_lab.cli.evaluate import gen_ppl, likelihood, tasks

SUBJECTS = (tasks, likelihood, gen_ppl)


def add_parser(commands: Any) -> None:
    """Register the command and its subjects."""
    parser = commands.add_parser("eval", help="measure how good a model is")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for subject in SUBJECTS:
        subject.add_parser(subjects)

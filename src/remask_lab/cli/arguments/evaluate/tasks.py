"""The options of `remask eval tasks`."""

import argparse
from typing import Any

from remask.cli.arguments.options import add_engine_options, add_model_options
from remask.cli.parser import examples
from remask_lab.cli.arguments.evaluate.likelihood import add_draw_options
from remask_lab.harness.presets import preset_names


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    parser = subjects.add_parser(
        "tasks",
        help="benchmarks (GSM8K, MATH-500, ARC, GPQA, MMLU, BBH, HumanEval, ...) under several cache policies",
        description="The names of our own tasks begin with 'remask_'. Their questions share a system prompt, and their "
        "answers are matched strictly. Any other name is a task of lm-eval. Without --data, data sets come from the "
        "hub, through lm-eval.",
        epilog=examples(
            "remask eval tasks --model GSAI-ML/LLaDA-8B-Instruct --tasks remask_gsm8k --caches none,bicache --limit 9",
            "remask eval tasks --model GSAI-ML/LLaDA-8B-Instruct --tasks arc_challenge --output arc.json",
        ),
    )
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="tasks to evaluate; --list names our own")
    parser.add_argument("--list", action=_List, nargs=0, help="name our own tasks and the folder of their configs")
    parser.add_argument("--caches", default="none", help="policies, separated by commas (default none)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    parser.add_argument("--include-path", metavar="FOLDER", help="further task configs for lm-eval")
    parser.add_argument("--data", metavar="FILE", help="local JSONL in the shape of the one task's data set")
    parser.add_argument("--fields", metavar="FIELD=NAME,...", help="names in FILE of the task's fields")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N questions of each task")
    parser.add_argument(
        "--preset",
        choices=preset_names(),
        help="sampling parameters, worked examples and settings of caches for each task, as a paper has them; what is "
        "given overrides it",
    )
    parser.add_argument("--shots", type=int, metavar="N", help="worked examples before each question")
    parser.add_argument(
        "--shot-data",
        metavar="FILE",
        help="local JSONL that the examples of our own task come from, such as its data set's training split",
    )
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters, which override those of a task")
    parser.add_argument("--system-prompt", metavar="FILE", help="role and rules that replace the shipped ones")
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run what the model writes (HumanEval, MBPP), as confined as this machine allows; what is not is logged",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write every row to FILE, as JSON; the same command resumes from it"
    )
    add_draw_options(parser)
    add_model_options(parser)
    add_engine_options(parser)


class _List(argparse.Action):
    """Prints our own tasks and exits, whatever other options are given or missing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        # Imported here, as the option is seldom given, and the tasks need PyTorch.
        from remask_lab.cli.evaluate.tasks import listed

        print(listed())
        parser.exit()

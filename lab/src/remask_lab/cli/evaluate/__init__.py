"""`remask eval SUBJECT`: measures the quality of a model. The options of all subjects; each has a module that runs it.

Help and errors of options wait for this module to load, so it imports no PyTorch.
"""

import argparse
import importlib
from typing import Any

from remask.cli.parser import examples
from remask.cli.shared_options import add_engine_options, add_model_options
from remask_lab.cli.options import add
from remask_lab.harness.presets import preset_names
from remask_lab.likelihood import MAX_ROWS

FIELDS = ("prompt", "response", "choices", "answer")  # of a line of `eval likelihood`
ROWS = {"help": "write every row to FILE, as JSON; the same command resumes from it"}
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's subjects."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for add_subject in (_tasks, _likelihood, _gen_ppl):
        add_subject(subjects)


def run(args: argparse.Namespace) -> int:
    """Run the subject by the module of its name, and return its status. Other subjects' modules are not imported."""
    status: int = importlib.import_module(f"{__name__}.{args.subject.replace('-', '_')}").run(args)
    return status


def _tasks(subjects: Any) -> None:
    """Add the parser of `eval tasks` to `subjects`, the result of `add_subparsers`."""
    parser = subjects.add_parser(
        "tasks",
        help="benchmarks (GSM8K, MATH-500, ARC, GPQA, MMLU, BBH, ...) under several cache policies",
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
    add(parser, "cache_config", caches="none", metric=None, output=ROWS)
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
    add(parser, sampling={"help": "sampling parameters, which override those of a task"})
    parser.add_argument("--system-prompt", metavar="FILE", help="role and rules that replace the shipped ones")
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="let tasks of lm-eval run what the model writes (humaneval, mbpp); best in a container",
    )
    add_draw_options(parser)
    add_model_options(parser)
    add_engine_options(parser)


class _List(argparse.Action):
    """Prints our own tasks and exits, with any other options, and without required ones."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        # Imported here, as the option is seldom given, and the tasks need PyTorch.
        from remask_lab.harness.benchmark import list_tasks

        print(list_tasks())
        parser.exit()


def _likelihood(subjects: Any) -> None:
    """Add the parser of `eval likelihood`."""
    parser = subjects.add_parser(
        "likelihood",
        help="log-likelihoods of responses, and multiple choice by them",
        epilog=examples(
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Base --prompts pairs.jsonl --output likelihood.json",
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Instruct --prompts questions.jsonl --chat --mc-samples 32",
        ),
    )
    pairs = "JSONL of prompt and response, or of prompt, choices and answer for multiple choice"
    add(parser, prompts={"required": True, "help": pairs})
    parser.add_argument("--fields", metavar="FIELD=NAME,...", help=f"names in FILE of {', '.join(FIELDS)}")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N lines only")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, the response its answer")
    add_draw_options(parser)
    parser.add_argument(
        "--max-rows", type=int, default=MAX_ROWS, metavar="N", help="most rows of a pass (default 4096)"
    )
    add(parser, output={"help": "write every response and its likelihood to FILE, as JSON"})
    add_model_options(parser, depths=False)


def add_draw_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the masks that likelihoods draw."""
    strata = "spread the masks' numbers of N draws evenly; 1: independent draws"
    add(
        parser,
        mc_samples={
            "type": int,
            "metavar": "N",
            "default": 128,
            "help": "sets of masks that are drawn for each response",
        },
        mc_strata={"type": int, "metavar": "N", "default": 8, "help": strata},
        mc_no_exact={"action": "store_true", "help": "draw sets of masks even where all of them could be computed"},
        seed={"default": 0, "help": "of the draws"},
    )


def _gen_ppl(subjects: Any) -> None:
    """Add the parser of `eval gen-ppl`."""
    parser = subjects.add_parser(
        "gen-ppl",
        help="generative perplexity under an external judge",
        epilog=examples(
            "remask eval gen-ppl --model GSAI-ML/LLaDA-8B-Base --judge gpt2-large --prompts texts.txt",
            "remask eval gen-ppl --model bundled --judge JUDGE --prompts texts.txt --caches none,bicache",
        ),
    )
    parser.add_argument("--judge", required=True, metavar="MODEL", help="causal language model: folder or hub id")
    parser.add_argument(
        "--judge-dtype",
        default="auto",
        choices=_DTYPES,
        metavar="|".join(_DTYPES),
        help="dtype of the judge (default auto)",
    )
    add(
        parser,
        "cache_config",
        caches="none",
        prompts={"required": True, "help": "one text a line, or JSONL of text or prompt"},
        prompt_tokens={"default": 128, "metavar": "N", "help": "cut prompts to N tokens"},
        requests={"default": 64, "help": "number of prompts"},
        sampling={"help": "sampling parameters; each request has its own seed"},
        seed={"default": 0, "help": "of the first request and of the intervals"},
        output={"help": "write every response and its score to FILE, as JSON"},
    )
    add_model_options(parser)
    add_engine_options(parser)

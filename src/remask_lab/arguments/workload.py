"""Options that say which requests with shared prefixes a measurement runs, and those requests."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.cli.options import object_option
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import check_least
from remask_lab.bench.workload import (
    PREFIX_TOKENS,
    PREFIXES,
    PROMPT_TOKENS,
    TASKS,
    TaskChoice,
    Workload,
    choose_task,
    has_own_task,
    is_bundled_uniform,
    usual_workload,
)


def add_task_options(parser: Any) -> None:
    """Which task the requests are drawn from, and how hard they are."""
    parser.add_argument(
        "--task", metavar="NAME", help=f"{', '.join(TASKS)} (default: the one that the model is made for)"
    )
    parser.add_argument(
        "--task-settings", metavar="JSON", help='how hard it is: {"orders": 40, "kinds": ["plan", "lookup"]}'
    )


def asked_task(args: argparse.Namespace) -> TaskChoice | None:
    """The task that the options name; None: the model's own. Raises what `choose_task` raises."""
    return choose_task(args.task, object_option("--task-settings", args.task_settings))


def add_workload_options(parser: Any, requests: int) -> None:
    """Which task, how many requests, of what length, and how they are denoised; `requests` is the default number."""
    add_task_options(parser)
    parser.add_argument("--requests", type=int, default=requests, metavar="N", help=f"default {requests}")
    parser.add_argument("--prefixes", type=int, help=f"different shared prefixes (default {PREFIXES})")
    parser.add_argument(
        "--prefix-tokens", type=int, metavar="P", help=f"length of a random shared prefix (default {PREFIX_TOKENS})"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="Q", help=f"random tokens after it (default {PROMPT_TOKENS})"
    )
    parser.add_argument("--max-tokens", type=int, metavar="G", help="response length")
    parser.add_argument("--sampling", metavar="JSON", help="further sampling parameters")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload (default 2024)")


def asked_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters as given, which come on top of the workload's usual ones."""
    lengths = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    return {**lengths, **object_option("--sampling", args.sampling)}


def asked_workload(llm: LLM, args: argparse.Namespace) -> Workload:
    """The task that `args` name, or the model's own, as `args` shape it.

    Raises `ConfigError` on numbers that are too small, and on shapes that the task does not have.
    """
    task = asked_task(args)
    check_least(args, requests=1, prefixes=1, prefix_tokens=0, prompt_tokens=1)
    shaped = args.prefix_tokens is not None or args.prompt_tokens is not None
    if shaped and (has_own_task(llm) if task is None else task.name != "random"):
        raise ConfigError(
            "--prefix-tokens and --prompt-tokens shape random workloads, and this model has a task; leave them out, or "
            "give --task random"
        )
    if (is_bundled_uniform(llm) if task is None else task.name == "timetable") and args.prefixes is not None:
        raise ConfigError("--prefixes: timetables share no prefix; leave it out")
    return usual_workload(
        llm,
        args.requests,
        args.seed,
        asked_sampling(args),
        prefixes=args.prefixes or PREFIXES,
        prefix_tokens=args.prefix_tokens,
        prompt_tokens=args.prompt_tokens,
        task=task,
    )


def heading(llm: LLM, workload: Workload) -> str:
    """The line above a table: the model and its requests."""
    return f"{llm.loaded.name}: {workload.name}, {len(workload.tasks)} requests over {workload.prefixes} prefixes"


def described(workload: Workload) -> dict[str, Any]:
    """What was asked, for a record's settings."""
    params = asdict(workload.tasks[0].request.params)
    return {
        "name": workload.name,
        "requests": len(workload.tasks),
        "prefixes": workload.prefixes,
        "prefix_ratio": round(workload.prefix_ratio, 3),
        "sampling": {name: value for name, value in params.items() if value is not None},
    }

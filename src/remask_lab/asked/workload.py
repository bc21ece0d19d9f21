"""The requests with shared prefixes that a measurement runs, as its options say."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.cli.options import object_option
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import check_least
from remask_lab.bench.workload import (
    TaskChoice,
    Workload,
    choose_task,
    has_own_task,
    usual_workload,
)


def asked_task(args: argparse.Namespace) -> TaskChoice | None:
    """The task that the options name; None: the model's own. Raises what `choose_task` raises."""
    return choose_task(args.task, object_option("--task-settings", args.task_settings))


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
    return usual_workload(
        llm,
        args.requests,
        args.seed,
        asked_sampling(args),
        prefixes=args.prefixes,
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

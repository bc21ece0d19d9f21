"""`remask eval questions`: the questions of a bundled model's task under several cache policies, by kind."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from remask.cli.options import check_folder, engine_config, open_llm
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.asked.common import compared_policies
from remask_lab.asked.workload import asked_task, asked_workload, described, heading
from remask_lab.bench.bench import part_scores
from remask_lab.bench.workload import Workload
from remask_lab.harness.generation import generate
from remask_lab.records.interval import clustered, percent_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import about
from remask_lab.records.sweep import Sweep


def run(args: argparse.Namespace) -> int:
    """Ask, print the table, and write each row to the file of `--output`."""
    check_folder("--output", args.output)
    asked_task(args)  # what no model can change is refused before one is loaded
    policies = compared_policies(args)
    llm = open_llm(args, engine=engine_config(args))
    workload = asked_workload(llm, args)
    if workload.tasks[0].answer is None:
        raise ConfigError("random tokens have no right answers; name a task with --task")
    parsed = [llm.policy(policy.name, policy.settings) for policy in policies]
    sweep = Sweep(args.output, "eval questions", about(llm, seed=args.seed, settings=described(workload)))
    rows = []
    for policy, own in zip(policies, parsed, strict=True):
        point = {"cache": policy.name, "settings": policy.settings}
        rows.append({**point, "result": sweep.row(point, lambda own=own: _measure(llm, workload, own))})  # type: ignore[misc]
    print(f"{heading(llm, workload)}\n\n{table(rows)}")
    if sweep.resumed:
        print(f"\n{sweep.resumed} rows were in {args.output} already.")
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns one line a row."""
    parts = list(rows[0]["result"]["parts"])
    header = ("cache", "right (95 % interval)", *parts, "row-layers", "prefix hits")
    lines = []
    for row in rows:
        result = row["result"]
        shares = [f"{result['parts'][part]:.3f}" for part in parts]
        right = percent_text(result["accuracy"], result["interval"])
        lines.append([row["cache"], right, *shares, f"{result['row_layers']:,}", str(result["prefix_hits"])])
    return markdown_table(header, lines, aligned=True)


def _measure(llm: LLM, workload: Workload, policy: CachePolicy) -> dict[str, Any]:
    requests = [task.request for task in workload.tasks]
    generation = generate(llm, requests, policy, workload.seed, llm.progress)
    verdicts = [
        bool(task.correct(output.text)) for task, output in zip(workload.tasks, generation.outputs, strict=True)
    ]
    samples = [
        {"text": output.text, "right": task.answer, "correct": verdict}
        for task, output, verdict in zip(workload.tasks, generation.outputs, verdicts, strict=True)
    ]
    return {
        **generation.costs(),
        "accuracy": float(np.mean(verdicts)),
        "interval": clustered(verdicts, workload.clusters),
        "parts": part_scores(workload.tasks, generation.outputs),
        "samples": samples,
    }

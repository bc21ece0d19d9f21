"""`remask analyze depth`: what the depth of reuse depends on."""

import argparse
from collections.abc import Sequence
from typing import Any

from remask.cli.options import add_model_options, open_llm
from remask.depth.conversations import PromptSet
from remask.depth.profile import ProfileSettings
from remask.depth.prompts import read_prompts, task_prompts
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options, check_result_options, tell
from remask_lab.instruments.passes import check_masked
from remask_lab.records.record import Record, about
from remask_lab.subjects.depth import SAMPLES, measure_depths
from remask_lab.subjects.depth_report import DepthReport, reading
from remask_lab.subjects.plots.depths import plot_depths


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser(
        "depth", help="depth of reuse by task and ratio, its convergence, and its stability under other system prompts"
    )
    parser.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a kind of task and its prompts, as 'profile --prompts' takes them; may be given again (default: those "
        "that the model's tokenizer reads)",
    )
    tau_option(parser)
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", help="prefix ratios in percent")
    parser.add_argument("--samples", type=int, metavar="N", help=f"requests per ratio and task (default {SAMPLES})")
    parser.add_argument("--system-prompts", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--official", action="store_true", help="the authors' profiler: no masks, cosine per token")
    parser.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    parser.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default 0)")
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and its reading, and save what was asked for."""
    check_result_options(args)
    settings = ProfileSettings(
        tau=args.tau,
        ratios=None if args.ratios is None else tuple(args.ratios),
        samples=args.samples,
        official=args.official,
        canvas=args.canvas,
        response=args.response,
        seed=args.seed,
    )
    # Profiling brings memory of its own; the engine's is kept as small as it can be.
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))
    check_masked(llm)
    tasks = _tasks(llm, args.task)
    report = measure_depths(llm, tasks, settings, args.system_prompts, progress=llm.progress)
    print(f"{llm.loaded.name}: {report.layers} layers, tau {report.tau:g}, {report.definition} similarity\n")
    print(text(report))
    names = ("tau", "task", "ratios", "system_prompts", "official", "canvas", "response")
    own = {name: getattr(args, name) for name in names} | {"samples": report.samples}
    record = Record("analyze depth", about(llm, seed=args.seed, settings=own), report)
    tell(args, record, reading(report), lambda folder: plot_depths(report, folder, llm.loaded.name))
    return 0


def _tasks(llm: LLM, given: Sequence[str]) -> dict[str, PromptSet]:
    tasks: dict[str, PromptSet] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--task must be NAME=FILE, got {item!r}")
        if name in tasks:
            raise ConfigError(f"--task names {name!r} twice; names must differ")
        tasks[name] = read_prompts(path, llm.loaded)
    return tasks or task_prompts(llm.loaded)


def text(report: DepthReport) -> str:
    """Mean depths by ratio, a column a task."""
    width = max(12, *(len(task.task) + 2 for task in report.tasks))
    lines = ["ratio %" + "".join(f"{task.task:>{width}}" for task in report.tasks) + "  std over tasks  over prompts"]
    for ratio in report.ratios:
        means = "".join(f"{task.mean[ratio]:>{width}.2f}" for task in report.tasks)
        spread = f"{report.over_tasks[ratio]:>16.2f}{report.system_prompts.spread[ratio]:>14.2f}"
        lines.append(f"{ratio:>7}{means}{spread}")
    return "\n".join(lines)

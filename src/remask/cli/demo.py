"""`remask demo`: the bundled model answers requests that share a system prompt, three ways side by side."""

import argparse
from pathlib import Path
from typing import Any

from remask.cli.options import open_llm
from remask.core.sampling import SamplingParams
from remask.engine.config import EngineConfig
from remask.evals.bench import run_bench
from remask.evals.contenders import Contender
from remask.evals.report import table
from remask.evals.workload import BUNDLED_SAMPLING, Workload, bundled_workload
from remask.llm import LLM, Work
from remask.plots.depth import plot_depth

CACHES = ("none", "reuse", "bicache")


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="no caching, all-layer reuse and BiCache side by side")
    parser.add_argument("--requests", type=int, default=96, metavar="N")
    parser.add_argument("--picture", default="out/depth.png", metavar="FILE", help="where the picture of b(r) goes")
    parser.add_argument("--seed", type=int, default=7, help="of the questions")
    parser.set_defaults(run=run, model="bundled", dtype="float32", device="auto", load_format="auto", depth_table=None)


def run(args: argparse.Namespace) -> int:
    """Show one answer, the table, and where the picture is."""
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=8))
    sampling = SamplingParams.from_mapping(BUNDLED_SAMPLING)
    workload = bundled_workload(llm, args.requests, 4, args.seed, sampling)
    _show_one(llm, workload)
    contenders = [Contender(name, llm.policy(name)) for name in CACHES]
    report = run_bench(llm, workload, contenders, 1, llm.engine_config, not args.quiet)
    print(table(report))
    picture = Path(args.picture)
    picture.parent.mkdir(parents=True, exist_ok=True)
    plot_depth(llm.depth_table, picture)
    print(f"\nHow deep a shared prefix may be reused, by prefix ratio: {picture}")
    return 0


def _show_one(llm: LLM, workload: Workload) -> None:
    task = workload.tasks[0]
    (output,) = llm.run([Work(task.request, llm.policy("bicache"))], progress=False)
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.decode(task.request.prompt_token_ids[task.request.prefix_length :])
    print(f"{task.request.prefix_length} shared tokens: a table of next stops, then the user's turn:")
    print(f"  {' '.join(prompt.split())}\n  -> {output.text}   (right answer: {task.answer})\n")

"""`remask analyze prefix-similarity`: a shared prefix's K/V inside whole canvases against the prefix alone."""

import argparse
from typing import Any

from remask.cli.options import add_model_options, open_llm
from remask.depth.similarity import Measure
from remask.engine.config import EngineConfig
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options, check_result_options, tell
from remask_lab.arguments.workload import add_workload_options, asked_workload, described
from remask_lab.instruments.passes import check_masked
from remask_lab.records.record import Record, about
from remask_lab.subjects.plots.prefix import plot_prefix
from remask_lab.subjects.prefix import measure_prefix
from remask_lab.subjects.prefix_report import PrefixSimilarity, reading


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser(
        "prefix-similarity", help="K/V of a shared prefix in its canvas against the prefix alone, by layer and step"
    )
    add_workload_options(parser, requests=16)
    parser.add_argument("--official", action="store_true", help="the authors' profiler: one cosine per token")
    tau_option(parser)
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and its reading, and save what was asked for."""
    check_result_options(args)
    # The measurement brings memory of its own; the engine's is kept as small as it can be.
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))
    check_masked(llm)
    workload = asked_workload(llm, args)
    requests = [task.request for task in workload.tasks]
    measure: Measure = "official" if args.official else "flat"
    report = measure_prefix(llm, requests, args.tau, measure, progress=llm.progress)
    print(f"{llm.loaded.name}: {workload.name}, {report.requests} requests over {workload.prefixes} prefixes\n")
    print(text(report))
    settings = described(workload) | {"tau": args.tau, "measure": measure}
    record = Record("analyze prefix-similarity", about(llm, seed=args.seed, settings=settings), report)
    tell(args, record, reading(report), lambda folder: plot_prefix(report, folder, llm.loaded.name))
    return 0


def text(report: PrefixSimilarity) -> str:
    """One line a layer."""
    lines = ["layer       K       V    mean   least step   std over steps   std over requests"]
    rows = zip(report.k, report.v, report.similarity, report.over_steps, report.over_requests, strict=True)
    for layer, (k, v, both, steps, requests) in enumerate(rows, start=1):
        means = [sum(series) / len(series) for series in (k, v, both)]
        lines.append(
            f"{layer:>5}" + "".join(f"{mean:>8.4f}" for mean in means) + f"{min(both):>13.4f}{steps:>17.4f}"
            f"{requests:>20.4f}"
        )
    return "\n".join(lines)

"""`remask analyze reuse`: how far reused K/V are from fresh ones in deep layers, and what plain reuse destroys."""

import argparse
from collections.abc import Sequence
from typing import Any

from remask.cli.options import add_model_options, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask_lab.arguments.results import add_result_options, check_result_options, tell
from remask_lab.arguments.workload import add_workload_options, asked_workload, described
from remask_lab.instruments.passes import check_masked
from remask_lab.records.record import Record, about
from remask_lab.subjects import collapse_report, reuse_report
from remask_lab.subjects.collapse import measure_collapse
from remask_lab.subjects.collapse_report import Row, shares
from remask_lab.subjects.plots.reuse import plot_reuse
from remask_lab.subjects.reuse import measure_reuse
from remask_lab.subjects.reuse_report import SETTINGS, ReuseReport


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser(
        "reuse", help="K/V reuse in deep layers in three settings; throughput and collapse of plain reuse"
    )
    parser.add_argument("--depth", type=int, metavar="B", help="shallow layers (default: the depth table's)")
    parser.add_argument("--refresh-interval", type=int, default=8, metavar="R", help="default 8")
    parser.add_argument("--traced", type=int, default=8, metavar="N", help="requests looked at by step (default 8)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    add_workload_options(parser, requests=48)
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure both, print their tables and reading, and save what was asked for."""
    check_result_options(args)
    for name in ("traced", "concurrency", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=args.concurrency))
    check_masked(llm)
    workload = asked_workload(llm, args)
    requests = [task.request for task in workload.tasks[: args.traced]]
    report = measure_reuse(llm, requests, args.depth, args.refresh_interval, progress=llm.progress)
    own = {"refresh_interval": args.refresh_interval} | ({} if args.depth is None else {"depth": args.depth})
    rows = measure_collapse(llm, workload, own, args.rounds, llm.progress)
    print(f"{llm.loaded.name}: {workload.name}, {len(workload.tasks)} requests over {workload.prefixes} prefixes\n")
    print(text(report, rows))
    settings = described(workload) | own | {name: getattr(args, name) for name in ("traced", "concurrency", "rounds")}
    data = {"deep": report, "collapse": rows}
    record = Record("analyze reuse", about(llm, seed=args.seed, settings=settings), data)
    told = f"{reuse_report.reading(report)} {collapse_report.reading(rows)}"
    tell(args, record, told, lambda folder: plot_reuse(report, rows, folder, llm.loaded.name))
    return 0


def text(report: ReuseReport, rows: Sequence[Row]) -> str:
    """One line a setting, then one a policy."""
    lines = [f"{'K/V of the prefix in deep layers':<36}{'mean similarity':>16}{'last step':>11}"]
    lines += [f"{name:<36}{report.deep_mean[name]:>16.4f}{report.deep[name][-1]:>11.4f}" for name in SETTINGS]
    kinds = list(shares(rows[0]))
    lines += ["", f"{'cache':<12}{'tok/s':>8}{'speed':>8}" + "".join(f"{kind:>12}" for kind in kinds)]
    for row in rows:
        values = "".join(f"{100 * value:>10.1f} %" for value in shares(row).values())
        lines.append(f"{row['cache']:<12}{row['throughput_tok_s']:>8.0f}{row['ratio_to_none']:>7.2f}x{values}")
    return "\n".join(lines)

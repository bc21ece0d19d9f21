"""`remask analyze sweep`: throughput and accuracy over BiCache's threshold tau and refresh interval R."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from remask.cli.options import add_model_options, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options, check_result_options, tell
from remask_lab.arguments.workload import add_workload_options, asked_workload, described
from remask_lab.instruments.passes import check_masked
from remask_lab.records.record import about
from remask_lab.records.sweep import Sweep
from remask_lab.subjects.parameters import CACHES, Grid, run_sweep
from remask_lab.subjects.plots.sweep import plot_sweep
from remask_lab.subjects.sweep_report import Parameter, Row, reading

_DEFAULTS = Grid()


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser(
        "sweep",
        help="throughput and accuracy over the threshold tau and the refresh interval R",
        description="Each value of tau at one R, and each value of R at one tau. With --output, what an interrupted "
        "sweep has measured is kept, and the same command goes on from there.",
    )
    parser.add_argument("--taus", type=float, nargs="*", metavar="TAU", help="values of tau; none leaves them out")
    parser.add_argument("--refresh-intervals", type=int, nargs="*", metavar="R", help="values of R, in the same way")
    tau_option(parser)
    parser.add_argument(
        "--refresh-interval", type=int, default=_DEFAULTS.refresh_interval, help="R while tau changes (default 16)"
    )
    parser.add_argument("--caches", default=",".join(CACHES), help=f"default {','.join(CACHES)}")
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="K", help="turns of each policy (default 3)")
    add_workload_options(parser, requests=48)
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, print the table and its reading, and save what was asked for."""
    check_result_options(args)
    for name in ("concurrency", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    grid = _grid(args)
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=args.concurrency))
    check_masked(llm)
    workload = asked_workload(llm, args)
    settings = described(workload) | {"concurrency": args.concurrency, "rounds": args.rounds}
    sweep = Sweep(args.output, "analyze sweep", about(llm, seed=args.seed, settings=settings))
    if sweep.resumed:
        print(f"{sweep.resumed} points are known from {args.output}")
    rows = run_sweep(llm, workload, grid, sweep, args.rounds, progress=llm.progress)
    print(f"{llm.loaded.name}: {workload.name}, {len(workload.tasks)} requests over {workload.prefixes} prefixes\n")
    print(text(rows))
    tell(args, sweep.record, reading(rows), lambda folder: plot_sweep(rows, folder, llm.loaded.name))
    return 0


def _grid(args: argparse.Namespace) -> Grid:
    taus, intervals = args.taus, args.refresh_intervals
    grid = Grid(
        taus=_DEFAULTS.taus if taus is None else tuple(dict.fromkeys(taus)),
        refresh_intervals=_DEFAULTS.refresh_intervals if intervals is None else tuple(dict.fromkeys(intervals)),
        tau=args.tau,
        refresh_interval=args.refresh_interval,
        caches=tuple(dict.fromkeys(name.strip() for name in args.caches.split(","))),
    )
    if not grid.taus and not grid.refresh_intervals:
        raise ConfigError("--taus and --refresh-intervals name no value, so there is nothing to sweep")
    return grid


def text(rows: Mapping[Parameter, Sequence[Row]]) -> str:
    """One line a point."""
    header = f"{'cache':<24}{'tau':>6}{'R':>5}{'depth':>7}{'tok/s':>8}{'speed':>8}{'work':>8}{'accuracy':>10}"
    lines = dict.fromkeys(_line(row) for own in rows.values() for row in own)
    return "\n".join([f"{header}{'agreement':>11}", *lines])


def _line(row: Row) -> str:
    accuracy = "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %"
    return (
        f"{row['cache']:<24}{row['tau']:>6g}{row['refresh_interval']:>5}{row['prefix_depth']:>7.1f}"
        f"{row['throughput_tok_s']:>8.0f}{row['ratio_to_none']:>7.2f}x{row['work_ratio_to_none']:>7.2f}x{accuracy:>10}"
        f"{100 * row['agreement_with_none']:>9.1f} %"
    )

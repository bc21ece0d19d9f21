"""`remask analyze memory`: what cache policies keep between passes, measured and by formula."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from remask.cli.options import object_option
from remask.errors import ConfigError
from remask_lab.arguments.results import add_result_options, check_result_options, keep
from remask_lab.arguments.shape import add_shape_options, open_with_requests, settings_of
from remask_lab.bench.contenders import contender, every_contender
from remask_lab.records.record import Record, about
from remask_lab.subjects.memory import measure_memory
from remask_lab.subjects.memory_report import MemoryUse
from remask_lab.subjects.plots.memory import plot_memory

SUBJECT = "analyze memory"


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser("memory", help="bytes that cache policies keep between passes, and their formulas")
    parser.add_argument("--caches", help="policies, separated by commas (default: every one that the model can have)")
    parser.add_argument("--cache-config", metavar="JSON", help='settings, as one object per policy: {"bicache": {}}')
    add_result_options(parser)
    add_shape_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and save what was asked for."""
    check_result_options(args)
    settings = object_option("--cache-config", args.cache_config)
    llm, workload = open_with_requests(args)
    if args.caches is None:
        rows, left_out = every_contender(llm, workload, settings)
    else:
        names = dict.fromkeys(name.strip() for name in args.caches.split(","))
        rows, left_out = [contender(llm, name, settings.get(name), workload) for name in names], []
    known = [row.name for row in rows] + [left.name for left in left_out]
    for name in settings:
        if name not in known:
            raise ConfigError(f"--cache-config names {name!r}, which is not measured; measured are {', '.join(known)}")
    uses = []
    for row in rows:
        work = [task.request.with_policy(row.policy) for task in (row.workload or workload).tasks]
        uses.append(measure_memory(llm, row.name, work))
    print(text(uses))
    for left in left_out:
        print(f"Left out: {left.name}: {left.reason}")
    chosen = settings_of(args) | {"cache_config": settings}
    record = Record(SUBJECT, about(llm, seed=args.seed, settings=chosen), {"rows": [data(use) for use in uses]})
    keep(args, record, lambda: plot_memory(uses, llm.loaded.name, args.plots))
    return 0


def data(use: MemoryUse) -> dict[str, Any]:
    """A row as plain numbers, what follows from its parts included."""
    return asdict(use) | {"formula_total": use.formula.total, "share": use.share}


def text(uses: Sequence[MemoryUse]) -> str:
    """The table, in megabytes, and what it says."""
    lines = [
        "| cache | K/V | outputs | hidden states | shared K/V | shared states | formula | measured | unused slots | "
        "of the weights |",
        "|---" * 10 + "|",
    ]
    for use in uses:
        sizes = (*use.formula.parts.values(), use.formula.total, use.measured, use.unused)
        cells = [use.cache, *(f"{size / 1e6:.3f}" if size else "-" for size in sizes), f"{100 * use.share:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    most = max(uses, key=lambda use: use.measured)
    least = min(uses, key=lambda use: use.measured)
    lines += [
        "",
        "MB (10^6 bytes) with all requests in memory. Measured = formula + unused slots, those at the ends of pages. "
        f"{most.cache} holds most, {most.measured / 1e6:.3f} MB or {100 * most.share:.2f} % of the weights, and "
        f"{least.cache} least, {least.measured / 1e6:.3f} MB.",
    ]
    return "\n".join(lines)

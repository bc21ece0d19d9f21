"""`remask analyze grid`: policies at every combination of settings, each beside `none` in the same run."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from remask.cli.options import add_model_options, object_option, open_llm
from remask.core.checks import listed
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask_lab.arguments.results import check_result_options, keep
from remask_lab.bench.workload import PREFIXES, Workload, usual_workload
from remask_lab.records.record import about, read_record
from remask_lab.records.sweep import Sweep
from remask_lab.subjects.grid import Grid, rows_of, run_grid
from remask_lab.subjects.grid_report import GridRow, Points, points_of, quality_name, reading, values_of, varied, worded
from remask_lab.subjects.plots.grid import plot_grid

T = TypeVar("T")

SUBJECT = "analyze grid"
MEASURED = "cache_ratio"


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    grid = subjects.add_parser("grid", help="accuracy, speed, work and memory of policies over grids of their settings")
    grid.add_argument("--cache", required=True, metavar="SPEC,...", help="policies or compositions")
    grid.add_argument("--cache-config", metavar="JSON", help="settings that stay, as one object per policy")
    grid.add_argument("--grid", metavar="JSON", help='settings that vary: {"prompt_interval": [1, 100], "ratio": [0]}')
    grid.add_argument("--sampling", metavar="JSON", help="sampling parameters that stay")
    grid.add_argument("--sampling-grid", metavar="JSON", help='sampling parameters that vary: {"steps": [8, 16]}')
    grid.add_argument("--prompt-tokens", metavar="N,...", help="random prompts of these lengths, on any model")
    grid.add_argument("--concurrency", default="8", metavar="C,...", help="requests run at a time (default 8)")
    grid.add_argument("--without-delay", action="store_true", help="also dkv-decode without its one-step delay")
    grid.add_argument("--requests", type=int, default=32, metavar="N", help="of each point (default 32)")
    grid.add_argument("--rounds", type=int, default=1, metavar="K", help="turns of each policy (default 1)")
    grid.add_argument("--seed", type=int, default=2024, help="of the workload and of its requests")
    grid.add_argument("--beside", metavar="FILE,...", help="results of other models that pictures and reading show too")
    grid.add_argument("--x", metavar="AXIS", help=f"what the pictures' lines run over: an axis, or {MEASURED}")
    grid.add_argument("--output", metavar="FILE", help="where rows go as they are measured; found there, they stay")
    grid.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")
    add_model_options(grid)
    grid.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what is not known yet, print table and reading, and save what was asked for."""
    for name in ("requests", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    check_result_options(args)
    grid, sampling = _grid(args), object_option("--sampling", args.sampling)
    for name in grid.sampling:
        if name in sampling:
            raise ConfigError(f"--sampling sets {name!r} and --sampling-grid varies it; leave one of them out")
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=max(grid.concurrency)))
    beside = _beside(args.beside)
    x = _x(args.x, [*(point.axes for point in grid.points(llm)), *points_of(beside)])

    def draw(varying: Mapping[str, Any], prompt_tokens: int | None) -> Workload:
        lengths: dict[str, Any] = {} if prompt_tokens is None else {"prefix_tokens": 0, "prompt_tokens": prompt_tokens}
        return usual_workload(
            llm, args.requests, args.seed, {**sampling, **varying}, prefixes=PREFIXES, **lengths
        ).seeded

    settings = {"requests": args.requests, "rounds": args.rounds, "sampling": sampling, "cache_config": grid.fixed}
    sweep = Sweep(args.output, SUBJECT, about(llm, seed=args.seed, settings=settings))
    rows = run_grid(llm, grid, draw, args.rounds, sweep, progress=llm.progress)
    if beside:
        rows = [*named(rows, llm.loaded.name), *beside]
    told = reading(rows)
    print(text(rows), told, sep="\n\n")
    if sweep.resumed:
        print(f"\n{sweep.resumed} rows were in {args.output} already.")
    models = values_of(points_of(rows), "model") or [llm.loaded.name]
    record = replace(sweep.record, data={**sweep.record.data, "reading": told})
    keep(args, record, lambda: plot_grid(rows, args.plots, " and ".join(models), x))
    return 0


def _beside(paths: str | None) -> list[GridRow]:
    """The rows of other result files, by model. Raises `RecordError` on files that are none."""
    found: list[GridRow] = []
    for path in () if paths is None else paths.split(","):
        record = read_record(path.strip(), SUBJECT)
        found += named(rows_of(record), record.about["model"])
    return found


def named(rows: Sequence[GridRow], model: str) -> list[GridRow]:
    """`rows`, with the model among their axes."""
    return [replace(row, axes={**row.axes, "model": model}) for row in rows]


def text(rows: Sequence[GridRow]) -> str:
    """The rows for people."""
    names = varied(points_of(rows))
    labels = [worded(row.axes, names) or str(row.axes["cache"]) for row in rows]
    width = max(len(label) for label in labels)
    quality = quality_name(rows)
    lines = [
        f"{'':<{width}}{quality + ' %':>22}{'none %':>8}{'speed':>8}{'work':>8}{'FLOPs':>8}{'cached %':>10}{'MB':>8}"
    ]
    lines += [
        f"{label:<{width}}{100 * row.quality:>22.1f}{100 * row.quality_none:>8.1f}"
        f"{row.speed:>7.2f}x{row.work:>7.2f}x{row.flops:>7.2f}x"
        f"{100 * row.cache_ratio:>10.1f}{row.memory / 1e6:>8.1f}"
        for label, row in zip(labels, rows, strict=True)
    ]
    return "\n".join(lines)


def _grid(args: argparse.Namespace) -> Grid:
    return Grid(
        caches=tuple(dict.fromkeys(name.strip() for name in args.cache.split(","))),
        settings=_lists("--grid", args.grid),
        sampling=_lists("--sampling-grid", args.sampling_grid),
        prompt_tokens=(None,) if args.prompt_tokens is None else _counts("--prompt-tokens", args.prompt_tokens),
        concurrency=_counts("--concurrency", args.concurrency),
        fixed=object_option("--cache-config", args.cache_config),
        without_delay=args.without_delay,
    )


def _lists(option: str, text: str | None) -> dict[str, list[Any]]:
    found = object_option(option, text)
    return {
        name: _distinct(f"{option}: {name}", list(listed(f"{option}: {name}", values, "values")))
        for name, values in found.items()
    }


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {text!r}") from error
    if min(counts) < 1:
        raise ConfigError(f"{option} takes numbers of at least 1, got {text!r}")
    return _distinct(option, counts)


def _distinct(option: str, values: list[T]) -> list[T]:
    if not values or any(value in values[:index] for index, value in enumerate(values)):
        raise ConfigError(f"{option} needs one value or more, each once; got {values!r}")
    return values


def _x(asked: str | None, points: Points) -> str:
    """What lines run over: by default the first axis that varies."""
    names = varied(points)
    if asked is None:
        return next(iter(names), "cache")
    if asked not in (*names, MEASURED):
        raise UnknownNameError("axis of --x", asked, (*names, MEASURED))
    return asked

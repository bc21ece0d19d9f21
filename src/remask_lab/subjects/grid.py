"""`remask analyze grid`: accuracy, speed, work and memory of policies over grids of their settings.

Policies run at every combination of settings, each beside `none` in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from remask.checks.values import listed
from remask.cli.options import object_option, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask_lab.arguments.common import check_least, separated
from remask_lab.arguments.subjects.grid import MEASURED
from remask_lab.asked.workload import asked_task
from remask_lab.bench.grid import Grid, GridRow, rows_of, run_grid
from remask_lab.bench.workload import Workload, usual_workload
from remask_lab.drawing import distinct_line, legend_below, new_figure, save_figures, whole_ticks
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import about, read_record
from remask_lab.records.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[GridRow]
Points: TypeAlias = Sequence[Mapping[str, Any]]  # the axes of rows
Value: TypeAlias = Callable[[GridRow], float]
T = TypeVar("T")

SUBJECT = "analyze grid"
LOAD = ("prompt_tokens", "concurrency", "ratio")  # axes over which absolute speed and memory are of interest
_MARKERS = "osD^vP*X"


def measure(args: argparse.Namespace) -> Outcome:
    """Measure the points that `--output` does not hold yet."""
    check_least(args, requests=1, rounds=1)
    grid, sampling = _grid(args), object_option("--sampling", args.sampling)
    task = asked_task(args)
    if task is not None and task.name != "random" and args.prompt_tokens is not None:
        raise ConfigError(
            f"--prompt-tokens draws random prompts, and --task asks for {task.name}; leave one of them out"
        )
    for name in grid.sampling:
        if name in sampling:
            raise ConfigError(f"--sampling sets {name!r} and --sampling-grid varies it; leave one of them out")
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=max(grid.concurrency)))
    beside = _beside(args.beside)
    x = _x(args.x, [*(point.axes for point in grid.points(llm)), *points_of(beside)])

    def make_workload(varying: Mapping[str, Any], prompt_tokens: int | None) -> Workload:
        params = {**sampling, **varying}
        lengths: dict[str, Any] = {} if prompt_tokens is None else {"prefix_tokens": 0, "prompt_tokens": prompt_tokens}
        return usual_workload(llm, args.requests, args.seed, params, task=task, **lengths).seeded

    settings = {"requests": args.requests, "rounds": args.rounds, "sampling": sampling, "cache_config": grid.fixed}
    if task is not None:
        settings["task"] = asdict(task)
    sweep = Sweep(args.output, SUBJECT, about(llm, seed=args.seed, settings=settings))
    rows = run_grid(llm, grid, make_workload, args.rounds, sweep, progress=llm.progress)
    if beside:
        rows = [*named(rows, llm.loaded.name), *beside]
    parts = [text(rows)]
    if sweep.resumed:
        parts.append(f"{sweep.resumed} rows were in {args.output} already.")
    models = values_of(points_of(rows), "model") or [llm.loaded.name]
    pictures = partial(plot_grid, rows, model=" and ".join(models), x=x)
    return Outcome("\n\n".join(parts), sweep.record, pictures, reading(rows))


def _grid(args: argparse.Namespace) -> Grid:
    return Grid(
        caches=tuple(separated(args.cache)),
        settings=_lists("--grid", args.grid),
        sampling=_lists("--sampling-grid", args.sampling_grid),
        prompt_tokens=(None,) if args.prompt_tokens is None else _counts("--prompt-tokens", args.prompt_tokens),
        concurrency=_counts("--concurrency", args.concurrency),
        fixed=object_option("--cache-config", args.cache_config),
        without_delay=args.without_delay,
    )


def _lists(option: str, given: str | None) -> dict[str, list[Any]]:
    found = object_option(option, given)
    return {
        name: _distinct(f"{option}: {name}", list(listed(f"{option}: {name}", values, "values")))
        for name, values in found.items()
    }


def _counts(option: str, given: str) -> list[int]:
    try:
        counts = [int(part) for part in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {given!r}") from error
    if min(counts) < 1:
        raise ConfigError(f"{option} takes numbers of at least 1, got {given!r}")
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


def _beside(paths: str | None) -> list[GridRow]:
    """The rows of other result files, by model. Raises `RecordError` on other files."""
    found: list[GridRow] = []
    for path in () if paths is None else paths.split(","):
        record = read_record(path.strip(), SUBJECT)
        found += named(rows_of(record), record.about["model"])
    return found


def named(rows: Sequence[GridRow], model: str) -> list[GridRow]:
    """`rows`, with the model among their axes."""
    return [replace(row, axes={**row.axes, "model": model}) for row in rows]


def quality_name(rows: Rows) -> str:
    """What `quality` is of these rows."""
    return "agreement with none" if any(row.accuracy is None for row in rows) else "accuracy"


def points_of(rows: Rows) -> Points:
    """The axes of `rows`."""
    return [row.axes for row in rows]


def varied(points: Points) -> tuple[str, ...]:
    """Names of the axes on which `points` differ: settings, then prompt length, requests at a time, policy, model.

    Settings that only some policies take are among them where they have several values.
    """
    names = dict.fromkeys(name for point in points for name in point)
    found = [name for name in names if len(values_of(points, name)) > 1]
    last = ("prompt_tokens", "concurrency", "cache", "model")
    return tuple(sorted(found, key=lambda name: last.index(name) + 1 if name in last else 0))


def values_of(points: Points, name: str) -> list[Any]:
    """Values of an axis: numbers in ascending order, others in theirs. Points without the axis have none."""
    found = [point[name] for point in points if name in point]
    values = [value for index, value in enumerate(found) if value not in found[:index]]
    return sorted(values) if all(is_number(value) for value in values) else values


def is_number(value: object) -> bool:
    """Whether `value` has a place on an axis of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def worded(axes: Mapping[str, Any], names: Sequence[str]) -> str:
    """Those of `names` that a row has, with their values."""
    shown = {name: axes[name] for name in names if name in axes}
    return ", ".join(
        str(value) if name in ("cache", "model") else f"{name}={'null' if value is None else value}"
        for name, value in shown.items()
    )


def reading(rows: Rows) -> str:
    """The grid in a paragraph: its range, the fastest point that costs nothing, and what each axis does."""
    names, quality = varied(points_of(rows)), quality_name(rows)
    lowest, highest = min(rows, key=lambda row: row.quality), max(rows, key=lambda row: row.quality)
    parts = [f"{len(rows)} points; {quality} from {_percent(lowest.quality)} to {_percent(highest.quality)}."]
    cached = [row for row in rows if row.axes["cache"] != "none"]
    kept = [row for row in cached if row.quality >= row.quality_none]
    if kept:
        best = max(kept, key=lambda row: row.speed)
        parts.append(
            f"{len(kept)} of {len(cached)} cached points are as good as none or better; the fastest of them, "
            f"{_named(best, names)}, takes 1/{best.speed:.2f} of none's time for 1/{best.flops:.2f} of its FLOPs."
        )
    elif cached:
        best = max(cached, key=lambda row: row.quality - row.quality_none)
        parts.append(
            f"No cached point reaches none; the nearest, {_named(best, names)}, has {_percent(best.quality)} "
            f"against {_percent(best.quality_none)} at {best.speed:.2f}x the speed."
        )
    return " ".join([*parts, *(_effect(rows, name, quality) for name in names)])


def _named(row: GridRow, names: Sequence[str]) -> str:
    return worded(row.axes, names) or str(row.axes["cache"])


def _effect(rows: Rows, name: str, quality: str) -> str:
    """What an axis does, the others averaged."""
    values = values_of(points_of(rows), name)
    groups = [[row for row in rows if name in row.axes and row.axes[name] == value] for value in values]
    means = [
        tuple(float(np.mean([getattr(row, field) for row in group])) for field in ("quality", "speed", "flops"))
        for group in groups
    ]
    if all(is_number(value) for value in values):
        values, means = [values[0], values[-1]], [means[0], means[-1]]
        join = " to "
    else:
        join = ", "
    figures = (
        f"{quality} {join.join(_percent(mean[0]) for mean in means)}",
        f"speed {join.join(f'{mean[1]:.2f}x' for mean in means)}",
        f"FLOPs saved {join.join(f'{mean[2]:.2f}x' for mean in means)}",
    )
    label = "" if name in ("cache", "model") else f"{name} "
    words = join.join("null" if value is None else str(value) for value in values)
    return f"Over {label}{words}: {'; '.join(figures)} (means over the rest)."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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


def plot_grid(rows: Rows, folder: str | Path, model: str, x: str) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    `x` is an axis on which `rows` differ, or "cache_ratio". Raises `ConfigError` where the folder cannot be made.
    """
    figures = {"grid-lines": _lines(rows, x), "grid-tradeoff": _tradeoff(rows, x)}
    settings = [name for name in varied(points_of(rows)) if all(name in row.axes for row in rows)]
    if len(settings) == 2 and len(varied(points_of(rows))) == 2:
        figures["grid-map"] = _map(rows, *settings)
    if x in LOAD:
        figures["grid-load"] = _load(rows, x)
    return save_figures(figures, folder, model)


def _lines(rows: Rows, x: str) -> Figure:
    """Quality, speed and FLOPs saved over one axis, a line for each combination of the others."""
    quality = quality_name(rows)
    figure = new_figure(
        f"{quality}, speed and FLOPs over {_words(x)}",
        width=10,
        how="a cache costs nothing where its left line lies on that of none, and gains where the others are above 1",
    )
    panels: list[tuple[str, str, Value, float | None]] = [
        (quality, f"{quality} (%)", lambda row: 100 * row.quality, None),
        ("speed", "times none", lambda row: row.speed, 1.0),
        ("FLOPs saved", "FLOPs of none / own", lambda row: row.flops, 1.0),
    ]
    for axes, (title, label, value, level) in zip(figure.subplots(1, 3), panels, strict=True):
        for index, (name, _color, marker, line) in enumerate(_series(rows, x)):
            distinct_line(axes, index, *_places(axes, rows, line, x, value), name, marker)
        if all(isinstance(row.axes.get(x), int) for row in rows):
            whole_ticks(axes.xaxis, 6)
        if level is None:
            _percent_axis(axes, [value(row) for row in rows])
        else:
            axes.axhline(level, color="grey", linestyle=":", linewidth=1)
            axes.set_ylim(bottom=0)
        _describe(axes, title, _words(x), label)
    if len({row.quality_none for row in rows}) == 1:
        figure.axes[0].axhline(100 * rows[0].quality_none, color="grey", linestyle=":", linewidth=1, label="none")
    _legend(figure, figure.axes[0])
    return figure


def _tradeoff(rows: Rows, x: str) -> Figure:
    """Quality over speed, as in dKV-Cache's figure 4: lines run along `x`, whose ends are named."""
    quality = quality_name(rows)
    figure = new_figure(f"{quality} over speed, along {_words(x)}")
    axes = figure.subplots()
    for name, color, marker, line in _series(rows, x):
        points = [(row.speed, 100 * row.quality) for row in line]
        axes.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=0.8, markersize=5, label=name)
        for row, place in {0: (line[0], points[0]), len(line) - 1: (line[-1], points[-1])}.values():
            if x in row.axes and len(line) > 1:
                text = _tick(row.axes[x])
                axes.annotate(text, place, xytext=(4, 5), textcoords="offset points", fontsize="small", color=color)
    _percent_axis(axes, [100 * row.quality for row in rows], 0.12)
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    _describe(axes, "", "speed (times none)", f"{quality} (%)")
    _legend(figure, axes)
    return figure


def _map(rows: Rows, across: str, down: str) -> Figure:
    """Quality and speed over two axes."""
    quality = quality_name(rows)
    figure = new_figure(f"{quality} and speed over {_words(across)} and {_words(down)}", width=9)
    columns, lines = values_of(points_of(rows), across), values_of(points_of(rows), down)
    panels: list[tuple[str, Value, str]] = [
        (f"{quality} (%)", lambda row: 100 * row.quality, "%.0f"),
        ("speed (times none)", lambda row: row.speed, "%.2f"),
    ]
    for axes, (title, value, shape) in zip(figure.subplots(1, 2), panels, strict=True):
        table = np.full((len(lines), len(columns)), np.nan)
        for row in rows:
            table[lines.index(row.axes[down]), columns.index(row.axes[across])] = value(row)
        image = axes.imshow(table, cmap="viridis", aspect="auto")
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for (line, column), number in np.ndenumerate(table):
            color = "black" if number > middle else "white"
            axes.text(column, line, shape % number, ha="center", va="center", color=color, fontsize="small")
        axes.set_xticks(range(len(columns)), [_tick(value) for value in columns])
        axes.set_yticks(range(len(lines)), [_tick(value) for value in lines])
        axes.set(xlabel=_words(across), ylabel=_words(down))
        axes.set_title(title, fontsize="medium")
        figure.colorbar(image, ax=axes, shrink=0.9)
    return figure


def _load(rows: Rows, x: str) -> Figure:
    """Tokens a second and peak memory over prompt length or requests at a time, beside `none`."""
    figure = new_figure(f"speed and cache memory over {_words(x)}", width=9)
    left, right = figure.subplots(1, 2)
    panels: list[tuple[Axes, Value, Value]] = [
        (left, lambda row: row.tokens_s, lambda row: row.tokens_s_none),
        (right, lambda row: row.memory / 1e6, lambda row: row.memory_none / 1e6),
    ]
    for axes, own, none in panels:
        for name, color, marker, line in _series(rows, x):
            axes.plot(*_places(axes, rows, line, x, own), marker=marker, color=color, label=name, linewidth=1.3)
        known = values_of(points_of(rows), x)
        grouped = [[none(row) for row in rows if row.axes[x] == at] for at in known]
        means = [float(np.mean(group)) for group in grouped]
        axes.plot(known, means, ".--", color="black", linewidth=1.2, label="none (mean of its turns)")
        axes.set_ylim(bottom=0)
    _describe(left, "speed", _words(x), "tokens / s")
    _describe(right, "K/V and other cached states at the peak", _words(x), "MB")
    _legend(figure, left)
    return figure


def _series(rows: Rows, x: str) -> list[tuple[str, Any, str, list[GridRow]]]:
    """Name, colour, marker and rows of each line: one for each combination of what is varied beside `x`."""
    # Over a measured quantity the first setting is what moves along a line.
    names = varied(points_of(rows))
    along = x if x in names else next((name for name in names if name != "cache"), x)
    others = [name for name in names if name != along]
    lines: dict[str, list[GridRow]] = {}
    for row in rows:
        lines.setdefault(worded(row.axes, others) or str(row.axes["cache"]), []).append(row)
    from matplotlib import colormaps

    colors = colormaps["tab10" if len(lines) <= 10 else "turbo"]
    return [
        (name, colors(index if len(lines) <= 10 else index / (len(lines) - 1)), _MARKERS[index % len(_MARKERS)], line)
        for index, (name, line) in enumerate(lines.items())
    ]


def _places(axes: Axes, rows: Rows, line: Sequence[GridRow], x: str, value: Value) -> tuple[list[float], list[float]]:
    """Where a line's points stand: by their numbers, or by the order of what are no numbers."""
    if x == "cache_ratio":
        points = sorted((100 * row.cache_ratio, value(row)) for row in line)
        return [at for at, _ in points], [number for _, number in points]
    known = values_of(points_of(rows), x)
    own = sorted((row for row in line if x in row.axes), key=lambda row: known.index(row.axes[x]))
    if all(is_number(at) for at in known):
        return [float(row.axes[x]) for row in own], [value(row) for row in own]
    axes.set_xticks(range(len(known)), [_tick(at) for at in known])
    return [float(known.index(row.axes[x])) for row in own], [value(row) for row in own]


def _percent_axis(axes: Axes, values: Sequence[float], margin: float = 0.06) -> None:
    """From 0 where values fall low, else closer; always a little beyond the ends."""
    low = 0 if min(values) < 60 else min(values)
    room = max(1.0, margin * (100 - low))
    axes.set_ylim(low - room, 100 + room)


def _describe(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


def _legend(figure: Figure, axes: Axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    # About 14 characters of this size go into an inch.
    columns = int(14 * figure.get_figwidth() / (max(map(len, labels)) + 8))
    legend_below(figure, min(len(labels), max(1, columns)), axes, "outside lower center")


def _words(name: str) -> str:
    return {
        "cache_ratio": "cache ratio (%)",
        "prompt_tokens": "prompt length (tokens)",
        "concurrency": "requests at a time",
    }.get(name, name)


def _tick(value: object) -> str:
    return "null" if value is None else str(value)

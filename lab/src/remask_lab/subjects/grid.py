"""`remask analyze grid`: accuracy, speed, work and memory of policies over grids of their settings.

Policies run at every combination of settings, each beside `none` in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from remask.checks.values import listed
from remask.cli.options import object_option, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.request.sampling_params import layered
from remask_lab.asked import Outcome, asked_task, check_least, read_by, separated
from remask_lab.bench.grid import Grid, GridRow, rows_of, run_grid
from remask_lab.bench.workload import Workload, usual_workload
from remask_lab.drawing import distinct_line, label, legend_below, new_panels
from remask_lab.records.markdown import percent, text_table
from remask_lab.records.record import Sweep, about, read_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[GridRow]
Points: TypeAlias = Sequence[Mapping[str, Any]]  # the axes of rows
Value: TypeAlias = Callable[[GridRow], float]
T = TypeVar("T")

MEASURED = "cache_ratio"  # what pictures may run over that is no axis
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
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=max(grid.concurrency)), reads=read_by(task))
    beside = _beside(args.beside)
    x = _x(args.x, [*(point.axes for point in grid.points(llm)), *points_of(beside)])

    def make_workload(varying: Mapping[str, Any], prompt_tokens: int | None) -> Workload:
        unset = {name: None for name, value in sampling.items() if value is None}  # of the task's own
        params = unset | layered(sampling, varying)
        lengths: dict[str, Any] = {} if prompt_tokens is None else {"prefix_tokens": 0, "prompt_tokens": prompt_tokens}
        return usual_workload(llm, args.requests, args.seed, params, task=task, **lengths).seeded

    settings = {"requests": args.requests, "rounds": args.rounds, "sampling": sampling, "cache_config": grid.fixed}
    if task is not None:
        settings["task"] = asdict(task)
    sweep = Sweep(args.output, SUBJECT, about(llm, seed=args.seed, settings=settings))
    rows = run_grid(llm, grid, make_workload, args.rounds, sweep, progress=llm.session.progress)
    if beside:
        rows = [*named(rows, llm.loaded.name), *beside]
    told = text(rows)
    if sweep.resumed:
        told += f"\n\n{sweep.resumed} rows were in {args.output} already."
    models = " and ".join(values_of(points_of(rows), "model")) or None
    record = sweep.record
    return Outcome(record.about, record.data, told, reading(rows), lambda: figures(rows, x), models=models)


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
    parts = [f"{len(rows)} points; {quality} from {percent(lowest.quality)} to {percent(highest.quality)}."]
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
            f"No cached point reaches none; the nearest, {_named(best, names)}, has {percent(best.quality)} "
            f"against {percent(best.quality_none)} at {best.speed:.2f}x the speed."
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
        f"{quality} {join.join(percent(mean[0]) for mean in means)}",
        f"speed {join.join(f'{mean[1]:.2f}x' for mean in means)}",
        f"FLOPs saved {join.join(f'{mean[2]:.2f}x' for mean in means)}",
    )
    label = "" if name in ("cache", "model") else f"{name} "
    words = join.join("null" if value is None else str(value) for value in values)
    return f"Over {label}{words}: {'; '.join(figures)} (means over the rest)."


def text(rows: Rows) -> str:
    """The rows for people."""
    names = varied(points_of(rows))
    return text_table(
        rows,
        {
            "": lambda row: _named(row, names),
            f"{quality_name(rows)} %": lambda row: f"{100 * row.quality:.1f}",
            "none %": lambda row: f"{100 * row.quality_none:.1f}",
            "speed": lambda row: f"{row.speed:.2f}x",
            "work": lambda row: f"{row.work:.2f}x",
            "FLOPs": lambda row: f"{row.flops:.2f}x",
            "cached %": lambda row: f"{100 * row.cache_ratio:.1f}",
            "MB": lambda row: f"{row.memory / 1e6:.1f}",
        },
    )


def figures(rows: Rows, x: str) -> dict[str, Figure]:
    """Lines over `x`, an axis on which `rows` differ or "cache_ratio"; quality over speed; and maps of two axes."""
    found = {"grid-lines": _lines(rows, x), "grid-tradeoff": _tradeoff(rows, x)}
    names = varied(points_of(rows))
    if len(names) == 2 and all(name in row.axes for name in names for row in rows):
        found["grid-map"] = _map(rows, *names)
    if x in LOAD:
        found["grid-load"] = _load(rows, x)
    return found


def _lines(rows: Rows, x: str) -> Figure:
    """Quality, speed and FLOPs saved over one axis, a line for each combination of the others."""
    quality = quality_name(rows)
    how = "a cache costs nothing where its left line lies on that of none, and gains where the others are above 1"
    figure, panels = new_panels(f"{quality}, speed and FLOPs over {_words(x)}", 3, width=10, how=how)
    shown: list[tuple[str, str, Value]] = [
        (quality, f"{quality} (%)", lambda row: 100 * row.quality),
        ("speed", "times none", lambda row: row.speed),
        ("FLOPs saved", "FLOPs of none / own", lambda row: row.flops),
    ]
    for axes, (title, y, value) in zip(panels, shown, strict=True):
        for index, (name, _color, marker, line) in enumerate(_series(rows, x)):
            distinct_line(axes, index, *_places(axes, rows, line, x, value), name, marker)
        whole = all(isinstance(row.axes.get(x), int) for row in rows)
        label(axes, title, _words(x), y, grid="both", ticks=6 * whole, floor=axes is not panels[0])
        if axes is not panels[0]:
            axes.axhline(1.0, color="grey", linestyle=":", linewidth=1)
    _percent_axis(panels[0], [100 * row.quality for row in rows])
    if len({row.quality_none for row in rows}) == 1:
        panels[0].axhline(100 * rows[0].quality_none, color="grey", linestyle=":", linewidth=1, label="none")
    _legend(figure, panels[0])
    return figure


def _tradeoff(rows: Rows, x: str) -> Figure:
    """Quality over speed, as in dKV-Cache's figure 4: lines run along `x`, whose ends are named."""
    quality = quality_name(rows)
    figure, (axes,) = new_panels(f"{quality} over speed, along {_words(x)}", 1)
    for name, color, marker, line in _series(rows, x):
        points = [(row.speed, 100 * row.quality) for row in line]
        axes.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=0.8, markersize=5, label=name)
        for end in (0, -1) if len(line) > 1 else ():
            if x in line[end].axes:
                style: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small", "color": color}
                axes.annotate(_tick(line[end].axes[x]), points[end], (4, 5), **style)
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    label(axes, "", "speed (times none)", f"{quality} (%)", grid="both")
    _percent_axis(axes, [100 * row.quality for row in rows], 0.12)
    _legend(figure, axes)
    return figure


def _map(rows: Rows, across: str, down: str) -> Figure:
    """Quality and speed over two axes."""
    quality = quality_name(rows)
    title = f"{quality} and speed over {_words(across)} and {_words(down)}"
    figure, panels = new_panels(title, 2, width=9)
    columns, lines = values_of(points_of(rows), across), values_of(points_of(rows), down)
    shown: list[tuple[str, Value, str]] = [
        (f"{quality} (%)", lambda row: 100 * row.quality, ".0f"),
        ("speed (times none)", lambda row: row.speed, ".2f"),
    ]
    for axes, (title, value, form) in zip(panels, shown, strict=True):
        table = np.full((len(lines), len(columns)), np.nan)
        for row in rows:
            table[lines.index(row.axes[down]), columns.index(row.axes[across])] = value(row)
        image = axes.imshow(table, cmap="viridis", aspect="auto")
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for (line, column), number in np.ndenumerate(table):
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": "small"}
            axes.text(column, line, format(number, form), color="black" if number > middle else "white", **style)
        axes.set_xticks(range(len(columns)), list(map(_tick, columns)))
        axes.set_yticks(range(len(lines)), list(map(_tick, lines)))
        label(axes, title, _words(across), _words(down))
        figure.colorbar(image, ax=axes, shrink=0.9)
    return figure


def _load(rows: Rows, x: str) -> Figure:
    """Tokens a second and peak memory over prompt length or requests at a time, beside `none`."""
    figure, panels = new_panels(f"speed and cache memory over {_words(x)}", 2, width=9)
    shown: list[tuple[str, str, Value, Value]] = [
        ("speed", "tokens / s", lambda row: row.tokens_s, lambda row: row.tokens_s_none),
        (
            "K/V and other cached states at the peak",
            "MB",
            lambda row: row.memory / 1e6,
            lambda row: row.memory_none / 1e6,
        ),
    ]
    known = values_of(points_of(rows), x)
    for axes, (title, y, own, none) in zip(panels, shown, strict=True):
        for name, color, marker, line in _series(rows, x):
            axes.plot(*_places(axes, rows, line, x, own), marker=marker, color=color, label=name, linewidth=1.3)
        means = [float(np.mean([none(row) for row in rows if row.axes[x] == at])) for at in known]
        axes.plot(known, means, ".--", color="black", linewidth=1.2, label="none (mean of its turns)")
        label(axes, title, _words(x), y, grid="both", floor=True)
    _legend(figure, panels[0])
    return figure


def _series(rows: Rows, x: str) -> list[tuple[str, Any, str, list[GridRow]]]:
    """Name, colour, marker and rows of each line: one for each combination of what is varied beside `x`."""
    from matplotlib import colormaps

    # Over a measured quantity the first setting is what moves along a line.
    names = varied(points_of(rows))
    along = x if x in names else next((name for name in names if name != "cache"), x)
    others = [name for name in names if name != along]
    lines: dict[str, list[GridRow]] = {}
    for row in rows:
        lines.setdefault(_named(row, others), []).append(row)
    few = len(lines) <= 10
    colors = [colormaps["tab10" if few else "turbo"](at if few else at / (len(lines) - 1)) for at in range(len(lines))]
    return [(name, *each) for name, *each in zip(lines, colors, cycle(_MARKERS), lines.values(), strict=False)]  # type: ignore[misc]


def _places(axes: Axes, rows: Rows, line: Rows, x: str, value: Value) -> tuple[list[float], list[float]]:
    """Where a line's points stand: by their numbers, or by the order of what are no numbers."""
    if x == MEASURED:
        own = sorted(line, key=lambda row: (row.cache_ratio, value(row)))
        return [100 * row.cache_ratio for row in own], list(map(value, own))
    known = values_of(points_of(rows), x)
    own = sorted((row for row in line if x in row.axes), key=lambda row: known.index(row.axes[x]))
    if all(map(is_number, known)):
        return [float(row.axes[x]) for row in own], list(map(value, own))
    axes.set_xticks(range(len(known)), list(map(_tick, known)))
    return [float(known.index(row.axes[x])) for row in own], list(map(value, own))


def _percent_axis(axes: Axes, values: Sequence[float], margin: float = 0.06) -> None:
    """From 0 where values fall low, else closer; always a little beyond the ends."""
    low = 0 if min(values) < 60 else min(values)
    room = max(1.0, margin * (100 - low))
    axes.set_ylim(low - room, 100 + room)


def _legend(figure: Figure, axes: Axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    # About 14 characters of this size go into an inch.
    columns = int(14 * figure.get_figwidth() / (max(map(len, labels)) + 8))
    legend_below(figure, min(len(labels), max(1, columns)), axes, "outside lower center")


def _words(name: str) -> str:
    return {
        MEASURED: "cache ratio (%)",
        "prompt_tokens": "prompt length (tokens)",
        "concurrency": "requests at a time",
    }.get(name, name)


def _tick(value: object) -> str:
    return "null" if value is None else str(value)

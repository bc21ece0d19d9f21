"""Pictures of a grid: quality, speed and FLOPs over a setting, quality over speed, maps over two settings, memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remask_lab.drawing import new_figure, save_figures
from remask_lab.subjects.grid_report import GridRow, Rows, is_number, points_of, quality_name, values_of, varied, worded

Value = Callable[[GridRow], float]

LOAD = ("prompt_tokens", "concurrency")  # axes over which absolute speed and memory are of interest
_MARKERS = "osD^vP*X"


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
    figure = new_figure(f"{quality}, speed and FLOPs over {_words(x)}", width=10)
    panels: list[tuple[str, str, Value, float | None]] = [
        (quality, f"{quality} (%)", lambda row: 100 * row.quality, None),
        ("speed", "times none", lambda row: row.speed, 1.0),
        ("FLOPs saved", "FLOPs of none / own", lambda row: row.flops, 1.0),
    ]
    for axes, (title, label, value, level) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, color, marker, line in _series(rows, x):
            axes.plot(
                *_places(axes, rows, line, x, value),
                marker=marker,
                color=color,
                label=name,
                linewidth=1.3,
                markersize=4,
            )
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
        grouped = [[none(row) for row in rows if row.axes[x] == at] for at in values_of(points_of(rows), x)]
        means = [float(np.mean(group)) for group in grouped]
        axes.plot(
            values_of(points_of(rows), x), means, ".--", color="black", linewidth=1.2, label="none (mean of its turns)"
        )
        axes.set_ylim(bottom=0)
    _describe(left, "speed", _words(x), "tokens / s")
    _describe(right, "K/V and other cached states at the peak", _words(x), "MB")
    _legend(figure, left)
    return figure


def _series(rows: Rows, x: str) -> list[tuple[str, Any, str, list[GridRow]]]:
    """Name, colour, marker and rows of each line: one for each combination of what is varied beside `x`."""
    # Over a measured quantity the first setting is what moves along a line.
    along = (
        x if x in varied(points_of(rows)) else next((name for name in varied(points_of(rows)) if name != "cache"), x)
    )
    others = [name for name in varied(points_of(rows)) if name != along]
    lines: dict[str, list[GridRow]] = {}
    for row in rows:
        lines.setdefault(worded(row.axes, others) or str(row.axes["cache"]), []).append(row)
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
    handles, labels = axes.get_legend_handles_labels()
    # About 14 characters of this size go into an inch.
    columns = int(14 * figure.get_figwidth() / (max(map(len, labels)) + 8))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), max(1, columns)),
        fontsize="small",
        frameon=False,
    )


def _words(name: str) -> str:
    return {
        "cache_ratio": "cache ratio (%)",
        "prompt_tokens": "prompt length (tokens)",
        "concurrency": "requests at a time",
    }.get(name, name)


def _tick(value: object) -> str:
    return "null" if value is None else str(value)

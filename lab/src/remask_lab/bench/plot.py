"""The pictures of a bench: quality over speed, and speed beside saved work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from remask_lab.drawing import PointLabel, label, legend_below, new_figure, percent_bars, place_labels, save_figures
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row: TypeAlias = Mapping[str, Any]
"""What `run_bench` reports of one contender."""


def quality(row: Row) -> float:
    """The accuracy of a row, from 0 to 1; without right answers its agreement with the baseline."""
    accuracy = row["accuracy"]
    return float(row["agreement_with_none"] if accuracy is None else accuracy)


def work(row: Row) -> float:
    """The row-layers that a contender computes, as a share of its baseline's."""
    return 1 / float(row["work_ratio_to_none"])


def quality_bars(rows: Sequence[Row]) -> list[list[float]] | None:
    """The 95 % intervals of the rows' accuracies as error bars, in percent; None without right answers."""
    if rows[0]["accuracy"] is None:
        return None
    return percent_bars((row["accuracy"] for row in rows), (row["accuracy_interval"] for row in rows))


def plot_bench(record: Record, folder: str | Path) -> list[Path]:
    """Draw `bench-quality.png` and `bench-work.png` of a bench's `record` into `folder`, and return their paths.

    The folder is made if it does not exist. Raises `ConfigError` if it cannot be made.
    """
    rows: Sequence[Row] = record.data["results"]
    figures = {"bench-quality": _quality_figure(rows), "bench-work": _work_figure(rows)}
    return save_figures(figures, folder, record.about["model"])


def _quality_figure(rows: Sequence[Row]) -> Figure:
    """Quality over speed, with a point for each row."""
    has_accuracy = rows[0]["accuracy"] is not None
    measure = "accuracy" if has_accuracy else "agreement with no cache"
    figure = new_figure(
        f"{measure} over speed",
        5.0,
        how=f"horizontal bars: range over rounds{'; vertical bars: 95 % intervals' if has_accuracy else ''}",
    )
    axes = figure.subplots()
    labels: list[PointLabel] = []
    for index, row in enumerate(rows):
        point, color = (row["ratio_to_none"], 100 * quality(row)), f"C{index % 10}"
        axes.errorbar(
            *point, xerr=_speed_bars([row]), yerr=quality_bars([row]), fmt="o", color=color, capsize=2, linewidth=1
        )
        labels.append(PointLabel(str(row["cache"]), point, color, needed=True))
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(-5, 108)
    axes.grid(alpha=0.3)
    label(axes, "", "speed (times its baseline)", f"{measure} (%)")
    place_labels(figure, {axes: labels})
    return figure


def _work_figure(rows: Sequence[Row]) -> Figure:
    """Two bars for each row, speed and saved work. A cache's bookkeeping makes the first the shorter one."""
    figure = new_figure("speed, and work saved", 1.8 + 0.45 * len(rows))
    axes = figure.subplots()
    numbers = range(len(rows))
    speeds = [row["ratio_to_none"] for row in rows]
    work_ratios = [row["work_ratio_to_none"] for row in rows]
    upper, lower = [number - 0.2 for number in numbers], [number + 0.2 for number in numbers]
    axes.barh(upper, speeds, 0.4, xerr=_speed_bars(rows), capsize=2, label="speed (bars: rounds)")
    axes.barh(lower, work_ratios, 0.4, label="row-layers saved")
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_yticks(numbers, [str(row["cache"]) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    label(axes, "", "times its baseline")
    legend_below(figure, 2)
    return figure


def _speed_bars(rows: Sequence[Row]) -> list[list[float]]:
    """Error bars of speeds for `Axes.errorbar`: the distances to the least and the largest of the rounds."""
    speeds = [(row["ratio_to_none"], *row["ratio_range"]) for row in rows]
    return [[speed - low for speed, low, _ in speeds], [high - speed for speed, _, high in speeds]]

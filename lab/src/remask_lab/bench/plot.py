"""The pictures of a bench: quality over speed, and speed beside the work that is saved."""

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
    """Accuracy, or agreement with the baseline where there are no answers."""
    accuracy = row["accuracy"]
    return float(row["agreement_with_none"] if accuracy is None else accuracy)


def work(row: Row) -> float:
    """Row-layers that a contender computes, as a share of its baseline's."""
    return 1 / float(row["work_ratio_to_none"])


def quality_bars(rows: Sequence[Row]) -> list[list[float]] | None:
    """The rows' 95 % intervals as error bars, in percent; None where there are no answers."""
    if rows[0]["accuracy"] is None:
        return None
    return percent_bars((row["accuracy"] for row in rows), (row["accuracy_interval"] for row in rows))


def plot_bench(record: Record, folder: str | Path) -> list[Path]:
    """Draw `bench-quality.png` and `bench-work.png` of a bench's `record` into `folder`, and return their paths.

    The folder is made if it is not there. Raises `ConfigError` where it cannot be made.
    """
    rows: Sequence[Row] = record.data["results"]
    figures = {"bench-quality": _quality(rows), "bench-work": _work(rows)}
    return save_figures(figures, folder, record.about["model"])


def _quality(rows: Sequence[Row]) -> Figure:
    """A point for each row: the further right and up, the better."""
    answered = rows[0]["accuracy"] is not None
    measured = "accuracy" if answered else "agreement with no cache"
    figure = new_figure(
        f"{measured} over speed",
        5.0,
        how=f"horizontal bars: range over rounds{'; vertical bars: 95 % intervals' if answered else ''}",
    )
    axes = figure.subplots()
    labels: list[PointLabel] = []
    for index, row in enumerate(rows):
        name, point, color = str(row["cache"]), (row["ratio_to_none"], 100 * quality(row)), f"C{index % 10}"
        axes.errorbar(
            *point, xerr=_rounds([row]), yerr=quality_bars([row]), fmt="o", color=color, capsize=2, linewidth=1
        )
        labels.append(PointLabel(name, point, color, needed=True))
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(-5, 108)
    axes.grid(alpha=0.3)
    label(axes, "", "speed (times its baseline)", f"{measured} (%)")
    place_labels(figure, {axes: labels})
    return figure


def _work(rows: Sequence[Row]) -> Figure:
    """Two bars for each row: a cache whose speed falls short of the work that it saves pays for its bookkeeping."""
    figure = new_figure("speed, and work saved", 1.8 + 0.45 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(
        [place - 0.2 for place in places],
        [row["ratio_to_none"] for row in rows],
        0.4,
        xerr=_rounds(rows),
        capsize=2,
        label="speed (bars: rounds)",
    )
    axes.barh(
        [place + 0.2 for place in places], [row["work_ratio_to_none"] for row in rows], 0.4, label="row-layers saved"
    )
    axes.axvline(1, color="grey", linestyle=":", linewidth=1)
    axes.set_yticks(places, [str(row["cache"]) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    label(axes, "", "times its baseline")
    legend_below(figure, 2)
    return figure


def _rounds(rows: Sequence[Row]) -> list[list[float]]:
    """Error bars of speeds: their range over the rounds."""
    speeds = [(row["ratio_to_none"], *row["ratio_range"]) for row in rows]
    return [[speed - low for speed, low, _ in speeds], [high - speed for speed, _, high in speeds]]

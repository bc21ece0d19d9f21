"""Pictures of steps by policy: certainty and changes, drift within a block, cost, and every position's probability."""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import log_axis, new_figure, save_figures
from remask_lab.subjects.steps_report import Series, StepCurves, StepsReport

PANELS = 4  # policies whose positions are drawn one by one


def plot_steps(report: StepsReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {"steps-tokens": _tokens(report), "steps-cost": _cost(report), "steps-probability": _positions(report)}
    if any(np.isfinite(curves.v_drift).any() for curves in report.policies):
        figures["steps-drift"] = _drift(report)
    return save_figures(figures, folder, report.model)


def _tokens(report: StepsReport) -> Figure:
    """Entropy, largest probability and changes by pass (thesis, figures 4.2, 6.6 and A.1)."""
    figure = new_figure("certainty and token changes from pass to pass", width=10)
    left, middle, right = figure.subplots(1, 3)
    for index, curves in enumerate(report.policies):
        _line(left, index, curves, curves.entropy)
        _line(middle, index, curves, curves.probability)
        _line(right, index, curves, tuple(100 * rate for rate in curves.change_rate))
    left.set_ylabel("mean entropy (nats)")
    left.set_title("uncertainty of the predicted positions", fontsize="medium")
    middle.set_ylabel("mean largest probability")
    middle.set_title("confidence in them", fontsize="medium")
    middle.set_ylim(0, 1.03)
    right.set_ylabel("share of the response (%)")
    right.set_title("tokens changed", fontsize="medium")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    _legend(figure)
    return figure


def _cost(report: StepsReport) -> Figure:
    """Row-layers and milliseconds by pass (thesis, figure 6.3)."""
    figure = new_figure("cost of each pass", width=9)
    left, right = figure.subplots(1, 2)
    for index, curves in enumerate(report.policies):
        _line(left, index, curves, curves.row_layers)
        _line(right, index, curves, curves.milliseconds)
    for axes, title, label, name in (
        (left, "work", "row-layers", "row_layers"),
        (right, "time, one request at a time", "milliseconds", "milliseconds"),
    ):
        log_axis(axes, "y", [value for curves in report.policies for value in getattr(curves, name)])
        axes.set_title(title, fontsize="medium")
        axes.set_ylabel(label)
    _legend(figure)
    return figure


def _drift(report: StepsReport) -> Figure:
    """Drift of the block within the block (thesis, figure A.2)."""
    figure = new_figure("drift of the current block by step within the block", width=9)
    for axes, side in zip(figure.subplots(1, 2, sharey=True), ("k", "v"), strict=True):
        for index, curves in enumerate(report.policies):
            # A logarithm of 0 would be drawn as a line to the bottom.
            _line(axes, index, curves, tuple(value or np.nan for value in getattr(curves, f"{side}_drift")))
        log_axis(axes, "y", [v for curves in report.policies for v in (*curves.k_drift, *curves.v_drift)])
        axes.set_title(side.upper(), fontsize="medium")
        axes.set_xlabel("step within the block, compared with the one before")
    figure.axes[0].set_ylabel("mean cosine distance")
    _legend(figure)
    return figure


def _positions(report: StepsReport) -> Figure:
    """Trajectories of the largest probability, a panel for each policy."""
    shown = report.policies[:PANELS]
    figure = new_figure("largest probability of each predicted position, first request", width=3.2 * len(shown) + 1.4)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, curves in zip(panels, shown, strict=True):
        table = np.array(curves.trajectories, dtype=np.float64)
        edges = (0.5, table.shape[1] + 0.5, len(table) + 0.5, 0.5)
        axes.set_facecolor("#dddddd")
        image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto", extent=edges, interpolation="nearest")
        axes.set_title(curves.cache, fontsize="medium")
        axes.set_xlabel("pass")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("response position")
    figure.colorbar(image, ax=list(panels), label="probability (grey: not predicted)", shrink=0.9)
    return figure


def _line(axes: Axes, index: int, curves: StepCurves, values: Series) -> None:
    color = colormaps["tab10"](index % 10)
    # Policies may give the same numbers: lines drawn earlier are wider, so that they show on both sides.
    width = max(1.2, 4.5 - 1.4 * index)
    axes.plot(range(1, len(values) + 1), values, ".-", color=color, linewidth=width, markersize=4, label=curves.cache)
    axes.set_xlabel("pass")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.grid(alpha=0.3)


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize="small", frameon=False
    )

"""Pictures of a drift report: by region, pass by pass, token dynamics, and correlations between layers."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import K_COLOR, V_COLOR, log_axis, new_figure, save_figures
from remask_lab.subjects.report import DriftReport, Series, words

_COLORS = {
    "bias": "#7f7f7f",
    "prompt": "#8c564b",
    "rest_past": "#9467bd",
    "previous": "#1f77b4",
    "current": "#d62728",
    "next": "#ff7f0e",
    "rest_future": "#2ca02c",
    "trailing": "#17becf",
}


def plot_drift(report: DriftReport, folder: str | Path) -> list[Path]:
    """Draw four PNG files into `folder`, which is made if it is not there, and return their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {
        "drift-regions": _regions(report),
        "drift-passes": _passes(report),
        "drift-tokens": _tokens(report),
        "drift-layers": _layers(report),
    }
    return save_figures(figures, folder, report.subject.model)


def _regions(report: DriftReport) -> Figure:
    """Bars of drift and of attention mass."""
    figure = new_figure("drift and attention mass by region")
    left, right = figure.subplots(1, 2)
    names = [name for name in report.regions if name != "bias"]  # a weight: its drift is 0 by construction
    places = np.arange(len(names))
    means = [report.regions[name] for name in names]
    for side, color, shift in (("K", K_COLOR, -0.2), ("V", V_COLOR, 0.2)):
        whole = [m.k_drift if side == "K" else m.v_drift for m in means]
        within = [m.k_within if side == "K" else m.v_within for m in means]
        left.barh(places + shift, whole, 0.36, color=color, label=f"{side}, all passes")
        left.plot(within, places + shift, "|", color="black", markersize=9, markeredgewidth=2)
    left.plot([], [], "|", color="black", markersize=9, markeredgewidth=2, label="within a block")
    left.set_yticks(places, [words(name) for name in names])
    left.invert_yaxis()
    log_axis(left, "x", [x for m in means for x in (m.k_drift, m.v_drift, m.k_within, m.v_within)])
    left.set_title("K/V drift", fontsize="medium")
    left.set_xlabel("mean cosine distance per pass")
    left.grid(axis="x", alpha=0.3)
    left.set_axisbelow(True)
    shares = {name: 100 * m.attention for name, m in report.regions.items()}
    colors = [_COLORS[name] for name in shares]
    bars = right.barh([words(name) for name in shares], list(shares.values()), color=colors)
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize="small")
    right.invert_yaxis()
    right.set_xlim(0, 1.15 * max(shares.values()))
    right.set_title("attention of the current block", fontsize="medium")
    right.set_xlabel("attention mass (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize="small", frameon=False)
    return figure


def _passes(report: DriftReport) -> Figure:
    """Drift and attention over passes, one line a region."""
    figure = new_figure("drift and attention mass from pass to pass", height=5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    both = {
        name: tuple((k + v) / 2 for k, v in zip(series, report.v_drift[name], strict=True))
        for name, series in report.k_drift.items()
    }
    # A logarithm of 0 would be drawn as a line to the bottom.
    moving = {name: tuple(x or math.nan for x in series) for name, series in both.items() if name != "bias"}
    _lines(upper, moving)
    log_axis(upper, "y", [value for series in moving.values() for value in series])
    upper.set_title("drift, mean of K and V (none where it is 0)", fontsize="medium")
    upper.set_ylabel("cosine distance per pass")
    _lines(lower, {name: tuple(100 * x for x in series) for name, series in report.attention.items()})
    lower.set_title("attention of the current block", fontsize="medium")
    lower.set_ylabel("attention mass (%)")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("pass")
    lower.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    figure.legend(
        *lower.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False, title="region"
    )
    return figure


def _tokens(report: DriftReport) -> Figure:
    """Entropy and token changes over passes."""
    figure = new_figure("entropy and token changes from pass to pass")
    left, right = figure.subplots(1, 2)
    passes = range(1, len(report.entropy) + 1)
    left.plot(passes, report.entropy, ".-", color=K_COLOR, linewidth=1.2, markersize=4)
    left.set_title("uncertainty of the predicted positions", fontsize="medium")
    left.set_ylabel("mean entropy (nats)")
    right.plot(passes, [100 * rate for rate in report.change_rate], ".-", color=V_COLOR, linewidth=1.2, markersize=4)
    right.set_title("tokens changed", fontsize="medium")
    right.set_ylabel("share of the response (%)")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("pass")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(alpha=0.3)
    return figure


def _layers(report: DriftReport) -> Figure:
    """Pearson's r of drift between layers, K beside V."""
    figure = new_figure(f"correlation of drift between layers (K with V: r = {report.kv_correlation:.2f})")
    panels = figure.subplots(1, 2)
    sides = (("K", report.k_layers, report.k_layers_mean), ("V", report.v_layers, report.v_layers_mean))
    edges = (0.5, report.subject.layers + 0.5)
    for axes, (side, r, mean) in zip(panels, sides, strict=True):
        image = axes.imshow(np.array(r), vmin=-1, vmax=1, cmap="RdBu_r", extent=(*edges, *edges[::-1]))
        axes.set_title(f"{side}: mean off the diagonal {mean:.2f}", fontsize="medium")
        axes.set_xlabel("layer")
        axes.set_ylabel("layer")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
    figure.colorbar(image, ax=panels, label="Pearson's r", shrink=0.85)
    return figure


def _lines(axes: Axes, series: Mapping[str, Series]) -> None:
    for name, values in series.items():
        passes = range(1, len(values) + 1)
        axes.plot(passes, values, ".-", color=_COLORS[name], linewidth=1.2, markersize=5, label=words(name))
    axes.grid(alpha=0.3)

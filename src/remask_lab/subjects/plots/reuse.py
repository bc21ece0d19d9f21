"""Pictures of reuse: K/V similarity in deep layers under three settings, and what plain reuse gains and destroys."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.collapse_report import Row, shares
from remask_lab.subjects.reuse_report import ANOTHER, ONCE, PERIODIC, SETTINGS, ReuseReport

_STYLES: Mapping[str, tuple[str, str]] = {ANOTHER: ("black", ".-"), ONCE: (K_COLOR, ".-"), PERIODIC: (V_COLOR, ".--")}
_BARS = ("#7f7f7f", V_COLOR, K_COLOR)


def plot_reuse(report: ReuseReport, rows: Sequence[Row], folder: str | Path, model: str) -> list[Path]:
    """Draw `reuse-deep.png` and `reuse-collapse.png` into `folder`, which is made if it is not there; their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    return save_figures({"reuse-deep": _deep(report), "reuse-collapse": _collapse(rows)}, folder, model)


def _deep(report: ReuseReport) -> Figure:
    figure = new_figure(f"prefix K/V that deep layers read, against fresh ones ({report.requests} requests)")
    left, right = figure.subplots(1, 2, sharey=True)
    labels = {
        ANOTHER: "from another request",
        ONCE: "computed once",
        PERIODIC: f"refreshed every {report.refresh_interval} steps",
    }
    for name in SETTINGS:
        color, line = _STYLES[name]
        label = f"{labels[name]}: {report.deep_mean[name]:.3f}"
        left.plot(range(1, report.steps + 1), report.deep[name], line, color=color, linewidth=1.4, label=label)
        by_layer = np.nanmean(np.array(report.similarity[name]), axis=1)
        right.plot(range(1, report.layers + 1), by_layer, line, color=color, linewidth=1.4)
    left.set_title("mean of the layers above depth", fontsize="medium")
    left.set_xlabel("denoising step")
    left.set_ylabel("cosine similarity")
    right.set_title("by layer, mean over steps", fontsize="medium")
    right.set_xlabel("layer")
    depths = sorted(set(report.depth))
    for depth in depths:
        right.axvline(depth + 0.5, color="gray", linestyle=":", linewidth=1)
    right.plot([], [], ":", color="gray", label=f"depth {' and '.join(map(str, depths))}")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", ncols=4, fontsize="small", frameon=False)
    return figure


def _collapse(rows: Sequence[Row]) -> Figure:
    figure = new_figure("plain reuse of a shared prefix in all layers, beside BiCache")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    names = [row["cache"] for row in rows]
    bars = left.bar(names, [row["throughput_tok_s"] for row in rows], color=_BARS)
    left.bar_label(bars, [f"{row['ratio_to_none']:.2f}x" for row in rows], fontsize="small")
    left.margins(y=0.15)
    left.set_title("throughput", fontsize="medium")
    left.set_ylabel("tokens per second")
    kinds = list(shares(rows[0]))
    places = np.arange(len(kinds))
    for index, (row, color) in enumerate(zip(rows, _BARS, strict=True)):
        values = [100 * share for share in shares(row).values()]
        bars = right.bar(places + 0.27 * (index - 1), values, 0.25, color=color, label=row["cache"])
        right.bar_label(bars, fmt="%.0f", fontsize="x-small")
    right.set_xticks(places, kinds)
    right.set_ylim(0, 112)
    right.set_title("quality, and by part of the system prompt" if len(kinds) > 1 else "quality", fontsize="medium")
    right.set_ylabel("share (%)")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize="small", frameon=False
    )
    return figure

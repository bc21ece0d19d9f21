"""Pictures of K/V around decoding: between all passes, token by token, aligned curves, and by layer."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import K_COLOR, V_COLOR, log_axis, new_figure, save_figures
from remask_lab.subjects.decoding_report import MEASURES, SIDES, DecodingReport


def plot_decoding(report: DecodingReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Where no token could be followed there is nothing to draw. Raises `ConfigError` where the folder cannot be made.
    """
    figures = {}
    if report.tokens:
        figures = {
            "decoding-passes": _passes(report),
            "decoding-tokens": _tokens(report),
            "decoding-aligned": _aligned(report),
            "decoding-layers": _layers(report),
        }
    return save_figures(figures, folder, report.model)


def _passes(report: DecodingReport) -> Figure:
    """Similarity between any two passes (figure 2a)."""
    figure = new_figure("similarity of the response's K and V between passes, mean over layers and positions", width=9)
    tables = [np.array(report.similarity[side]) for side in SIDES]
    low = min(float(np.nanmin(table)) for table in tables)
    ticks = range(0, len(report.steps), max(1, len(report.steps) // 8))
    for axes, side, table in zip(figure.subplots(1, 2), SIDES, tables, strict=True):
        image = axes.imshow(table, vmin=low, vmax=1, cmap="viridis")
        axes.set_title(side.upper(), fontsize="medium")
        axes.set_xticks(ticks, [str(report.steps[tick]) for tick in ticks])
        axes.set_yticks(ticks, [str(report.steps[tick]) for tick in ticks])
        axes.set(xlabel="pass", ylabel="pass")
    figure.colorbar(image, ax=figure.axes[:2], label="cosine similarity", shrink=0.9)
    return figure


def _tokens(report: DecodingReport) -> Figure:
    """Every token's move from pass to pass, tokens in the order of decoding (figure 2b)."""
    figure = new_figure("moves of the first request's tokens, mean over layers", width=9, height=4.4)
    tables = [np.array(report.moves[side], dtype=np.float64) for side in SIDES]
    for axes, side, table in zip(figure.subplots(1, 2, sharey=True), SIDES, tables, strict=True):
        edges = (1.5, table.shape[1] + 1.5, len(table) + 0.5, 0.5)
        image = axes.imshow(table, cmap="magma", aspect="auto", extent=edges, interpolation="nearest", vmin=0)
        # What a pass decodes is seen by the next one, whose row of moves leads to it.
        axes.plot(
            [step + 1 for step in report.decoded],
            range(1, len(table) + 1),
            "o",
            markersize=4,
            markerfacecolor="none",
            markeredgecolor="#4fc3f7",
            label="first pass that sees the token",
        )
        axes.set_xlim(edges[0], edges[1])
        axes.set_title(side.upper(), fontsize="medium")
        axes.set_xlabel("pass, compared with the one before")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
        figure.colorbar(image, ax=axes, label="Euclidean distance", shrink=0.9)
    figure.axes[0].set_ylabel("response token, in decoding order")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    return figure


def _aligned(report: DecodingReport) -> Figure:
    """Mean curves around decoding (figure 2c)."""
    figure = new_figure(f"moves of K and V around decoding, mean of {report.tokens} tokens and all layers", width=9)
    for axes, measure in zip(figure.subplots(1, 2), MEASURES, strict=True):
        for side, color in zip(SIDES, (K_COLOR, V_COLOR), strict=True):
            values = report.aligned[f"{side} {measure}"].mean
            axes.plot(report.offsets, values, ".-", color=color, linewidth=1.3, label=side.upper())
        axes.axvline(0, color="grey", linestyle=":", linewidth=1)
        if measure == "cosine":
            log_axis(axes, "y", [x for side in SIDES for x in report.aligned[f"{side} {measure}"].mean])
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("passes from decoding (0: the token appears)")
        axes.set_ylabel("cosine distance" if measure == "cosine" else "Euclidean distance")
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _layers(report: DecodingReport) -> Figure:
    """The same by layer."""
    figure = new_figure("moves of K and V around decoding by layer", width=9)
    for axes, side in zip(figure.subplots(1, 2, sharey=True), SIDES, strict=True):
        table = np.array(report.aligned[f"{side} cosine"].layers, dtype=np.float64)
        edges = (report.offsets[0] - 0.5, report.offsets[-1] + 0.5, report.layers + 0.5, 0.5)
        # What moves less than a ten thousandth of the most is shown as that.
        shown = np.log10(np.maximum(table, 1e-4 * np.nanmax(table)))
        image = axes.imshow(shown, cmap="magma", aspect="auto", extent=edges, interpolation="nearest")
        axes.set_title(side.upper(), fontsize="medium")
        axes.set_xlabel("passes from decoding (0: the token appears)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(9, integer=True))
        figure.colorbar(image, ax=axes, label="log10 of cosine distance", shrink=0.9)
    figure.axes[0].set_ylabel("layer")
    return figure

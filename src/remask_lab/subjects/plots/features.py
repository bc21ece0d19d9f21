"""Pictures of features from pass to pass: maps over steps and positions, layers, and changes set against each other."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.features_report import FEATURES, PAIRS, WORDS, FeaturesReport

_COLORS = {"k": K_COLOR, "v": V_COLOR, "attention": "#2ca02c", "ffn": "#9467bd"}
FLOOR = 1e-8  # changes below it are rounding, and drawn at it


def plot_features(report: FeaturesReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Without two passes to compare there is nothing to draw. Raises `ConfigError` where the folder cannot be made.
    """
    if not report.maps["k"]:
        return save_figures({}, folder, report.model)
    figures = {"features-maps": _maps(report), "features-layers": _layers(report), "features-changes": _changes(report)}
    return save_figures(figures, folder, report.model)


def _maps(report: FeaturesReport) -> Figure:
    """Similarity over steps and positions, a row of panels for each feature (dLLM-Cache, figure 1)."""
    figure = new_figure("similarity between adjacent passes, mean over layers", height=7.2, width=9)
    tables = {name: np.array(report.maps[name], dtype=np.float64) for name in FEATURES}
    low = min(float(np.nanmin(table)) for table in tables.values())
    panels = figure.subplots(len(tables), 2, sharex="col", sharey=True)
    split, passes = report.prompt_tokens, len(tables["k"])
    for row, (name, table) in zip(panels, tables.items(), strict=True):
        for axes, first, last in ((row[0], 0, split), (row[1], split, table.shape[1])):
            image = axes.imshow(
                table[:, first:last],
                vmin=low,
                vmax=1,
                cmap="viridis",
                aspect="auto",
                extent=(first - 0.5, last - 0.5, passes + 1.5, 1.5),
                interpolation="nearest",
            )
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        row[0].set_ylabel(WORDS[name])
    panels[0][0].set_title("prompt", fontsize="medium")
    panels[0][1].set_title("response and what follows it", fontsize="medium")
    figure.supxlabel("position", fontsize="medium")
    figure.supylabel("pass, compared with the one before", fontsize="medium")
    figure.colorbar(image, ax=list(panels.flat), label="cosine similarity", shrink=0.9)
    return figure


def _layers(report: FeaturesReport) -> Figure:
    """Mean similarity by layer, prompt and response."""
    figure = new_figure("similarity between adjacent passes by layer")
    layers = range(1, report.layers + 1)
    for axes, region in zip(figure.subplots(1, 2, sharey=True), ("prompt", "response"), strict=True):
        for name in FEATURES:
            values = getattr(report.means[name], f"{region}_layers")
            axes.plot(layers, values, ".-", color=_COLORS[name], linewidth=1.3, label=WORDS[name])
        axes.set_title(f"{region} positions", fontsize="medium")
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean cosine similarity")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
    return figure


def _changes(report: FeaturesReport) -> Figure:
    """Late changes over early ones, a point for each position, layer and pair of passes (dLLM-Cache, figure 2)."""
    figure = new_figure("what the change of K and V tells of the outputs, response positions", height=6.4, width=8)
    values = {name: np.maximum(np.array(report.sample[name]), FLOOR) for name in FEATURES}
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, (early, late), pair in zip(panels, PAIRS, report.foresight, strict=True):
        axes.loglog(values[early], values[late], ".", color=_COLORS[early], markersize=2.5, alpha=0.35)
        axes.set_title(f"r = {pair.correlation:.2f}, overlap {100 * pair.overlap:.0f} %", fontsize="medium")
        axes.set_xlabel(f"change of {WORDS[early]}")
        axes.set_ylabel(f"change of {WORDS[late]}")
        axes.grid(alpha=0.3)
    figure.supxlabel(
        "cosine distances from one pass to the next, in one layer; below 1e-8 drawn there", fontsize="small"
    )
    return figure

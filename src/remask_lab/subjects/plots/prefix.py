"""Picture of a shared prefix's similarity: a heatmap over layers and steps, and its spread."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.prefix_report import PrefixSimilarity


def plot_prefix(report: PrefixSimilarity, folder: str | Path, model: str) -> list[Path]:
    """Draw `prefix-similarity.png` into `folder`, which is made if it is not there, and return its path.

    Raises `ConfigError` where the folder cannot be made.
    """
    return save_figures({"prefix-similarity": _heatmap(report)}, folder, model)


def _heatmap(report: PrefixSimilarity) -> Figure:
    figure = new_figure(
        f"K/V of a shared prefix in its canvas against the prefix alone ({report.requests} requests, "
        f"r = {100 * report.prefix_tokens / report.canvas_tokens:.0f} %)"
    )
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    layers = len(report.similarity)
    image = left.imshow(
        np.array(report.similarity),
        aspect="auto",
        cmap="viridis",
        interpolation="nearest",
        extent=(0.5, report.steps + 0.5, layers + 0.5, 0.5),
    )
    if 0 < report.shallow < layers:
        left.axhline(report.shallow + 0.5, color="white", linestyle="--", linewidth=1.5)
    left.set_title(f"mean similarity; dashed: depth {report.shallow}, above {report.tau:g} always", fontsize="medium")
    left.set_xlabel("denoising step")
    left.set_ylabel("layer")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    figure.colorbar(image, ax=left, label="cosine similarity")
    places = np.arange(1, layers + 1)
    right.barh(places - 0.2, report.over_steps, 0.36, color=K_COLOR, label="over steps")
    right.barh(places + 0.2, report.over_requests, 0.36, color=V_COLOR, label="over requests")
    right.set_title("spread", fontsize="medium")
    right.set_xlabel("standard deviation of the similarity")
    right.xaxis.set_major_locator(MaxNLocator(4))
    right.grid(axis="x", alpha=0.3)
    right.set_axisbelow(True)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize="small", frameon=False
    )
    return figure

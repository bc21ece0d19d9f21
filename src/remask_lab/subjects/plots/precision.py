"""Picture of what rounding changes: tokens and responses that differ."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures


def plot_precision(shares: Mapping[str, tuple[float, float]], folder: str | Path, model: str) -> list[Path]:
    """Draw the shares of tokens and of responses that differ, by arithmetic, into `folder`; returns the path.

    Raises `ConfigError` where the folder cannot be made.
    """
    figure = new_figure("what other arithmetic changes", height=1.6 + 0.55 * len(shares), width=8.5)
    axes = figure.subplots()
    places = np.arange(len(shares))
    for column, (label, color) in enumerate((("tokens", V_COLOR), ("responses", K_COLOR))):
        values = [100 * pair[column] for pair in shares.values()]
        bars = axes.barh(places + (column - 0.5) * 0.38, values, 0.34, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")
    axes.set_yticks(places, list(shares))
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.0, *(115 * value for pair in shares.values() for value in pair)))
    axes.set_xlabel("share that differs (%), from one request at a time in the same dtype, or from the first dtype")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return save_figures({"precision": figure}, folder, model)

"""Picture of attention leakage over the prefix ratio, and of the depth that it guarantees."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.leakage_report import LeakageReport


def plot_leakage(report: LeakageReport, folder: str | Path, model: str) -> list[Path]:
    """Draw `leakage.png` into `folder`, which is made if it is not there, and return its path.

    Raises `ConfigError` where the folder cannot be made.
    """
    return save_figures({"leakage": _figure(report)}, folder, model)


def _figure(report: LeakageReport) -> Figure:
    figure = new_figure(
        f"attention leakage and guaranteed depth (tau = {report.tau:g}, {report.samples} requests per ratio)"
    )
    left, right = figure.subplots(1, 2)
    ratios, rows = list(report.ratios), list(report.ratios.values())
    shares = 100 * np.array([row.leakage for row in rows])
    left.fill_between(ratios, shares.min(axis=1), shares.max(axis=1), color=K_COLOR, alpha=0.2, label="range of layers")
    left.plot(ratios, shares.mean(axis=1), ".-", color=K_COLOR, label="mean of layers")
    left.plot(ratios, [100 - ratio for ratio in ratios], ":", color="gray", label="1 - r")
    left.set_title("attention of prefix rows to the rest", fontsize="medium")
    left.set_ylabel("share (%)")
    left.set_ylim(bottom=0)
    right.plot(ratios, [row.mean_depth for row in rows], ".-", color="black", label="mean of requests")
    right.plot(ratios, [row.depth for row in rows], ".--", color="black", label="least of requests")
    right.plot(ratios, [row.deviation_depth for row in rows], ".-", color=K_COLOR, label="bound from deviation")
    right.plot(ratios, [row.guaranteed_depth for row in rows], ".-", color=V_COLOR, label="bound from leakage")
    right.set_title("depth: measured and guaranteed", fontsize="medium")
    right.set_ylabel(f"depth (of {report.layers} layers)")
    right.set_ylim(0, report.layers * 1.05)
    for axes in (left, right):
        axes.set_xlabel("prefix ratio r (% of the canvas)")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", ncols=4, fontsize="small", frameon=False)
    return figure

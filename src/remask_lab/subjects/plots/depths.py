"""Pictures of what depth depends on: task and ratio; number of requests and system prompt."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remask_lab.drawing import K_COLOR, V_COLOR, new_figure, save_figures
from remask_lab.subjects.depth_report import DepthReport

_COLORS = (K_COLOR, V_COLOR, "#2ca02c", "#7f7f7f", "#9467bd", "#ff7f0e", "#17becf")


def plot_depths(report: DepthReport, folder: str | Path, model: str) -> list[Path]:
    """Draw `depth-tasks.png` and `depth-stability.png` into `folder`, which is made if it is not there; their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    return save_figures({"depth-tasks": _tasks(report), "depth-stability": _stability(report)}, folder, model)


def _tasks(report: DepthReport) -> Figure:
    figure = new_figure(f"depth of reuse by task and ratio (tau = {report.tau:g}, {report.samples} requests per ratio)")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3), sharey=True)
    ratio = report.shown
    for index, task in enumerate(report.tasks):
        color = _COLORS[index % len(_COLORS)]
        left.bar(index, task.mean[ratio], yerr=task.spread[ratio], color=color, capsize=3)
        right.plot(list(task.mean), list(task.mean.values()), ".-", color=color, linewidth=1.3, label=task.task)
    left.set_xticks(range(len(report.tasks)), [task.task.replace(" ", "\n") for task in report.tasks], fontsize="small")
    left.set_title(f"r = {ratio} % (bars: spread over requests)", fontsize="medium")
    left.set_ylabel(f"mean depth (of {report.layers} layers)")
    left.set_ylim(0, report.layers * 1.05)
    right.set_title("over the prefix ratio", fontsize="medium")
    right.set_xlabel("prefix ratio r (% of the canvas)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=5, fontsize="small", frameon=False
    )
    return figure


def _stability(report: DepthReport) -> Figure:
    figure = new_figure(f"what moves the depth on {report.tasks[0].task}", width=10.0)
    distance, seconds, prompts = figure.subplots(1, 3)
    sizes = [step.samples for step in report.convergence]
    distance.plot(sizes, [step.distance for step in report.convergence], ".-", color=K_COLOR, label="mean depths")
    distance.plot(sizes, [step.table_distance for step in report.convergence], ".--", color=V_COLOR, label="table")
    distance.set_title("change since half of N", fontsize="medium")
    distance.set_ylabel("L1 distance (layers per ratio)")
    seconds.plot(sizes, [step.seconds for step in report.convergence], ".-", color=K_COLOR)
    seconds.set_title("profiling time", fontsize="medium")
    seconds.set_ylabel("seconds")
    for axes in (distance, seconds):
        _sizes(axes, sizes)
    spread = report.system_prompts.spread
    places = np.arange(len(spread))
    prompts.bar(places, list(spread.values()), color=K_COLOR)
    prompts.axhline(float(np.mean(list(spread.values()))), color="black", linestyle=":", label="mean over ratios")
    shown = places[:: max(1, len(places) // 8)]
    prompts.set_xticks(shown, [str(list(spread)[place]) for place in shown])
    prompts.set_title(f"{report.system_prompts.prompts} system prompts", fontsize="medium")
    prompts.set_xlabel("prefix ratio r (%)")
    prompts.set_ylabel("standard deviation of depth (layers)")
    for axes in (distance, seconds, prompts):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.legend(loc="outside lower left", ncols=4, fontsize="small", frameon=False)
    return figure


def _sizes(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("N, requests per ratio")

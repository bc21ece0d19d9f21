"""The picture of a profile: steps and operations under the machine's roofline, and the time of each operation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from remask.machine.disk import whole_file
from remask_lab.drawing import DPI, new_figure
from remask_lab.ops.operations import OperationProfile, Profile, StepProfile
from remask_lab.ops.peaks import Peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "projections": "#1f77b4",
    "attention": "#d62728",
    "mlp": "#2ca02c",
    "head": "#9467bd",
    "norms": "#8c564b",
    "selection": "#ff7f0e",
    "watch": "#e377c2",
    "sampling": "#17becf",
    "packing": "#bcbd22",
    "rest": "#7f7f7f",
}
_GIGA = 1e9


def plot_roofline(profile: Profile, peaks: Peaks, title: str, path: str | Path) -> None:
    """Draw `profile` into the PNG file `path`, under the roofline of a machine with these `peaks`.

    Raises `ConfigError` where the file cannot be written.
    """
    figure = new_figure(title, 5.0, 10.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _roofline(left, profile, peaks)
    _times(right, profile)
    _legend(figure, left)
    with whole_file("the picture", path) as draft:
        figure.savefig(draft, dpi=DPI, format="png")


def _roofline(axes: Axes, profile: Profile, peaks: Peaks) -> None:
    operations = {name: each for name, each in profile.operations.items() if each.flops and each.seconds}
    points: list[StepProfile | OperationProfile] = [*profile.steps, *operations.values()]
    known = [each.intensity for each in points if each.intensity]
    low, high = min([*known, peaks.ridge]) / 3, max([*known, peaks.ridge]) * 3
    intensities = np.geomspace(low, high, 200)
    roof = [peaks.roof(float(intensity)) / _GIGA for intensity in intensities]
    axes.plot(intensities, roof, color="black", linewidth=1.6, label="roofline (measured)")
    axes.axvline(peaks.ridge, color="black", linewidth=0.8, linestyle=":", label=f"ridge: {peaks.ridge:.1f}")
    steps = [step for step in profile.steps if step.flops_s]
    axes.scatter(
        [step.intensity for step in steps],
        [step.flops_s / _GIGA for step in steps],
        s=22,
        color="black",
        alpha=0.35,
        linewidths=0,
        label="steps",
    )
    for name, each in operations.items():
        axes.plot(each.intensity, each.flops_s / _GIGA, "D", color=_COLORS[name], markersize=8, label=name)
    reached = [each.flops_s / _GIGA for each in points if each.flops_s]
    axes.set(
        xscale="log", yscale="log", xlim=(low, high), ylim=(min([*reached, *roof]) / 2, max([*reached, *roof]) * 2)
    )
    axes.set_title("roofline", fontsize="medium")
    axes.set_xlabel("arithmetic intensity (FLOP a byte)")
    axes.set_ylabel("GFLOP/s")
    axes.grid(which="major", alpha=0.3)


def _times(axes: Axes, profile: Profile) -> None:
    spent = {name: each for name, each in profile.operations.items() if each.seconds}
    steps = len(profile.steps)
    bars = axes.barh(list(spent), [1e3 * each.seconds / steps for each in spent.values()])
    for bar, name in zip(bars, spent, strict=True):
        bar.set_color(_COLORS[name])
    axes.bar_label(bars, [f"{100 * each.share:.1f} %" for each in spent.values()], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2e3 * max(each.seconds for each in spent.values()) / steps)
    axes.set_title(f"time (instruments add {100 * profile.overhead:.1f} %)", fontsize="medium")
    axes.set_xlabel("ms a step")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")

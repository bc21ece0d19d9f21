"""The machine's roofline, measured with a matrix product and a copy, and the picture of a profile below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from remask.machine.disk import whole_file
from remask_lab.drawing import DPI, label, new_panels
from remask_lab.ops.clock import time_call
from remask_lab.ops.operations import OperationProfile, Profile, StepProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRIES = 5
# Rows of the square matrices that are multiplied, and bytes that are copied, more than any cache holds.
SIZES = {"cpu": (1536, 1 << 28), "cuda": (8192, 1 << 30)}
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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The machine's two limits: FLOPs a second of a matrix product, and bytes a second of a copy."""

    flops_s: float
    bytes_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the FLOPs, and below which the bytes, are the limit."""
        return self.flops_s / self.bytes_s

    def roof(self, intensity: float) -> float:
        """Attainable FLOPs a second at `intensity` FLOPs a byte, by the roofline model."""
        return min(self.flops_s, intensity * self.bytes_s)


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Time a few square matrix products and a few copies larger than any cache, and take the fastest of each.

    A copy of n bytes counts as 2 n, as it reads and writes them. Other shapes may be a little faster than these peaks.
    """
    size, copy_bytes = SIZES["cuda" if device.type == "cuda" else "cpu"]
    left, right = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = _best(lambda: torch.mm(left, right, out=product), device)
    copy = _best(lambda: target.copy_(source), device)
    return Peaks(flops_s=2 * size**3 / multiply, bytes_s=2 * copy_bytes / copy)


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of `TRIES` calls, after a call that warms up."""
    time_call(call, device)
    return min(time_call(call, device) for _ in range(TRIES))


def plot_roofline(profile: Profile, peaks: Peaks, title: str, path: str | Path) -> None:
    """Draw `profile` into the PNG file `path`, below the roofline of a machine with these `peaks`.

    Raises `ConfigError` where the file cannot be written.
    """
    figure, (left, right) = new_panels(title, 2, height=5.0, width=10.5, width_ratios=(3, 2))
    _roofline(left, profile, peaks)
    _times(right, profile)
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize="small")
    with whole_file("the picture", path) as draft:
        figure.savefig(draft, dpi=DPI, format="png")


def _roofline(axes: Axes, profile: Profile, peaks: Peaks) -> None:
    """Draw steps and operations as points of intensity and FLOPs a second, below the roofline."""
    operations = {name: item for name, item in profile.operations.items() if item.flops and item.seconds}
    points: list[StepProfile | OperationProfile] = [*profile.steps, *operations.values()]
    point_intensities = [*(operation.intensity for operation in points if operation.intensity), peaks.ridge]
    low, high = min(point_intensities) / 3, max(point_intensities) * 3
    intensities = np.geomspace(low, high, 200)
    roof = [peaks.roof(float(intensity)) / _GIGA for intensity in intensities]
    axes.plot(intensities, roof, color="black", linewidth=1.6, label="roofline (measured)")
    axes.axvline(peaks.ridge, color="black", linewidth=0.8, linestyle=":", label=f"ridge: {peaks.ridge:.1f}")
    steps = [step for step in profile.steps if step.flops_s]
    x, y = [step.intensity for step in steps], [step.flops_s / _GIGA for step in steps]
    axes.scatter(x, y, s=22, color="black", alpha=0.35, linewidths=0, label="steps")
    for name, operation in operations.items():
        axes.plot(operation.intensity, operation.flops_s / _GIGA, "D", color=_COLORS[name], markersize=8, label=name)
    rates = [*(operation.flops_s / _GIGA for operation in points if operation.flops_s), *roof]
    label(axes, "roofline", "arithmetic intensity (FLOP a byte)", "GFLOP/s", grid="both")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(rates) / 2, max(rates) * 2))


def _times(axes: Axes, profile: Profile) -> None:
    """Draw each operation's milliseconds a step and its share as bars."""
    operations = {name: operation for name, operation in profile.operations.items() if operation.seconds}
    milliseconds = [1e3 * operation.seconds / len(profile.steps) for operation in operations.values()]
    bars = axes.barh(list(operations), milliseconds, color=[_COLORS[name] for name in operations])
    shares = [f"{100 * operation.share:.1f} %" for operation in operations.values()]
    axes.bar_label(bars, shares, padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(milliseconds))
    label(axes, f"time (instruments add {100 * profile.overhead:.1f} %)", "ms a step", grid="x")

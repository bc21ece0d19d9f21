"""Picture of a similarity table: depth over prefix ratio, and the similarities that it rests on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remask.errors import ConfigError
from remask.machine.disk import whole_file
from remask_lab.drawing import DPI, K_COLOR, V_COLOR, check_drawing, label, new_panels
from remask_lab.similarity.table import SimilarityTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
CURVES = 6  # ratios whose similarities are drawn


def check_target(path: str | Path) -> Path:
    """The path of a picture. Raises `ConfigError` unless its suffix is one of `SUFFIXES` and its folder exists."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a picture's name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {str(target.parent)!r} to put {target.name!r} into")
    return target


def depth_picture(path: str | Path) -> Callable[[SimilarityTable], None]:
    """A function that draws a table into the file `path`. Raises `ConfigError` at once where that cannot work."""
    check_drawing()
    return partial(plot_depth, path=check_target(path))


def plot_depth(table: SimilarityTable, path: str | Path) -> None:
    """Draw depth b over prefix ratio r, and the table's mean similarities over layers if it has them, into a file.

    Raises `ConfigError` as `check_target` does.
    """
    target = check_target(path)
    panels = 2 if table.curves else 1
    conditions = f"tau = {table.tau:g}, {table.samples} requests per ratio, {table.definition} similarity; {table.rule}"
    title = f"Depths of {Path(table.model).name}{': ' if table.curves else chr(10)}{conditions}"
    figure, axes = new_panels(title, panels, width=4.9 * panels)
    figure.suptitle(title, fontsize="medium")
    _depths(axes[0], table)
    if table.curves:
        _similarities(axes[1], table)
    # The date would make every drawing of the same table another file.
    metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
    with whole_file("the picture", target) as draft:
        figure.savefig(draft, dpi=DPI, metadata=metadata)


def _depths(axes: Axes, table: SimilarityTable) -> None:
    """Draw the lookup as steps, and the mean depth of single requests as points."""
    from matplotlib.ticker import MaxNLocator

    ratios, means = range(101), table.request_depths
    depths = [table.lookup.depth(ratio, 100) for ratio in ratios]
    axes.step(ratios, depths, where="post", color=K_COLOR, linewidth=2, label="depth b")
    if means:
        x, y = list(means), list(means.values())
        axes.plot(x, y, "o", color=V_COLOR, markersize=4, label="mean of single requests")
    title, y_label = "How deep a shared prefix is reused", f"depth b (of {table.layers} layers)"
    label(axes, title, "prefix ratio r (% of the canvas)", y_label, grid="both")
    axes.set_xlim(0, 100)
    # Room for the legend above the deepest entry.
    axes.set_ylim(0, table.layers * 1.22)
    ticks = MaxNLocator(8, integer=True).tick_values(0, table.layers)
    axes.set_yticks([tick for tick in ticks if tick <= table.layers])
    axes.legend(loc="upper left", ncols=2, fontsize="small", frameon=False)


def _similarities(axes: Axes, table: SimilarityTable) -> None:
    """Draw mean similarity over layers, a line for each of `CURVES` ratios spread over those measured."""
    from matplotlib import colormaps

    ratios = sorted(table.curves)
    count = min(CURVES, len(ratios))
    shown_ratios = sorted({ratios[round(step * (len(ratios) - 1) / max(1, count - 1))] for step in range(count)})
    for index, ratio in enumerate(shown_ratios):
        color = colormaps["viridis"](0.9 * index / max(1, len(shown_ratios) - 1))
        axes.plot(range(1, table.layers + 1), table.curves[ratio], ".-", color=color, label=f"r = {ratio} %")
    axes.axhline(table.tau, color=V_COLOR, linestyle="--", linewidth=1.2, label=f"tau = {table.tau:g}")
    title = "K/V of the prefix: alone against whole canvas"
    label(axes, title, "layer", "mean cosine similarity", grid="both", ticks=10)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)

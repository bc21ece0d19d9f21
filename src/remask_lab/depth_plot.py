"""Picture of a depth table: depth over prefix ratio, and the similarities that it rests on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from remask.depth.find import DepthTable
from remask.errors import ConfigError
from remask.machine.disk import whole_file
from remask_lab.drawing import check_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_CURVES = 6
_RED, _BLUE = "#c0392b", "#1f5a92"


def check_target(path: str | Path) -> Path:
    """The path of a picture. Raises `ConfigError` where its format or its folder is none that can be written."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a picture's name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {str(target.parent)!r} to put {target.name!r} into")
    return target


def depth_picture(path: str | Path) -> Callable[[DepthTable], None]:
    """A function that draws a table into the file `path`. Raises `ConfigError`, now, where it could not."""
    check_drawing()
    return partial(plot_depth, path=check_target(path))


def plot_depth(table: DepthTable, path: str | Path) -> None:
    """Draw b over r, and mean similarity over layers where the table has its curves, into a PNG or SVG file.

    Raises `ConfigError` where the file name has another suffix or its folder does not exist.
    """
    from matplotlib.figure import Figure

    target = check_target(path)
    panels = 2 if table.curves else 1
    figure = Figure(figsize=(4.9 * panels, 3.9), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _depth_panel(axes[0], table)
    if table.curves:
        _similarity_panel(axes[1], table)
    separator = "\n" if panels == 1 else ": "
    facts = f"tau = {table.tau:g}, {_samples(table)}" + ("" if table.rule is None else f"; {table.rule}")
    figure.suptitle(f"Depth table of {Path(table.model).name}{separator}{facts}", fontsize="medium")
    # The date would make every drawing of the same table another file.
    metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
    with whole_file("the picture", target) as draft:
        figure.savefig(draft, dpi=160, metadata=metadata)


def _samples(table: DepthTable) -> str:
    kind = "" if table.definition == "published" else f", {table.definition} similarity"
    return f"{table.samples} requests per ratio{kind}"


def _depth_panel(axes: Axes, table: DepthTable) -> None:
    """Steps of the lookup, with the mean of the depths of single requests beside them."""
    from matplotlib.ticker import MaxNLocator

    lookup = table.lookup
    ratios = range(101)
    axes.step(ratios, [lookup.depth(r, 100) for r in ratios], where="post", color=_BLUE, linewidth=2, label="depth b")
    if table.request_depths:
        axes.plot(
            list(table.request_depths),
            list(table.request_depths.values()),
            "o",
            color=_RED,
            markersize=4,
            label="mean of single requests",
        )
    axes.set_title("How deep a shared prefix is reused")
    axes.set_xlabel("prefix ratio r (% of the canvas)")
    axes.set_ylabel(f"depth b (of {table.layers} layers)")
    axes.set_xlim(0, 100)
    # Room for the legend above the deepest entry.
    axes.set_ylim(0, table.layers * 1.22)
    axes.set_yticks([t for t in MaxNLocator(8, integer=True).tick_values(0, table.layers) if t <= table.layers])
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", ncols=2, fontsize="small", frameon=False)


def _similarity_panel(axes: Axes, table: DepthTable) -> None:
    """Mean similarity over layers, one line per ratio, for a few ratios spread over those measured."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    ratios = sorted(table.curves)
    count = min(_CURVES, len(ratios))
    shown = sorted({ratios[round(i * (len(ratios) - 1) / max(1, count - 1))] for i in range(count)})
    colors = colormaps["viridis"]
    layers = range(1, table.layers + 1)
    for place, ratio in enumerate(shown):
        color = colors(0.9 * place / max(1, len(shown) - 1))
        axes.plot(layers, table.curves[ratio], ".-", color=color, linewidth=1.5, label=f"r = {ratio} %")
    axes.axhline(table.tau, color=_RED, linestyle="--", linewidth=1.2, label=f"tau = {table.tau:g}")
    axes.set_title("K/V of the prefix: alone against whole canvas")
    axes.set_xlabel("layer")
    axes.set_ylabel("mean cosine similarity")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.grid(alpha=0.3)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)

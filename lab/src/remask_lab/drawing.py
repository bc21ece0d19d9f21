"""What all pictures share: size, resolution, colours, and where they go."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from remask.checks.plugins import install_line
from remask.errors import ConfigError
from remask.machine.disk import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.transforms import Bbox

DPI = 160
K_COLOR, V_COLOR = "#1f5a92", "#c0392b"

Grid: TypeAlias = Literal["both", "x", "y"]
Below: TypeAlias = Literal["outside lower left", "outside lower center", "outside lower right"]


def check_drawing() -> None:
    """Raise `ConfigError` where nothing can be drawn, so that a long measurement does not end in that."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"pictures are drawn by matplotlib, which is not installed; {install_line('lab')}")


def new_figure(title: str, height: float = 3.9, width: float = 8.0, *, how: str = "") -> Figure:
    """An empty figure, sizes in inches, that makes room for labels and for legends outside of its axes.

    `how` is a sentence under the title that says how the picture is read.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n{how}" if how else title)
    return figure


def new_panels(
    title: str, columns: int, height: float = 3.9, width: float = 8.0, *, how: str = "", **shape: Any
) -> tuple[Figure, list[Axes]]:
    """A `new_figure` and its panels in a row; `shape` goes to `Figure.subplots`."""
    figure = new_figure(title, height, width, how=how)
    return figure, list(figure.subplots(1, columns, squeeze=False, **shape).flat)


def save_figures(figures: Mapping[str, Figure], folder: str | Path, model: str) -> list[Path]:
    """Save each figure as `NAME.png` into `folder`, which is made if it is not there, and return the paths.

    The model's name is put before every title. Raises `ConfigError` where the folder cannot be made, and
    `OutputError` where a picture cannot be written.
    """
    target = Path(folder)
    try:
        target.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {str(folder)!r} for pictures cannot be made: {error.strerror}") from error
    return [save_figure(figure, target / f"{name}.png", model) for name, figure in figures.items()]


def save_figure(figure: Figure, path: Path, model: str) -> Path:
    """Save one figure as `save_figures` does, into the file `path`, which is returned."""
    figure.suptitle(f"{Path(model).name}: {figure.get_suptitle()}", fontsize="medium")
    with whole_file("the picture", path) as draft:
        figure.savefig(draft, dpi=DPI)
    return path


def whole_ticks(axis: Axis, most: int) -> None:
    """Ticks of an axis at whole numbers only: about `most` at most."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1))


def legend_below(figure: Figure, columns: int, axes: Axes | None = None, where: Below = "outside lower left") -> None:
    """A legend under all panels, of what `axes` shows, or of what all of them show."""
    shown = [each.get_legend_handles_labels() for each in (figure.axes if axes is None else [axes])]
    figure.legend(
        [handle for handles, _ in shown for handle in handles],
        [label for _, labels in shown for label in labels],
        loc=where,
        ncols=columns,
        fontsize="small",
        frameon=False,
    )


def label(
    axes: Axes,
    title: str = "",
    x: str = "",
    y: str = "",
    *,
    grid: Grid | None = None,
    ticks: int = 0,
    floor: bool = False,
) -> None:
    """The title of a panel and the names of its axes.

    `grid`: lines, below what is drawn. `ticks`: about so many on the x axis, at whole numbers. `floor`: y begins at 0.
    """
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel=x, ylabel=y)
    if grid is not None:
        axes.grid(axis=grid, alpha=0.3)
        axes.set_axisbelow(True)
    if ticks:
        whole_ticks(axes.xaxis, ticks)
    if floor:
        axes.set_ylim(bottom=0)


def heatmap(axes: Axes, table: Any) -> AxesImage:
    """Draw a table [rows][columns], whose rows and columns are counted from 1."""
    values = np.array(table, dtype=np.float64)
    rows, columns = values.shape
    for axis in (axes.xaxis, axes.yaxis):
        whole_ticks(axis, 8)
    edges = (0.5, columns + 0.5, rows + 0.5, 0.5)
    return axes.imshow(values, aspect="auto", interpolation="nearest", extent=edges)


@dataclass(frozen=True, slots=True)
class PointLabel:
    """The name of a point of a panel, which is given in the panel's data coordinates.

    `needed`: it may stand away from its point, with a line between them. Another label is left out where no place
    beside its point is free, or one would be nearer to another label's point of its colour.
    """

    text: str
    point: tuple[float, float]
    color: str = "black"
    needed: bool = False


_NEAR, _RINGS = 5, 12  # points between a point and its label; how many times as far a needed label may stand
_SIDES = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))  # right or left, above or below


def place_labels(figure: Figure, labels: Mapping[Axes, Sequence[PointLabel]]) -> None:
    """Write the labels of each panel, the first ones first, so that none hides another, a legend or the panel's edge.

    Of the free places the first one is taken that hides the fewest points. All else must be drawn before.
    """
    figure.draw_without_rendering()  # panels have their places from here on
    for axes, wanted in labels.items():
        legend = axes.get_legend()
        taken = [] if legend is None else [legend.get_window_extent()]
        points = list(_points(axes))
        for each in wanted:
            others = [
                other.point
                for other in wanted
                if (other.color, other.point) != (each.color, each.point) and not each.needed
            ]
            box = _place(axes, each, taken, points, others)
            taken += [] if box is None else [box]


def _place(
    axes: Axes,
    wanted: PointLabel,
    taken: Sequence[Bbox],
    points: Sequence[Sequence[float]],
    others: Sequence[tuple[float, float]],
) -> Bbox | None:
    """Write a label, and return the pixels that it takes. Returns None where it is left out.

    `others` are points in data coordinates that it could be mistaken for the name of.
    """
    note = axes.annotate(
        wanted.text,
        wanted.point,
        (0, 0),
        textcoords="offset points",
        fontsize="small",
        color=wanted.color,
        zorder=5,
    )
    note.set_in_layout(False)
    origin = note.get_window_extent()
    own, strangers = axes.transData.transform(wanted.point), [axes.transData.transform(other) for other in others]
    pixels = axes.figure.dpi / 72
    free: list[tuple[int, int, tuple[float, float], Bbox]] = []
    for ring in range(1, 1 + (_RINGS if wanted.needed else 1)):
        for right, up in _SIDES:
            # From the lower left corner of the text to where it stands on this side.
            x = right * _NEAR * ring - (1 - right) / 2 * origin.width / pixels
            y = up * _NEAR * ring - (1 - up) / 2 * origin.height / pixels
            box = origin.translated(x * pixels, y * pixels)
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            mistaken = any(_distance(box, other) <= _distance(box, own) for other in strangers)
            if inside and not mistaken and not any(box.overlaps(other) for other in taken):
                free.append((sum(box.contains(*point) for point in points), ring, (x, y), box))
    if not free and not wanted.needed:
        note.remove()
        return None
    if not free:
        return origin
    _, ring, place, box = min(free, key=lambda each: each[:2])
    note.set_position(place)
    if ring > 1:
        (x, y), width, height = place, box.width / pixels, box.height / pixels
        nearest = (min(max(0.0, x), x + width), min(max(0.0, y), y + height))
        line = {"arrowstyle": "-", "linewidth": 0.6, "color": wanted.color, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", wanted.point, nearest, textcoords="offset points", arrowprops=line, zorder=5)
    return box


def _distance(box: Bbox, point: Iterable[float]) -> float:
    """From a point to the nearest one of a box."""
    x, y = point
    return math.hypot(max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))


def _points(axes: Axes) -> Iterator[Sequence[float]]:
    """Where points are drawn, in pixels."""
    for line in axes.get_lines():
        yield from axes.transData.transform(line.get_xydata())
    for dots in axes.collections:
        yield from dots.get_offset_transform().transform(dots.get_offsets())


def percent_bars(shares: Iterable[float], intervals: Iterable[Sequence[float]]) -> list[list[float]]:
    """Error bars for `Axes.errorbar`, in percent: their lengths below and above each share, from its interval."""
    pairs = list(zip(shares, intervals, strict=True))
    # An interval may end a rounding error short of its share.
    return [
        [100 * max(0.0, share - low) for share, (low, _) in pairs],
        [100 * max(0.0, high - share) for share, (_, high) in pairs],
    ]

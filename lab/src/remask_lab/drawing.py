"""What all pictures share: size, resolution, colours, and where they go."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from remask.checks.plugins import install_command
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
    """Raise `ConfigError` unless matplotlib is installed, so that no long measurement ends without its pictures."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"pictures are drawn by matplotlib, which is not installed; {install_command('lab')}")


def new_figure(title: str, height: float = 3.9, width: float = 8.0, *, how: str = "") -> Figure:
    """An empty figure, sizes in inches, that makes room for labels and for legends outside of its axes.

    `how` is a line below the title that explains how to read the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(f"{title}\n{how}" if how else title)
    return figure


def new_panels(
    title: str, columns: int, height: float = 3.9, width: float = 8.0, *, how: str = "", **shape: Any
) -> tuple[Figure, list[Axes]]:
    """A `new_figure`, and its panels in one row; `shape` are further arguments of `Figure.subplots`."""
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


def whole_ticks(axis: Axis, limit: int) -> None:
    """Put an axis' ticks at whole numbers only, about `limit` of them at most."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(limit, integer=True, min_n_ticks=1))


def legend_below(figure: Figure, columns: int, axes: Axes | None = None, where: Below = "outside lower left") -> None:
    """Put a legend below all panels, with the entries of `axes`, or of every panel where that is None."""
    legends = [panel.get_legend_handles_labels() for panel in (figure.axes if axes is None else [axes])]
    figure.legend(
        [handle for handles, _ in legends for handle in handles],
        [text for _, texts in legends for text in texts],
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
    """Set the title of a panel and the names of its axes.

    Args:
        grid: the direction of grid lines, which are drawn below everything else; None draws none.
        ticks: about how many ticks the x axis gets, at whole numbers; 0 leaves them as they are.
        floor: whether the y axis begins at 0.
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
    """Draw a table [rows][columns] as colours, with the first row at the top. Rows and columns are counted from 1."""
    values = np.array(table, dtype=np.float64)
    rows, columns = values.shape
    for axis in (axes.xaxis, axes.yaxis):
        whole_ticks(axis, 8)
    edges = (0.5, columns + 0.5, rows + 0.5, 0.5)
    return axes.imshow(values, aspect="auto", interpolation="nearest", extent=edges)


@dataclass(frozen=True, slots=True)
class PointLabel:
    """The name of a point of a panel, which is given in the panel's data coordinates.

    A `needed` label is always written, if need be away from its point with a line to it. Another one is left out where
    no place beside its point is free, or where it would be nearer to the point of another label.
    """

    text: str
    point: tuple[float, float]
    color: str = "black"
    needed: bool = False


_NEAR, _RINGS = 5, 12  # points between a point and its label; how many times as far a needed label may stand
_SIDES = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))  # right or left, above or below


def place_labels(figure: Figure, labels: Mapping[Axes, Sequence[PointLabel]]) -> None:
    """Write the labels of each panel in their order, without overlaps with one another, the legend and the edge.

    Each takes the free place that covers the fewest drawn points. Everything else must be drawn before.
    """
    figure.draw_without_rendering()  # panels have their places from here on
    for axes, panel_labels in labels.items():
        legend = axes.get_legend()
        obstacles = [] if legend is None else [legend.get_window_extent()]
        points = list(_drawn_points(axes))
        for point_label in panel_labels:
            rivals = [
                other.point
                for other in panel_labels
                if (other.color, other.point) != (point_label.color, point_label.point) and not point_label.needed
            ]
            box = _place(axes, point_label, obstacles, points, rivals)
            obstacles += [] if box is None else [box]


def _place(
    axes: Axes,
    point_label: PointLabel,
    obstacles: Sequence[Bbox],
    points: Sequence[Sequence[float]],
    rivals: Sequence[tuple[float, float]],
) -> Bbox | None:
    """Write a label, and return the box that it covers, in pixels; None where it is left out.

    `obstacles` are boxes and `points` points in pixels, which it must not and should not cover. `rivals` are points in
    data coordinates that must be farther from it than its own.
    """
    note = axes.annotate(
        point_label.text,
        point_label.point,
        (0, 0),
        textcoords="offset points",
        fontsize="small",
        color=point_label.color,
        zorder=5,
    )
    note.set_in_layout(False)
    origin = note.get_window_extent()
    anchor = axes.transData.transform(point_label.point)
    rival_anchors = [axes.transData.transform(rival) for rival in rivals]
    pixels = axes.figure.dpi / 72
    places: list[tuple[int, int, tuple[float, float], Bbox]] = []  # covered points, ring, offset in points, box
    for ring in range(1, 1 + (_RINGS if point_label.needed else 1)):
        for right, up in _SIDES:
            # From the lower left corner of the text to its place on this side.
            x = right * _NEAR * ring - (1 - right) / 2 * origin.width / pixels
            y = up * _NEAR * ring - (1 - up) / 2 * origin.height / pixels
            box = origin.translated(x * pixels, y * pixels)
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            ambiguous = any(_distance(box, rival) <= _distance(box, anchor) for rival in rival_anchors)
            if inside and not ambiguous and not any(box.overlaps(obstacle) for obstacle in obstacles):
                places.append((sum(box.contains(*point) for point in points), ring, (x, y), box))
    if not places and not point_label.needed:
        note.remove()
        return None
    if not places:
        return origin
    _, ring, (x, y), box = min(places, key=lambda place: place[:2])
    note.set_position((x, y))
    if ring > 1:
        nearest = (min(max(0.0, x), x + box.width / pixels), min(max(0.0, y), y + box.height / pixels))
        line = {"arrowstyle": "-", "linewidth": 0.6, "color": point_label.color, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", point_label.point, nearest, textcoords="offset points", arrowprops=line, zorder=5)
    return box


def _distance(box: Bbox, point: Iterable[float]) -> float:
    """Distance of `point` from the nearest point of `box`, 0 inside it."""
    x, y = point
    return math.hypot(max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))


def _drawn_points(axes: Axes) -> Iterator[Sequence[float]]:
    """The points of all lines and scatter plots of a panel, in pixels."""
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

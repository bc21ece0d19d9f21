"""Labels of points: where they are free to stand; and pictures of depths."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from lab.tests.similarity.tables import TABLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from remask.errors import ConfigError
from remask_lab.drawing import DPI, PointLabel, new_figure, place_labels
from remask_lab.similarity.plot import plot_depth


def panel(*points: tuple[float, float], legend: bool = False) -> tuple[Figure, Axes]:
    figure = new_figure("labels", height=3, width=4)
    axes = figure.subplots()
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.plot([x for x, _ in points], [y for _, y in points], "o", label="points")
    if legend:
        axes.legend(loc="lower right")
    return figure, axes


def written(figure: Figure, axes: Axes) -> dict[str, Bbox]:
    """Where each label stands in a picture as it is saved, in pixels."""
    figure.dpi = DPI
    figure.draw_without_rendering()
    notes = [each for each in axes.texts if isinstance(each, Annotation) and each.get_text()]
    return {note.get_text(): note.get_window_extent() for note in notes}


def lines(axes: Axes) -> int:
    """How many labels are joined to their points."""
    return sum(isinstance(each, Annotation) and each.arrow_patch is not None for each in axes.texts)


def test_names_of_points_that_nearly_coincide_are_all_read() -> None:
    points = [(85.0, 97.0), (100.0, 97.0), (98.0, 99.0), (97.0, 96.0), (99.0, 98.0)]
    figure, axes = panel(*points, legend=True)
    names = ["block-prefix", "none", "uniform-cache", "reuse", "block-dual"]
    place_labels(
        figure, {axes: [PointLabel(name, point, needed=True) for name, point in zip(names, points, strict=True)]}
    )
    boxes = written(figure, axes)
    assert list(boxes) == names
    for (name, one), (other, two) in itertools.combinations(boxes.items(), 2):
        assert not one.overlaps(two), f"{name} and {other} hide each other"
    legend = axes.get_legend()
    assert legend is not None
    for name, box in boxes.items():
        assert axes.bbox.contains(*box.min), name
        assert axes.bbox.contains(*box.max), name
        assert not box.overlaps(legend.get_window_extent())
    assert lines(axes) > 0, "what stands further away is joined to its point"


def test_a_label_stands_beside_its_point_and_hides_no_other() -> None:
    figure, axes = panel((50, 50), (57, 56))
    place_labels(figure, {axes: [PointLabel("here", (50, 50))]})
    box = written(figure, axes)["here"]
    point, other = axes.transData.transform([(50, 50), (57, 56)])
    assert not box.contains(*other), "above to the right another point stands"
    assert not box.contains(*point)
    assert min(abs(box.x0 - point[0]), abs(box.x1 - point[0])) < 20
    assert lines(axes) == 0


def test_a_label_is_not_taken_for_that_of_a_neighbour() -> None:
    figure, axes = panel((50, 50), (52, 50), (54, 50))
    points = [("left", (50.0, 50.0)), ("middle", (52.0, 50.0)), ("right", (54.0, 50.0))]
    place_labels(figure, {axes: [PointLabel(name, point) for name, point in points]})
    boxes = written(figure, axes)
    assert "middle" not in boxes, "wherever it stood, it would be nearer to a neighbour"
    left, middle, right = (axes.transData.transform(point) for _, point in points)
    assert boxes["left"].x1 < left[0] < middle[0] < right[0] < boxes["right"].x0
    place_labels(figure, {axes: [PointLabel("other", (52, 50), "red")]})
    assert "other" in written(figure, axes), "its colour tells whose it is"


@pytest.mark.parametrize("needed", [False, True])
def test_only_a_needed_label_is_written_where_no_place_is_free(needed: bool) -> None:
    figure, axes = panel((50, 50))
    wide = "a name that is wider than its panel " * 3
    place_labels(figure, {axes: [PointLabel(wide, (50, 50), needed=needed)]})
    assert list(written(figure, axes)) == ([wide] if needed else [])


def test_the_first_labels_have_the_first_choice() -> None:
    figure, axes = panel((50, 50))
    names = [f"value {number}" for number in range(9)]
    place_labels(figure, {axes: [PointLabel(name, (50, 50)) for name in names]})
    boxes = written(figure, axes)
    assert list(boxes) == names[: len(boxes)], "those after them are left out"
    assert 4 <= len(boxes) < len(names)
    assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes.values(), 2))


@pytest.mark.parametrize("name", ["depth.png", "depth.PNG"])
def test_png(tmp_path: Path, name: str) -> None:
    plot_depth(TABLE, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 1200, "wide enough for a README"


def test_svg_with_and_without_curves(tmp_path: Path) -> None:
    plot_depth(TABLE, tmp_path / "two.svg")
    plot_depth(replace(TABLE, curves={}, request_depths={}), tmp_path / "one.svg")
    two, one = ((tmp_path / name).read_text() for name in ("two.svg", "one.svg"))
    assert "<svg" in one
    assert "<!-- mean cosine similarity -->" in two
    assert "<!-- mean cosine similarity -->" not in one
    assert "<!-- r = 40 % -->" in two


def test_one_ratio(tmp_path: Path) -> None:
    plot_depth(replace(TABLE, entries={}, curves={50: (1.0, 0.5)}, request_depths={50: 1.0}), tmp_path / "a.png")


def test_other_formats_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        plot_depth(TABLE, tmp_path / "depth.gif")
    with pytest.raises(ConfigError, match="there is no folder"):
        plot_depth(TABLE, tmp_path / "none" / "depth.png")

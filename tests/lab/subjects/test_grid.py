"""What is said about a grid follows from its numbers."""

from typing import Any

from remask_lab.bench.grid import GridRow
from remask_lab.subjects.grid import points_of, quality_name, reading, values_of, varied, worded


def row(accuracy: float | None, speed: float, agreement: float = 1.0, **axes: Any) -> GridRow:
    none = None if accuracy is None else 0.9
    return GridRow({"cache": "c", **axes}, accuracy, none, agreement, speed, 9.0, 2 * speed, 1.0, 1.0, 10, 10, 0.5)


def test_axes_that_vary_and_their_values() -> None:
    points: list[dict[str, Any]] = [
        {"cache": "a", "n": 8, "ratio": None},
        {"cache": "b", "n": 2, "ratio": 0.5, "own": True},
        {"cache": "b"},
    ]
    assert varied(points) == ("n", "ratio", "cache")
    assert values_of(points, "n") == [2, 8]
    assert values_of(points, "ratio") == [None, 0.5]
    assert worded({"cache": "b", "n": 2, "x": None}, ("x", "n", "cache", "other")) == "x=null, n=2, b"


def test_a_grid_that_costs_nothing() -> None:
    rows = [row(0.9, 1.5, n=1), row(1.0, 2.0, n=2), row(0.5, 9.0, n=4), row(0.9, 1.0, cache="none")]
    told = reading(rows)
    assert quality_name(rows) == "accuracy"
    assert told.startswith("4 points; accuracy from 50.0 % to 100.0 %. 2 of 3 cached points are as good as none")
    assert "the fastest of them, n=2, c, takes 1/2.00 of none's time for 1/4.00 of its FLOPs." in told
    assert "Over n 1 to 4: accuracy 90.0 % to 50.0 %; speed 1.50x to 9.00x; FLOPs saved 3.00x to 18.00x" in told
    assert "Over c, none: accuracy 80.0 %, 90.0 %" in told


def test_a_grid_that_costs_accuracy() -> None:
    told = reading([row(0.1, 3.0, n=1), row(0.8, 2.0, n=2)])
    assert "No cached point reaches none; the nearest, n=2, has 80.0 % against 90.0 % at 2.00x the speed." in told


def test_without_answers_tokens_are_compared() -> None:
    rows = [row(None, 3.0, 0.25, kind="a"), row(None, 2.0, 0.75, kind="b")]
    assert quality_name(rows) == "agreement with none"
    told = reading(rows)
    assert "the nearest, kind=b, has 75.0 % against 100.0 %" in told
    assert "Over kind a, b: agreement with none 25.0 %, 75.0 %" in told
    assert points_of(rows)[0] == {"cache": "c", "kind": "a"}


def test_a_single_point() -> None:
    assert reading([row(0.9, 1.0, cache="none")]) == "1 points; accuracy from 90.0 % to 90.0 %."

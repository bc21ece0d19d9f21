"""What a grid of settings came to: its rows, on what they differ, and a reading of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class GridRow:
    """A measured point.

    `speed`, `work` and `flops` are the gains over `none` in time, row-layers and FLOPs, `agreement` the share of tokens
    that equal those of `none`; `..._none` are its own figures. `accuracy` is None where the workload has no answers.
    Memory is in bytes, at the peak.
    """

    axes: Mapping[str, Any]
    accuracy: float | None
    accuracy_none: float | None
    agreement: float
    speed: float
    work: float
    flops: float
    tokens_s: float
    tokens_s_none: float
    memory: int
    memory_none: int
    cache_ratio: float

    @property
    def quality(self) -> float:
        """Accuracy, or agreement where there are no answers."""
        return self.agreement if self.accuracy is None else self.accuracy

    @property
    def quality_none(self) -> float:
        """That of `none`."""
        return 1.0 if self.accuracy_none is None else self.accuracy_none


Rows: TypeAlias = Sequence[GridRow]
Points: TypeAlias = Sequence[Mapping[str, Any]]  # the axes of rows


def quality_name(rows: Rows) -> str:
    """What `quality` is of these rows."""
    return "agreement with none" if any(row.accuracy is None for row in rows) else "accuracy"


def points_of(rows: Rows) -> Points:
    """The axes of `rows`."""
    return [row.axes for row in rows]


def varied(points: Points) -> tuple[str, ...]:
    """Names of the axes on which `points` differ: settings, then prompt length, requests at a time, policy, model.

    Settings that only some policies take are among them where they have several values.
    """
    names = dict.fromkeys(name for point in points for name in point)
    found = [name for name in names if len(values_of(points, name)) > 1]
    last = ("prompt_tokens", "concurrency", "cache", "model")
    return tuple(sorted(found, key=lambda name: last.index(name) + 1 if name in last else 0))


def values_of(points: Points, name: str) -> list[Any]:
    """Values of an axis: numbers in ascending order, others in theirs. Points without the axis have none."""
    found = [point[name] for point in points if name in point]
    values = [value for index, value in enumerate(found) if value not in found[:index]]
    return sorted(values) if all(is_number(value) for value in values) else values


def is_number(value: object) -> bool:
    """Whether `value` has a place on an axis of numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def worded(axes: Mapping[str, Any], names: Sequence[str]) -> str:
    """Those of `names` that a row has, with their values."""
    shown = {name: axes[name] for name in names if name in axes}
    return ", ".join(
        str(value) if name in ("cache", "model") else f"{name}={'null' if value is None else value}"
        for name, value in shown.items()
    )


def reading(rows: Rows) -> str:
    """The grid in a paragraph: its range, the fastest point that costs nothing, and what each axis does."""
    names, quality = varied(points_of(rows)), quality_name(rows)
    lowest, highest = min(rows, key=lambda row: row.quality), max(rows, key=lambda row: row.quality)
    parts = [f"{len(rows)} points; {quality} from {_percent(lowest.quality)} to {_percent(highest.quality)}."]
    cached = [row for row in rows if row.axes["cache"] != "none"]
    kept = [row for row in cached if row.quality >= row.quality_none]
    if kept:
        best = max(kept, key=lambda row: row.speed)
        parts.append(
            f"{len(kept)} of {len(cached)} cached points are as good as none or better; the fastest of them, "
            f"{_named(best, names)}, takes 1/{best.speed:.2f} of none's time for 1/{best.flops:.2f} of its FLOPs."
        )
    elif cached:
        best = max(cached, key=lambda row: row.quality - row.quality_none)
        parts.append(
            f"No cached point reaches none; the nearest, {_named(best, names)}, has {_percent(best.quality)} "
            f"against {_percent(best.quality_none)} at {best.speed:.2f}x the speed."
        )
    return " ".join([*parts, *(_effect(rows, name, quality) for name in names)])


def _named(row: GridRow, names: Sequence[str]) -> str:
    return worded(row.axes, names) or str(row.axes["cache"])


def _effect(rows: Rows, name: str, quality: str) -> str:
    """What an axis does, the others averaged."""
    values = values_of(points_of(rows), name)
    groups = [[row for row in rows if name in row.axes and row.axes[name] == value] for value in values]
    means = [
        tuple(float(np.mean([getattr(row, field) for row in group])) for field in ("quality", "speed", "flops"))
        for group in groups
    ]
    if all(is_number(value) for value in values):
        values, means = [values[0], values[-1]], [means[0], means[-1]]
        join = " to "
    else:
        join = ", "
    figures = (
        f"{quality} {join.join(_percent(mean[0]) for mean in means)}",
        f"speed {join.join(f'{mean[1]:.2f}x' for mean in means)}",
        f"FLOPs saved {join.join(f'{mean[2]:.2f}x' for mean in means)}",
    )
    label = "" if name in ("cache", "model") else f"{name} "
    words = join.join("null" if value is None else str(value) for value in values)
    return f"Over {label}{words}: {'; '.join(figures)} (means over the rest)."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

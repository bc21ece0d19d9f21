"""What the rows of a bench say: quality, work, and whether a contender is as good as another one."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from remask_lab.drawing import percent_bars

Row: TypeAlias = Mapping[str, Any]
"""What `run_bench` reports of one contender."""


def quality(row: Row) -> float:
    """Accuracy, or agreement with the baseline where there are no answers."""
    accuracy = row["accuracy"]
    return float(row["agreement_with_none"] if accuracy is None else accuracy)


def work(row: Row) -> float:
    """Row-layers that a contender computes, as a share of its baseline's."""
    return 1 / float(row["work_ratio_to_none"])


def holds(row: Row, none: Row) -> bool:
    """Whether a row is as good as `none`, within the 95 % interval where there are answers."""
    interval = row["accuracy_interval"]
    # An interval may end a rounding error short of its share.
    best = quality(row) if interval is None else max(quality(row), interval[1])
    return bool(best >= quality(none))


def quality_bars(rows: Sequence[Row]) -> list[list[float]] | None:
    """The rows' 95 % intervals as error bars, in percent; None where there are no answers."""
    if rows[0]["accuracy"] is None:
        return None
    return percent_bars((row["accuracy"] for row in rows), (row["accuracy_interval"] for row in rows))

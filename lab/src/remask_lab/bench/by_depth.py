"""BiCache at every depth on one workload: where its accuracy falls, beside what the depth table rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remask.depth.table import DepthTable
from remask.llm import LLM
from remask_lab.bench.contenders import Contender, contender
from remask_lab.bench.plot import Row, quality_bars
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, new_figure, whole_ticks
from remask_lab.records.interval import judged
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def at_depths(
    llm: LLM, workload: Workload, depths: Iterable[int], settings: Mapping[str, Any] | None = None
) -> list[Contender]:
    """Returns `bicache` at each of `depths` as contenders named "bicache depth=B". `settings` are its other settings.

    Raises `ConfigError` on depths that the model does not have.
    """
    return [
        replace(contender(llm, "bicache", {**(settings or {}), "depth": depth}, workload), name=_name(depth))
        for depth in depths
    ]


def _name(depth: int) -> str:
    return f"bicache depth={depth}"


def rows_by_depth(record: Record) -> dict[int, Row]:
    """The rows of `at_depths` in a bench's record, by depth."""
    rows = {row["cache"]: row for row in record.data["results"]}
    found = {depth: rows.get(_name(depth)) for depth in range(record.about["layers"] + 1)}
    return {depth: row for depth, row in found.items() if row is not None}


def reading(record: Record) -> str:
    """What the runs show: all-layer reuse, `none` in fewer steps, BiCache at the table's depth, and where it breaks.

    The record has `none`, `reuse`, `bicache` and depths, on a workload with answers, and `none` in fewer steps or not.
    """
    rows = {row["cache"]: row for row in record.data["results"]}
    none, reuse, bicache = (rows[name] for name in ("none", "reuse", "bicache"))
    sentences = [
        f"Reusing the shared prefix in all layers, as engines of autoregressive models do, gives {_share(reuse)} right "
        f"answers; without caching there are {_share(none)}."
        if judged(reuse, none).loses
        else f"Reusing the shared prefix in all layers loses no answers that can be seen here: {_share(reuse)} against "
        f"{_share(none)}.",
        f"BiCache at the depth of its table ({bicache['prefix_depth']:g} of {record.about['layers']} layers) gives "
        f"{_share(bicache)} with 1/{bicache['work_ratio_to_none']:.1f} of the work.",
    ]
    fewer = [row for name, row in rows.items() if name.startswith("none steps=")]
    if fewer:
        told = " and ".join(
            f"{_share(row)} in {row['settings']['steps']} {'step' if row['settings']['steps'] == 1 else 'steps'}"
            f" (1/{row['work_ratio_to_none']:.1f} of the work)"
            for row in fewer
        )
        sentences.insert(1, f"Fewer steps, the baseline that needs no cache, give {told}.")
    deepest, broken = breaks_at(rows_by_depth(record), none)
    if broken is not None:
        sentences.append(
            f"It loses no answers that can be seen up to depth {deepest}, and does at depth {broken}, with "
            f"{_share(rows_by_depth(record)[broken])} right."
            if deepest is not None
            else "It loses answers at the least of the depths that were run."
        )
    return " ".join(sentences)


def breaks_at(rows: Mapping[int, Row], none: Row) -> tuple[int | None, int | None]:
    """The least depth that is shown to lose answers, and the one before it; None where there is none."""
    held: int | None = None
    for depth, row in sorted(rows.items()):
        if judged(row, none).loses:
            return held, depth
        held = depth
    return held, None


def by_depth_text(record: Record) -> str:
    """Right answers at every depth, in one line."""
    shares = [f"{depth}: {_share(row)}" for depth, row in rows_by_depth(record).items()]
    return f"bicache by depth b, right answers: {', '.join(shares)}"


def _share(row: Row) -> str:
    return f"{100 * row['accuracy']:.0f} %"


def draw_by_depth(record: Record, table: DepthTable) -> Figure:
    """Draw how far first predictions move, and accuracy, by depth.

    Left, what the table rests on at the ratio nearest to the workload's. Right, accuracy over depth,
    beside that of `none` and `reuse`.
    """
    figure = new_figure(
        "how many layers may reuse a shared prefix",
        width=9.5,
        how="left: below the bound a depth is allowed, above it predictions depend on it; right: what each depth costs",
    )
    left, right = figure.subplots(1, 2)
    _nats(left, table, 100 * record.about["settings"]["prefix_ratio"])
    _accuracies(right, record)
    return figure


def _nats(axes: Axes, table: DepthTable, ratio: float) -> None:
    if table.nats:
        nearest = min(table.nats, key=lambda known: abs(known - ratio))
        depths = sorted(table.nats[nearest])
        means, lows, highs = zip(*(table.nats[nearest][depth] for depth in depths), strict=True)
        bars = [[mean - low for mean, low in zip(means, lows, strict=True)]]
        bars.append([high - mean for mean, high in zip(means, highs, strict=True)])
        axes.errorbar(depths, means, yerr=bars, fmt="o-", color=K_COLOR, markersize=4, capsize=2)
        axes.axhline(table.bound, color=V_COLOR, linestyle="--", linewidth=1.2)
        axes.set_yscale("symlog", linthresh=table.bound or 0.1)
        axes.set_ylim(bottom=0)
        label(
            axes,
            f"how far first predictions move (r from {nearest} %, bars: 95 %)",
            "depth b",
            f"nats, where they move most; bound {table.bound:g}",
        )
        whole_ticks(axes.xaxis, 10)
    else:
        label(axes, "this depth table has no audits")
    axes.grid(alpha=0.3)


def _accuracies(axes: Axes, record: Record) -> None:
    rows = {row["cache"]: row for row in record.data["results"]}
    none, reuse, bicache = (rows[name] for name in ("none", "reuse", "bicache"))
    by_depth = rows_by_depth(record)
    axes.axhline(100 * none["accuracy"], color="black", linestyle=":", linewidth=1.2, label="none")
    depths = sorted(by_depth)
    axes.errorbar(
        depths,
        [100 * by_depth[depth]["accuracy"] for depth in depths],
        yerr=quality_bars([by_depth[depth] for depth in depths]),
        fmt="o-",
        color=K_COLOR,
        markersize=5,
        capsize=2,
        label="bicache",
    )
    axes.errorbar(
        record.about["layers"],
        100 * reuse["accuracy"],
        yerr=quality_bars([reuse]),
        fmt="X",
        color=V_COLOR,
        markersize=9,
        capsize=2,
        label="reuse: all layers",
    )
    axes.axvline(bicache["prefix_depth"], color="grey", linewidth=5, alpha=0.3, label="the table's depth")
    label(axes, "right answers (bars: 95 %)", "depth b: layers that reuse the prefix", "share (%)")
    axes.set_ylim(-4, 106)
    whole_ticks(axes.xaxis, 10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper right")

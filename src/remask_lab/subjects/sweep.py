"""`remask analyze sweep`: throughput and accuracy over BiCache's threshold tau and its refresh interval R.

Each value of tau runs at one R, and each value of R at one tau (BiCache figure 9, table 4).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tqdm import tqdm

from remask.cli.options import open_llm
from remask.depth.settings import check_tau
from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import check_least, separated
from remask_lab.arguments.subjects.sweep import CACHES, REFRESH_INTERVAL
from remask_lab.asked.workload import asked_workload, described, heading
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_figure, percent_bars, save_figures
from remask_lab.instruments.passes import check_masked
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import about
from remask_lab.records.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parameter: TypeAlias = Literal["tau", "refresh_interval"]
Point: TypeAlias = Mapping[str, Any]
Row: TypeAlias = Mapping[str, Any]  # cache, tau, refresh_interval, and what `run_bench` reports

PARAMETERS: tuple[Parameter, ...] = ("tau", "refresh_interval")
NAMES: Mapping[Parameter, str] = {"tau": "tau", "refresh_interval": "R"}
_LABELS: Mapping[Parameter, str] = {"tau": "threshold tau", "refresh_interval": "refresh interval R (steps)"}
_COLORS = (K_COLOR, V_COLOR, "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(frozen=True, slots=True)
class SweepValues:
    """What is swept: each of `taus` at R = `refresh_interval`, and each of `refresh_intervals` at `tau`.

    The defaults are the paper's. Raises `ConfigError` on values that no run could have.
    """

    taus: tuple[float, ...] = (0.91, 0.93, 0.95, 0.97, 0.99)
    refresh_intervals: tuple[int, ...] = (8, 16, 32, 64)
    tau: float = 0.97
    refresh_interval: int = REFRESH_INTERVAL
    caches: tuple[str, ...] = CACHES

    def __post_init__(self) -> None:
        for tau in (*self.taus, self.tau):
            check_tau(tau)
        for cache in self.caches:
            if cache.split("+")[0] != "bicache":
                raise ConfigError(f"tau and R are bicache's: a cache must begin with it, got {cache!r}")

    def points(self, parameter: Parameter) -> list[Point]:
        """Cache by cache, the settings that the sweep of `parameter` runs."""
        settings = {
            "tau": [(tau, self.refresh_interval) for tau in self.taus],
            "refresh_interval": [(self.tau, interval) for interval in self.refresh_intervals],
        }[parameter]
        return [
            {"cache": cache, "tau": tau, "refresh_interval": interval}
            for cache in self.caches
            for tau, interval in settings
        ]


def measure(args: argparse.Namespace) -> Outcome:
    """Measure the points that `--output` does not hold yet."""
    check_least(args, concurrency=1, rounds=1)
    values = _values(args)
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=args.concurrency))
    check_masked(llm)
    workload = asked_workload(llm, args)
    settings = described(workload) | {"concurrency": args.concurrency, "rounds": args.rounds}
    sweep = Sweep(args.output, "analyze sweep", about(llm, seed=args.seed, settings=settings))
    rows = run_sweep(llm, workload, values, sweep, args.rounds, progress=llm.progress)
    parts = [heading(llm, workload), text(rows)]
    if sweep.resumed:
        parts.append(f"{sweep.resumed} points are known from {args.output}")
    return Outcome("\n\n".join(parts), sweep.record, partial(plot_sweep, rows, model=llm.loaded.name), reading(rows))


def _values(args: argparse.Namespace) -> SweepValues:
    taus, intervals, usual = args.taus, args.refresh_intervals, SweepValues()
    values = SweepValues(
        taus=usual.taus if taus is None else tuple(dict.fromkeys(taus)),
        refresh_intervals=usual.refresh_intervals if intervals is None else tuple(dict.fromkeys(intervals)),
        tau=args.tau,
        refresh_interval=args.refresh_interval,
        caches=tuple(separated(args.caches)),
    )
    if not values.taus and not values.refresh_intervals:
        raise ConfigError("--taus and --refresh-intervals name no value, so there is nothing to sweep")
    return values


def reading(rows: Mapping[Parameter, Sequence[Row]]) -> str:
    """What the sweeps show, in one paragraph."""
    parts = []
    for parameter in PARAMETERS:
        of_parameter = rows[parameter]
        for cache in dict.fromkeys(row["cache"] for row in of_parameter):
            own = sorted((row for row in of_parameter if row["cache"] == cache), key=lambda row: row[parameter])
            if len(own) > 1:
                parts.append(_sentence(cache, parameter, own))
    return " ".join(parts) or "A single point shows no trend."


def _sentence(cache: str, parameter: Parameter, rows: Sequence[Row]) -> str:
    name = NAMES[parameter]
    first, last = rows[0], rows[-1]
    speeds = [row["ratio_to_none"] for row in rows]
    sentence = (
        f"{cache}: as {name} grows from {first[parameter]:g} to {last[parameter]:g}, throughput goes from "
        f"{speeds[0]:.2f} to {speeds[-1]:.2f} times that without a cache ({min(speeds):.2f} to {max(speeds):.2f} over "
        f"all values), and the work saved from {first['work_ratio_to_none']:.2f}x to {last['work_ratio_to_none']:.2f}x"
    )
    depths = first["prefix_depth"], last["prefix_depth"]
    if depths[0] != depths[1]:
        sentence += f", as the depth goes from {depths[0]:.1f} to {depths[1]:.1f} layers"
    return f"{sentence}; {_quality(parameter, rows)}"


def _quality(parameter: Parameter, rows: Sequence[Row]) -> str:
    """Accuracy where the workload has answers, else agreement with `none`."""
    if rows[0]["accuracy"] is None:
        values = [row["agreement_with_none"] for row in rows]
        what = "agreement with no cache"
    else:
        values = [row["accuracy"] for row in rows]
        what = "accuracy"
    low, high = min(values), max(values)
    if low == high:
        return f"{what} is {100 * low:.1f} % throughout."
    best = ", ".join(f"{row[parameter]:g}" for row, value in zip(rows, values, strict=True) if value == high)
    sentence = f"{what} lies between {100 * low:.1f} % and {100 * high:.1f} %, highest at {NAMES[parameter]} = {best}"
    if rows[0]["accuracy"] is not None:
        overlap = max(row["accuracy_interval"][0] for row in rows) <= min(row["accuracy_interval"][1] for row in rows)
        sentence += ", with 95 % intervals that " + ("all overlap" if overlap else "do not all overlap")
    return sentence + "."


def run_sweep(
    llm: LLM, workload: Workload, values: SweepValues, sweep: Sweep, rounds: int, progress: bool = False
) -> dict[Parameter, list[Row]]:
    """Measure every point of `values` that `sweep` does not hold yet; returns the rows of each parameter's sweep.

    At each point the policy and `none` take turns on the workload as `run_bench` has it, so that `ratio_to_none` does
    not depend on what else the machine did at the others. Depths at a tau follow from the similarities in the depth
    table. Raises `ConfigError`, before anything is measured, where it has none, or a point cannot run.
    """
    table = llm.depth_table
    contenders = {
        parameter: [_contender(llm, workload, table, point) for point in values.points(parameter)]
        for parameter in PARAMETERS
    }
    none = Contender("none", llm.policy("none"))
    found: dict[Parameter, list[Row]] = {parameter: [] for parameter in PARAMETERS}
    with tqdm(total=sum(map(len, contenders.values())), desc="sweep", unit="point", disable=not progress) as bar:
        for parameter, own in contenders.items():
            for point, contender in zip(values.points(parameter), own, strict=True):
                row = sweep.row(point, partial(_beside_none, llm, workload, none, contender, rounds))
                found[parameter].append({**point, **row})
                bar.update()
    return found


def _contender(llm: LLM, workload: Workload, table: DepthTable, point: Point) -> Contender:
    lookup = table.lookup_at(point["tau"])
    policy = llm.policy(point["cache"], {"refresh_interval": point["refresh_interval"]}, lambda: lookup)
    llm.engine.check(workload.tasks[0].request.with_policy(policy))
    return Contender(point["cache"], policy)


def _beside_none(llm: LLM, workload: Workload, none: Contender, contender: Contender, rounds: int) -> Mapping[str, Any]:
    results = run_bench(llm, workload, [none, contender], rounds, llm.engine_config, False).data["results"]
    return {**results[1], "none": results[0]}


def text(rows: Mapping[Parameter, Sequence[Row]]) -> str:
    """One line a point."""
    header = f"{'cache':<24}{'tau':>6}{'R':>5}{'depth':>7}{'tok/s':>8}{'speed':>8}{'work':>8}{'accuracy':>10}"
    lines = dict.fromkeys(_line(row) for own in rows.values() for row in own)
    return "\n".join([f"{header}{'agreement':>11}", *lines])


def _line(row: Row) -> str:
    accuracy = "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %"
    return (
        f"{row['cache']:<24}{row['tau']:>6g}{row['refresh_interval']:>5}{row['prefix_depth']:>7.1f}"
        f"{row['throughput_tok_s']:>8.0f}{row['ratio_to_none']:>7.2f}x{row['work_ratio_to_none']:>7.2f}x{accuracy:>10}"
        f"{100 * row['agreement_with_none']:>9.1f} %"
    )


def plot_sweep(rows: Mapping[Parameter, Sequence[Row]], folder: str | Path, model: str) -> list[Path]:
    """Draw `sweep-tau.png` and `sweep-refresh-interval.png`, of the sweeps that have rows; returns their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {
        f"sweep-{parameter.replace('_', '-')}": _figure(parameter, own) for parameter, own in rows.items() if own
    }
    return save_figures(figures, folder, model)


def _figure(parameter: Parameter, rows: Sequence[Row]) -> Figure:
    """Speed and quality over one parameter."""
    held: Parameter = "refresh_interval" if parameter == "tau" else "tau"
    figure = new_figure(f"sweep of the {_LABELS[parameter]} ({NAMES[held]} = {rows[0][held]:g})")
    left, right = figure.subplots(1, 2)
    values = sorted({row[parameter] for row in rows})
    for index, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = sorted((row for row in rows if row["cache"] == cache), key=lambda row: row[parameter])
        # Lines that coincide are set apart a little.
        places = [values.index(row[parameter]) + 0.06 * index for row in own]
        color = _COLORS[index % len(_COLORS)]
        _draw_speed(left, places, own, cache, color)
        _draw_quality(right, places, own, cache, color)
    answered = rows[0]["accuracy"] is not None
    for axes in (left, right):
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axes.grid(alpha=0.3)
    label(left, "throughput, and work saved", _LABELS[parameter], "gain over no cache (bars: rounds)")
    left.set_ylim(bottom=0)
    label(
        right,
        "accuracy (bars: 95 % intervals)" if answered else "agreement with no cache",
        _LABELS[parameter],
        "share of answers (%)" if answered else "share of tokens (%)",
    )
    right.set_ylim(0, 105)
    legend_below(figure, 3, left)
    return figure


def _draw_speed(axes: Axes, places: Sequence[float], rows: Sequence[Row], cache: str, color: str) -> None:
    speeds = [row["ratio_to_none"] for row in rows]
    spread = [[s - row["ratio_range"][0] for s, row in zip(speeds, rows, strict=True)]]
    spread.append([row["ratio_range"][1] - s for s, row in zip(speeds, rows, strict=True)])
    axes.errorbar(places, speeds, yerr=spread, fmt=".-", color=color, capsize=2, linewidth=1.2, label=cache)
    work = [row["work_ratio_to_none"] for row in rows]
    axes.plot(places, work, ":", color=color, linewidth=1.2, label=f"{cache}: row-layers")


def _draw_quality(axes: Axes, places: Sequence[float], rows: Sequence[Row], cache: str, color: str) -> None:
    if rows[0]["accuracy"] is None:
        axes.plot(places, [100 * row["agreement_with_none"] for row in rows], ".-", color=color, label=cache)
        return
    shares = [100 * row["accuracy"] for row in rows]
    spread = percent_bars((row["accuracy"] for row in rows), (row["accuracy_interval"] for row in rows))
    axes.errorbar(places, shares, yerr=spread, fmt=".-", color=color, capsize=2, linewidth=1.2, label=cache)

"""`remask analyze curves`: accuracy against work, with every knob of every policy swept.

One knob moves at a time; the others keep their defaults. Knobs of the sampler, such as the number of steps, are swept
for `none` too: a cache has to beat fewer steps. Each point runs beside `none`, on the same requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from remask.cli.options import add_model_options, object_option, open_llm
from remask.core.checks import listed
from remask.core.kinds import ModelKind
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.arguments.common import check_least
from remask_lab.arguments.results import add_result_options
from remask_lab.arguments.workload import add_workload_options, asked_workload, described, heading
from remask_lab.bench.contenders import LeftOut, every_contender
from remask_lab.bench.grid import Grid, GridRow, run_grids
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, new_figure, percent_bars, save_figures
from remask_lab.records.interval import percent_text
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import about
from remask_lab.records.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUMMARY = "accuracy against work, with every knob of every policy swept"
EXAMPLES = (
    "remask analyze curves --model bundled --dtype float32 --output curves.json --plots pictures",
    "remask analyze curves --model bundled --knobs '{\"bicache\": {\"depth\": [2, 4]}}' --sampling-knobs '{}'",
)

OPTIONS = ("--knobs", "--sampling-knobs")
Values: TypeAlias = Mapping[str, Sequence[Any]]

ALL_DEPTHS = "all"
FEWER = "fewer"
KNOBS: Mapping[str, Mapping[str, Any]] = {
    "bicache": {"depth": ALL_DEPTHS, "refresh_interval": (1, 2, 4, 8, 16)},
    "dkv-decode": {"refresh_interval": (1, 2, 4, 8)},
    "dkv-greedy": {"refresh_interval": (1, 2, 4, 8), "window": (0, 2, 4, 8)},
    "dkv-pd": {"refresh_interval": (1, 2, 4, 8)},
    "dllm-cache": {"prompt_interval": (1, 2, 4, 100), "response_interval": (1, 2, 4, 8), "ratio": (0.0, 0.25, 0.5)},
    "elastic-cache": {"window": (2, 4, 8, 16), "threshold": (0.5, 0.9, 0.99)},
    "uniform-cache": {"refresh_next": (0, 1, 2, 4, 8)},
}
"""Values of the knobs that a policy is known for. `ALL_DEPTHS` stands for every number of the model's layers."""

SAMPLING_KNOBS: Mapping[ModelKind, Mapping[str, Mapping[str, Any]]] = {
    "masked": {"none": {"steps": FEWER}},
    "block_causal": {},
    "uniform": {
        "none": {"steps_per_block": FEWER},
        "uniform-cache": {"steps_per_block": FEWER, "block_length": (4, 8, 16, 32)},
    },
}
"""Sampling parameters that are swept alike. `FEWER` stands for the workload's own number, halved again and again."""

_COLORS = (K_COLOR, V_COLOR, "#2c8c4a")
_MARKERS = "osD"
_COLUMNS = 3
_LARGE_STEP = 20.0  # percent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subject's options."""
    parser.description = (
        "Every policy that can run the requests, at its defaults and with one knob moved at a time. With --output, "
        "points are written as they are measured, and the same command goes on from there."
    )
    parser.add_argument(
        "--knobs", metavar="JSON", help='values of knobs, instead of the usual ones: {"bicache": {"depth": [0, 2]}}'
    )
    parser.add_argument(
        "--sampling-knobs", metavar="JSON", help='the same for the sampler: {"none": {"steps": [2, 4]}}'
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="C", help="requests run at a time")
    parser.add_argument("--rounds", type=int, default=1, metavar="K", help="turns of each point (default 1)")
    add_workload_options(parser, requests=200)
    add_result_options(parser)
    add_model_options(parser)


def measure(args: argparse.Namespace) -> Outcome:
    """Measure the points that `--output` does not hold yet."""
    check_least(args, concurrency=1, rounds=1)
    given, sampling = (_given(name, getattr(args, name[2:].replace("-", "_"))) for name in OPTIONS)
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=args.concurrency))
    workload = asked_workload(llm, args).seeded
    asked, left_out = asked_knobs(llm, workload, given, sampling)
    settings = described(workload) | {"concurrency": args.concurrency, "rounds": args.rounds}
    sweep = Sweep(args.output, "analyze curves", about(llm, seed=args.seed, settings=settings))
    curves = measure_curves(llm, workload, asked, args.concurrency, args.rounds, sweep, llm.progress)
    parts = [heading(llm, workload), text(curves), *(f"Left out: {each.name}: {each.reason}" for each in left_out)]
    return Outcome(
        "\n\n".join(parts), sweep.record, partial(plot_curves, curves, model=llm.loaded.name), reading(curves)
    )


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a policy, or of its sampler, that is swept alone. Without one the policy runs at its defaults."""

    cache: str
    setting: str | None = None
    values: tuple[Any, ...] = ()
    of_sampler: bool = False

    def grid(self, concurrency: int) -> Grid:
        """The points of the knob."""
        values = {} if self.setting is None else {self.setting: self.values}
        if self.of_sampler:
            return Grid(caches=(self.cache,), sampling=values, concurrency=(concurrency,))
        return Grid(caches=(self.cache,), settings=values, concurrency=(concurrency,))


@dataclass(frozen=True, slots=True)
class Curve:
    """A swept knob and its rows, in the order of its values."""

    knob: Knob
    rows: tuple[GridRow, ...]

    def value(self, row: GridRow) -> str:
        """The value of the knob at a row."""
        return "" if self.knob.setting is None else f"{row.axes[self.knob.setting]}"


def asked_knobs(
    llm: LLM, workload: Workload, given: Mapping[str, Values], sampling: Mapping[str, Values]
) -> tuple[list[Knob], list[LeftOut]]:
    """Returns the knobs of every policy that can run `workload`, and the policies that are left out.

    Those `given` for a policy, and for its `sampling`, take the place of the usual ones. Policies that need another
    order of transfers than the workload's are left out: their accuracy is not comparable. Raises `ConfigError` where
    other policies are named.
    """
    rows, left_out = every_contender(llm, workload, {})
    names = [row.name for row in rows if row.workload is None]
    left_out += [
        LeftOut(row.name, "it runs only where positions are drawn at random, beside another 'none'")
        for row in rows
        if row.workload is not None and row.name != row.baseline
    ]
    for option, own in zip(OPTIONS, (given, sampling), strict=True):
        for name in own:
            if name not in names:
                raise ConfigError(f"{option} names {name!r}, which does not run here; known: {', '.join(names)}")
    usual = SAMPLING_KNOBS[llm.loaded.config.kind]
    knobs: list[Knob] = []
    for name in names:
        policy_knobs = given.get(name, KNOBS.get(name, {}))
        found = [Knob(name, each, _values(llm, workload, each, at)) for each, at in policy_knobs.items()]
        sampler_knobs = sampling.get(name, usual.get(name, {}))
        found += [Knob(name, each, _values(llm, workload, each, at), True) for each, at in sampler_knobs.items()]
        knobs += [knob for knob in found if knob.values] or ([] if name == "none" else [Knob(name)])
    return knobs, left_out


def _values(llm: LLM, workload: Workload, setting: str, values: Any) -> tuple[Any, ...]:
    if values == ALL_DEPTHS:
        return tuple(range(llm.loaded.config.layers + 1))
    if values == FEWER:
        number = getattr(workload.tasks[0].request.params, setting)
        return tuple(number // divisor for divisor in (8, 4, 2, 1) if number and number % divisor == 0)
    return tuple(values)


def measure_curves(
    llm: LLM, workload: Workload, knobs: Sequence[Knob], concurrency: int, rounds: int, sweep: Sweep, progress: bool
) -> list[Curve]:
    """Returns a curve for each of `knobs`. Points that `sweep` holds are not measured again.

    Raises `ConfigError`, before anything is measured, where a point cannot run.
    """
    grids = [knob.grid(concurrency) for knob in knobs]

    def under(sampling: Mapping[str, Any], _prompt_tokens: int | None) -> Workload:
        tasks = [
            replace(task, request=replace(task.request, params=replace(task.request.params, **sampling)))
            for task in workload.tasks
        ]
        return replace(workload, tasks=tuple(tasks))

    found = run_grids(llm, grids, under, rounds, sweep, progress)
    return [Curve(knob, tuple(rows)) for knob, rows in zip(knobs, found, strict=True)]


def _given(option: str, text: str | None) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, own in object_option(option, text).items():
        if not isinstance(own, dict):
            raise ConfigError(f"{option}: {name!r} must be an object of settings and their values, got {own!r}")
        found[name] = {
            setting: listed(f"{option}: {name}: {setting}", values, "values") for setting, values in own.items()
        }
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """`none` as the workload is asked for: what all points are compared with."""

    row_layers: int
    quality: float

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Reference:
        """That of these curves: `none` beside a point whose sampler is the workload's."""
        row = next(row for curve in curves if not curve.knob.of_sampler for row in curve.rows)
        return cls(row.row_layers_none, row.quality_none)

    def work(self, row: GridRow) -> float:
        """Row-layers that a point computes, as a share of those of `none`."""
        return row.row_layers / self.row_layers

    def holds(self, row: GridRow) -> bool:
        """Whether a point is as good as `none`, within the 95 % interval where there are answers."""
        high = row.quality if row.interval is None else row.interval[1]
        return high >= self.quality


def text(curves: Sequence[Curve]) -> str:
    """One line a point."""
    none = Reference.of(curves)
    lines = [
        f"{'':<40}{'quality (95 % interval)':>28}{'work %':>9}{'speed':>8}",
        f"{'none':<40}{100 * none.quality:>26.1f} %{100:>9.1f}{1:>7.2f}x",
    ]
    for curve in curves:
        for row in curve.rows:
            name = curve.knob.cache
            if curve.knob.setting is not None:
                name += f" {curve.knob.setting}={curve.value(row)}"
            lines.append(f"{name:<40}{_quality(row):>28}{100 * none.work(row):>9.1f}{row.speed:>7.2f}x")
    lines += ["", "Speed is against none with the same sampler, in the same run."]
    return "\n".join(lines)


def _quality(row: GridRow) -> str:
    if row.accuracy is None or row.interval is None:
        return f"{100 * row.agreement:.1f} % agree"
    return percent_text(row.accuracy, row.interval)


def reading(curves: Sequence[Curve]) -> str:
    """For each policy, the point of least work that holds `none`'s accuracy, and the point that falls furthest."""
    none = Reference.of(curves)
    parts = []
    for name, own in by_policy(curves).items():
        points = [(curve, row) for curve in own for row in curve.rows]
        held = [(curve, row) for curve, row in points if none.holds(row)]
        if not held:
            curve, row = max(points, key=lambda point: point[1].quality)
            parts.append(
                f"{name} does not hold it anywhere; its best point{_at(curve, row)} has {_percent(row.quality)}."
            )
            continue
        curve, row = min(held, key=lambda point: none.work(point[1]))
        sentence = f"{name} holds it with {_percent(none.work(row))} of the work{_at(curve, row)}"
        curve, low = min(points, key=lambda point: point[1].quality)
        if not none.holds(low):
            sentence += f", and falls to {_percent(low.quality)}{_at(curve, low)}"
        parts.append(f"{sentence}.")
    return " ".join([f"Without caching, quality is {_percent(none.quality)}.", *parts])


def by_policy(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The curves of each policy."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.knob.cache, []).append(curve)
    return found


def _at(curve: Curve, row: GridRow) -> str:
    return "" if curve.knob.setting is None else f" at {curve.knob.setting} {curve.value(row)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def plot_curves(curves: Sequence[Curve], folder: str | Path, model: str) -> list[Path]:
    """Draw `curves.png` into `folder`, which is made if it is not there. Returns its path.

    Raises `ConfigError` where the folder cannot be made.
    """
    return save_figures({"curves": _figure(curves)}, folder, model)


def _figure(curves: Sequence[Curve]) -> Figure:
    """A panel for each policy with knobs, and one for those without. Grey points are those of the other panels."""
    named, none = by_policy(curves), Reference.of(curves)
    panels = {name: own for name, own in named.items() if own[0].knob.setting is not None}
    fixed = [own[0] for own in named.values() if own[0].knob.setting is None]
    count = len(panels) + bool(fixed)
    lines = -(-count // _COLUMNS)
    figure = new_figure(
        "quality against work, one knob moved at a time",
        height=1.0 + 2.9 * lines,
        width=10.5,
        how="best is the upper left: as good as none (star) with little of its work",
    )
    axes = list(figure.subplots(lines, min(count, _COLUMNS), sharex=True, sharey=True, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    rows = [row for curve in curves for row in curve.rows]
    for each in axes[:count]:
        _background(each, rows, none)
    for each, (name, own) in zip(axes, panels.items(), strict=False):
        label(each, name)
        for index, curve in enumerate(own):
            _curve(each, curve, none, _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)])
        each.legend(loc="lower right", fontsize="small", framealpha=0.9)
    if fixed:
        label(axes[count - 1], "policies without a knob")
        for index, curve in enumerate(fixed):
            _named_point(axes[count - 1], curve, none, index)
    quality = "tokens as without caching (%)" if rows[0].accuracy is None else "right answers (%, bars: 95 %)"
    figure.supxlabel("row-layers computed (% of no caching)", fontsize="medium")
    figure.supylabel(quality, fontsize="medium")
    return figure


def _background(axes: Axes, rows: Sequence[GridRow], none: Reference) -> None:
    places = [100 * none.work(row) for row in rows], [100 * row.quality for row in rows]
    axes.scatter(*places, s=10, color="#d9d9d9", zorder=1)
    axes.plot(100, 100 * none.quality, "*", color="black", markersize=11, zorder=4)
    axes.annotate("none", (100, 100 * none.quality), (-4, -13), textcoords="offset points", ha="right")
    axes.set(xlim=(0, max(108, *(place + 8 for place in places[0]))), ylim=(-4, 106))
    axes.grid(alpha=0.3)


def _curve(axes: Axes, curve: Curve, none: Reference, color: str, marker: str) -> None:
    points = [(curve.value(row), 100 * none.work(row), 100 * row.quality) for row in curve.rows]
    axes.errorbar(
        [x for _, x, _ in points],
        [y for _, _, y in points],
        yerr=_bars(curve.rows),
        fmt=f"{marker}-",
        color=color,
        markersize=4,
        linewidth=1.1,
        elinewidth=0.7,
        zorder=3,
        label=curve.knob.setting,
    )
    seen: list[tuple[float, float]] = []
    steps = [0.0, *(abs(y - before) for (_, _, before), (_, _, y) in pairwise(points)), 0.0]
    # Labels of points that nearly coincide would hide each other. Those beside a large step are placed first.
    order = sorted(range(len(points)), key=lambda index: max(steps[index : index + 2]) < _LARGE_STEP)
    for name, x, y in (points[index] for index in order):
        if all(abs(x - left) > 5 or abs(y - down) > 7 for left, down in seen):
            seen.append((x, y))
            axes.annotate(name, (x, y), (4, 5), textcoords="offset points", fontsize="small", color=color, zorder=5)


def _named_point(axes: Axes, curve: Curve, none: Reference, index: int) -> None:
    (row,) = curve.rows
    x, y = 100 * none.work(row), 100 * row.quality
    axes.errorbar(x, y, yerr=_bars([row]), fmt=_MARKERS[index % len(_MARKERS)], color=K_COLOR, markersize=4, zorder=3)
    below = row.quality > 0.5
    place = (4, -8 - 9 * (index % 4)) if below else (4, 6 + 9 * (index % 4))
    axes.annotate(curve.knob.cache, (x, y), place, textcoords="offset points", fontsize="small", zorder=5)


def _bars(rows: Sequence[GridRow]) -> list[list[float]] | None:
    """The rows' intervals as bars; None where there are no answers."""
    intervals = [row.interval for row in rows if row.interval is not None]
    return percent_bars((row.quality for row in rows), intervals) if intervals else None

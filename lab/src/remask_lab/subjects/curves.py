"""`remask analyze curves`: accuracy against work, with every knob of every policy swept.

One knob moves at a time; the others keep their defaults. Knobs of the sampler, such as the number of steps, are swept
for `none` too: a cache has to beat fewer steps. All points and `none` take turns in one run, on the same requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from remask.checks import ModelKind
from remask.checks.values import listed
from remask.cli.options import object_option
from remask.errors import ConfigError
from remask.llm import LLM
from remask.sampling.blocks import even_blocks
from remask_lab.asked import Outcome, check_least, heading, open_workload
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender, LeftOut, contender, every_contender
from remask_lab.bench.plot import Row, quality, quality_bars, work
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, V_COLOR, PointLabel, label, new_panels, place_labels
from remask_lab.records.interval import Shown, judged, percent_text
from remask_lab.records.markdown import percent, text_table
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "uniform-cache": {"refresh_next": (0, 1, 2, 4, 8), "drift": (0.003, 0.03, 0.3)},
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
"""Sampling parameters that are swept alike. `FEWER`: the workload's own number, halved again and again, the least."""

_COLORS = (K_COLOR, V_COLOR, "#2c8c4a")
_MARKERS = "osD"
_COLUMNS = 3
_LARGE_STEP = 20.0  # percent


def measure(args: argparse.Namespace) -> Outcome:
    """Run every point in turn, beside `none`."""
    check_least(args, concurrency=1, rounds=1)
    given, sampling = (_given(name, getattr(args, name[2:].replace("-", "_"))) for name in OPTIONS)
    llm, workload = open_workload(args)
    knobs, left_out = asked_knobs(llm, workload.seeded, given, sampling)
    record = measure_curves(llm, workload.seeded, knobs, args.rounds)
    curves = curves_of(knobs, record)
    parts = [heading(llm, workload), text(curves), *(f"Left out: {each.name}: {each.reason}" for each in left_out)]
    return Outcome(record.about, record.data, "\n\n".join(parts), reading(curves), lambda: figures(curves))


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a policy, or of its sampler, that is swept alone. Without one the policy runs at its defaults."""

    cache: str
    setting: str | None = None
    values: tuple[Any, ...] = (None,)
    of_sampler: bool = False

    def name(self, value: Any) -> str:
        """The name of a point."""
        return self.cache if self.setting is None else f"{self.cache} {self.setting}={value}"

    def contender(self, llm: LLM, workload: Workload, value: Any) -> Contender:
        """A point. Raises `ConfigError` on values that cannot be."""
        changed = {} if self.setting is None else {self.setting: value}
        if not self.of_sampler:
            return replace(contender(llm, self.cache, changed, workload), name=self.name(value))
        other = workload.under(replace(workload.tasks[0].request.params, seed=None, **changed)).seeded
        return replace(contender(llm, self.cache, None, other), name=self.name(value), workload=other)


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured: `none`, and the rows of every knob, in the order of its values.

    Rows are those of `run_bench`, all compared with `none` under the workload's own sampler.
    """

    none: Row
    rows: Mapping[Knob, tuple[Row, ...]]

    @property
    def every(self) -> list[Row]:
        """The rows of all knobs."""
        return [row for own in self.rows.values() for row in own]

    @property
    def by_policy(self) -> dict[str, list[Knob]]:
        """The knobs of each policy."""
        found: dict[str, list[Knob]] = {}
        for knob in self.rows:
            found.setdefault(knob.cache, []).append(knob)
        return found


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
        blocks = even_blocks(workload.tasks[0].request.params)
        least, number = (1, blocks.steps[0]) if setting == "steps_per_block" else (blocks.count, blocks.total_steps)
        shorter = {number // divisor for divisor in (8, 4, 2, 1) if number % (divisor * least) == 0}
        return tuple(sorted({least, *shorter}))
    return tuple(values)


def measure_curves(llm: LLM, workload: Workload, knobs: Sequence[Knob], rounds: int) -> Record:
    """Run `none` and all points in turn, `rounds` times. Returns the bench's record.

    Raises `ConfigError`, before anything is measured, where a point cannot run.
    """
    points = [contender(llm, "none", None, workload)]
    for knob in knobs:
        for value in knob.values:
            try:
                points.append(knob.contender(llm, workload, value))
            except ConfigError as error:
                raise ConfigError(f"at {knob.name(value)}: {error}") from error
    return run_bench(llm, workload, points, rounds, llm.session.engine_config, llm.session.progress)


def curves_of(knobs: Sequence[Knob], record: Record) -> Curves:
    """The rows of a record by the knobs that made them."""
    rows = {row["cache"]: row for row in record.data["results"]}
    return Curves(rows["none"], {knob: tuple(rows[knob.name(at)] for at in knob.values) for knob in knobs})


def _listed(name: str, values: object) -> Sequence[Any]:
    if not listed(name, values, "values"):
        raise ConfigError(f"{name} must hold one value or more, got []; leave the policy out to sweep its usual knobs")
    return listed(name, values, "values")


def _given(option: str, text: str | None) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for name, own in object_option(option, text).items():
        if not isinstance(own, dict):
            raise ConfigError(f"{option}: {name!r} must be an object of settings and their values, got {own!r}")
        found[name] = {setting: _listed(f"{option}: {name}: {setting}", values) for setting, values in own.items()}
    return found


def text(curves: Curves) -> str:
    """One line a point."""
    return text_table(
        [curves.none, *curves.every],
        {
            "": lambda row: str(row["cache"]),
            "quality (95 % interval)": _quality,
            "work %": lambda row: f"{100 * work(row):.1f}",
            "speed": lambda row: f"{row['ratio_to_none']:.2f}x",
        },
    )


def _quality(row: Row) -> str:
    if row["accuracy"] is None:
        return f"{percent(row['agreement_with_none'])} agree"
    return percent_text(row["accuracy"], row["accuracy_interval"])


def reading(curves: Curves) -> str:
    """For each policy, the point of least work that is not shown to lose answers, and the point that falls furthest."""
    parts = [f"Without caching, quality is {percent(quality(curves.none))}."]
    for name, knobs in curves.by_policy.items():
        points = [row for knob in knobs for row in curves.rows[knob]]
        held = [row for row in points if judged(row, curves.none) is not Shown.LOST]
        if not held:
            best = max(points, key=quality)
            parts.append(f"{name} loses answers everywhere; its best point{_at(best)} has {percent(quality(best))}.")
            continue
        cheapest, lowest = min(held, key=work), min(points, key=quality)
        kept = "keeps it" if judged(cheapest, curves.none) is Shown.KEPT else "is not shown to lose it"
        sentence = f"{name} {kept} with {percent(work(cheapest))} of the work{_at(cheapest)}"
        if judged(lowest, curves.none) is Shown.LOST:
            sentence += f", and falls to {percent(quality(lowest))}{_at(lowest)}"
        parts.append(f"{sentence}.")
    return " ".join(parts)


def _at(row: Row) -> str:
    _, _, point = row["cache"].partition(" ")
    return f" at {point}" if point else ""


def figures(curves: Curves) -> dict[str, Figure]:
    """A panel for each policy with knobs, and one for those without. Grey points are those of the other panels."""
    panels = {name: own for name, own in curves.by_policy.items() if own[0].setting is not None}
    fixed = [knob for knob in curves.rows if knob.setting is None]
    count = len(panels) + bool(fixed)
    lines = -(-count // _COLUMNS)
    figure, axes = new_panels(
        "quality against work, one knob moved at a time",
        min(count, _COLUMNS),
        lines,
        height=1.0 + 2.9 * lines,
        width=10.5,
        how="best is the upper left: as good as none (star) with little of its work",
        sharex=True,
        sharey=True,
    )
    for spare in axes[count:]:
        spare.set_visible(False)
    labels = {each: _background(each, curves) for each in axes[:count]}
    for each, (name, knobs) in zip(axes, panels.items(), strict=False):
        label(each, name)
        for knob, color, marker in zip(knobs, cycle(_COLORS), cycle(_MARKERS), strict=False):
            labels[each] += _curve(each, knob, curves.rows[knob], color, marker)
        each.legend(loc="lower right", fontsize="small", framealpha=0.9)
    if fixed:
        label(axes[count - 1], "policies without a knob")
        labels[axes[count - 1]] += _named_points(axes[count - 1], [curves.rows[knob][0] for knob in fixed])
    answered = curves.none["accuracy"] is not None
    figure.supxlabel("row-layers computed (% of no caching)", fontsize="medium")
    figure.supylabel("right answers (%, bars: 95 %)" if answered else "tokens as in none (%)", fontsize="medium")
    place_labels(figure, labels)
    return {"curves": figure}


def _background(axes: Axes, curves: Curves) -> list[PointLabel]:
    places = [100 * work(row) for row in curves.every], [100 * quality(row) for row in curves.every]
    none = 100 * quality(curves.none)
    axes.scatter(*places, s=10, color="#d9d9d9", zorder=1)
    axes.plot(100, none, "*", color="black", markersize=11, zorder=4)
    axes.set(xlim=(0, max(108, *(place + 8 for place in places[0]))), ylim=(-4, 112))
    axes.grid(alpha=0.3)
    return [PointLabel("none", (100, none), needed=True)]


def _curve(axes: Axes, knob: Knob, rows: Sequence[Row], color: str, marker: str) -> list[PointLabel]:
    """Returns the values at its points, those beside a large step first."""
    points = [(f"{at}", 100 * work(row), 100 * quality(row)) for at, row in zip(knob.values, rows, strict=True)]
    _, x, y = zip(*points, strict=True)
    style: dict[str, Any] = {"fmt": f"{marker}-", "markersize": 4, "linewidth": 1.1, "elinewidth": 0.7, "zorder": 3}
    axes.errorbar(x, y, yerr=quality_bars(rows), color=color, label=knob.setting, **style)
    steps = [0.0, *(abs(y - before) for (_, _, before), (_, _, y) in pairwise(points)), 0.0]
    order = sorted(range(len(points)), key=lambda index: max(steps[index : index + 2]) < _LARGE_STEP)
    return [PointLabel(name, (at, high), color) for name, at, high in (points[index] for index in order)]


def _named_points(axes: Axes, rows: Sequence[Row]) -> list[PointLabel]:
    """Returns the names of its points."""
    places = [(100 * work(row), 100 * quality(row)) for row in rows]
    for row, (x, y) in zip(rows, places, strict=True):
        axes.errorbar(x, y, yerr=quality_bars([row]), fmt="o", color=K_COLOR, markersize=4, elinewidth=0.7, zorder=3)
    return [PointLabel(row["cache"], place, needed=True) for row, place in zip(rows, places, strict=True)]

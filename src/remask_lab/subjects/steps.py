"""`remask analyze steps`: certainty, token changes, drift and cost of every pass, by policy.

The same requests run under `none` and under cache policies (thesis, figures 4.2, 6.3, 6.6, A.1 and A.2).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.observe import ObservedPass, observe_passes
from remask.policies import CachePolicy, settings_of
from remask_lab.arguments.common import check_least
from remask_lab.asked.common import compared_policies
from remask_lab.asked.requests import about_requests, open_requests
from remask_lab.bench.names import COMPARED_CACHES
from remask_lab.bench.workload import seeded
from remask_lab.drawing import distinct_line, label, legend_below, log_axis, new_figure, save_figures, whole_ticks
from remask_lab.instruments.distances import Changes
from remask_lab.instruments.series import Floats, Series, Table, as_table, by_pass, mean
from remask_lab.instruments.watch import NONE, Watcher, certainty, check_ends, check_uncached
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 4  # policies whose positions are drawn one by one


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name under every policy."""
    check_least(args, rounds=1)
    llm, requests = open_requests(args)
    named = compared_policies(args, COMPARED_CACHES[llm.loaded.config.kind])
    policies = [(one.name, llm.policy(one.name, one.settings)) for one in named]
    report = measure_steps(llm, requests, policies, args.rounds, progress=llm.progress)
    record = Record("analyze steps", about_requests(args, llm, requests, rounds=args.rounds), asdict(report))
    return Outcome(text(report), record, partial(plot_steps, report), reading(report))


@dataclass(frozen=True, slots=True)
class StepCurves:
    """One policy. Series by pass are means over the requests that ran that pass.

    Attributes:
        cache, settings: the policy.
        passes: of each request.
        entropy: of the predicted positions, in nats, over all tokens but the mask.
        probability: the largest of each predicted position.
        change_rate: share of the response's tokens that the pass changed.
        row_layers: computed by the pass.
        milliseconds: that the pass took when it was not observed, sampling included: median of the rounds.
        k_drift, v_drift: cosine distance of the current block's K (V) to those of the pass before, mean over layers and
            positions, by step within the block. The first step of a block follows another block, and is NaN.
        trajectories: of the first request: the largest probability of each response position by pass,
            [positions][passes]; NaN where it is not predicted.
    """

    cache: str
    settings: dict[str, Any]
    passes: tuple[int, ...]
    entropy: Series
    probability: Series
    change_rate: Series
    row_layers: Series
    milliseconds: Series
    k_drift: Series
    v_drift: Series
    trajectories: Table


@dataclass(frozen=True, slots=True)
class StepsReport:
    """Entropy, probability, token changes, drift and cost by pass, under each policy; `none` comes first."""

    model: str
    kind: str
    requests: int
    rounds: int
    policies: tuple[StepCurves, ...]


def reading(report: StepsReport) -> str:
    """The report in a paragraph."""
    none, *others = report.policies
    work, spent = sum(none.row_layers), sum(none.milliseconds)
    parts = [
        f"Under none {_certain(none)}; a pass changes {100 * mean(np.array(none.change_rate)):.1f} % of the response "
        f"on average, {100 * none.change_rate[0]:.1f} % in the first.",
        _moving(none),
    ]
    for curves in others:
        low, high = min(curves.row_layers), max(curves.row_layers)
        cost = (
            f"every pass computes {low:.0f} row-layers"
            if low == high
            else f"passes compute {low:.0f} to {high:.0f} row-layers"
        )
        parts.append(
            f"Under {curves.cache} {_certain(curves)}; {cost}, {sum(curves.row_layers) / work:.2f} of none's in all, "
            f"in {sum(curves.milliseconds) / spent:.2f} of its time."
        )
    return " ".join(part for part in parts if part)


def _certain(curves: StepCurves) -> str:
    return (
        f"entropy goes from {curves.entropy[0]:.2f} to {curves.entropy[-1]:.2f} nats and the largest probability from "
        f"{curves.probability[0]:.2f} to {curves.probability[-1]:.2f} over {len(curves.entropy)} passes"
    )


def _moving(curves: StepCurves) -> str:
    known = [(step, value) for step, value in enumerate(curves.v_drift, start=1) if not math.isnan(value)]
    if len(known) < 2:
        return ""
    step, most = max(known, key=lambda pair: pair[1])
    last, end = known[-1]
    words = f"The block's V moves most towards step {step} of a block ({most:.2e})"
    return f"{words}, the last." if step == last else f"{words}, and by {end:.2e} towards step {last}, the last."


@dataclass(slots=True)
class StepTrace:
    """What the passes over one canvas showed; each list has an entry a pass, but `drift` one a pair of passes.

    `drift` holds the step within the block of the later pass, and the mean cosine distance of the block's K and V; it
    leaves out pairs that lead from one block to another. `probability` are [predicted], at the response positions in
    `places`.
    """

    length: int
    entropy: list[float] = field(default_factory=list)
    probability: list[Floats] = field(default_factory=list)
    places: list[NDArray[np.int64]] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    drift: list[tuple[int, float, float]] = field(default_factory=list)


class StepTracer:
    """Runs requests of one model one at a time under any policy, and traces their passes."""

    def __init__(self, llm: LLM) -> None:
        self._watcher = Watcher(llm)
        self._trace: StepTrace | None = None
        self._block, self._changes = range(0), Changes()

    def trace(self, item: Request) -> StepTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run."""
        self._trace, self._block = None, range(0)
        self._watcher.run(item, self._observe, self._changed)
        assert self._trace is not None
        return self._trace

    def time(self, item: Request) -> Floats:
        """Seconds of each denoising pass of the request, [passes]; only whether a step has such a pass is observed."""
        engine, seconds, ran = self._watcher.engine, [], []
        attached = observe_passes(engine, lambda passes: ran.append(bool(passes)))
        try:
            engine.add(item)
            while engine.busy:
                ran.clear()
                start = time.perf_counter()
                check_ends(engine.step())
                if any(ran):
                    seconds.append(time.perf_counter() - start)
        finally:
            engine.detach(attached)
        return np.array(seconds)

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        assert self._trace is not None
        self._trace.change_rate.append(float(changed.mean()))

    def _observe(self, observed: ObservedPass) -> None:
        block = observed.block
        if self._trace is None:
            self._trace = StepTrace(observed.end - observed.prompt)
        trace = self._trace
        entropy, probability = certainty(self._watcher.engine.model, observed.hidden)
        trace.entropy.append(mean(entropy))
        trace.probability.append(probability)
        trace.places.append(np.flatnonzero(observed.plan.predict) - observed.prompt)
        trace.row_layers.append(observed.cost)
        if block != self._block:
            self._block, self._changes = block, Changes()
        moved = self._changes.take(observed.kv(slice(block.start, block.stop)))
        if moved is not None:
            k, v = moved.double().mean(dim=(1, 2)).cpu().tolist()
            trace.drift.append((observed.block_step, k, v))


def measure_steps(
    llm: LLM, work: Sequence[Request], policies: Sequence[tuple[str, CachePolicy]], rounds: int, progress: bool = False
) -> StepsReport:
    """Run requests one at a time under `none` and under each of `policies`, and report what every pass did and cost.

    Every request is timed `rounds` times, the policies taking turns, after a run that is observed. A request without a
    seed gets one, so that every policy begins with the same canvas.
    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run, is guided, or names a
    cache of its own.
    """
    if not work:
        raise ConfigError("there is no request whose steps could be measured")
    rows: list[tuple[str, CachePolicy]] = [("none", NONE), *(pair for pair in policies if pair[1] != NONE)]
    work = [seeded(item, index) for index, item in enumerate(work)]
    for item in work:
        check_uncached(item, "the baseline of the steps")
        for name, policy in rows:
            try:
                llm.engine.check(item.with_policy(policy))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    tracers = [StepTracer(llm) for _ in rows]
    traces: list[list[StepTrace]] = [[] for _ in rows]
    seconds: list[list[Floats]] = [[] for _ in rows]
    with tqdm(total=len(work) * len(rows) * (1 + rounds), desc="steps", unit="run", disable=not progress) as bar:
        for item in work:
            turns: list[list[Floats]] = [[] for _ in rows]
            for index, (tracer, (_, policy)) in enumerate(zip(tracers, rows, strict=True)):
                traces[index].append(tracer.trace(replace(item, policy=policy)))
                bar.update()
            for _ in range(rounds):
                for turn, tracer, (_, policy) in zip(turns, tracers, rows, strict=True):
                    turn.append(tracer.time(replace(item, policy=policy)))
                    bar.update()
            for own, turn in zip(seconds, turns, strict=True):
                own.append(np.median(np.stack(turn), axis=0))
    return StepsReport(
        model=llm.loaded.name,
        kind=llm.loaded.config.kind,
        requests=len(work),
        rounds=rounds,
        policies=tuple(
            _curves(name, policy, watched, timed)
            for (name, policy), watched, timed in zip(rows, traces, seconds, strict=True)
        ),
    )


def _curves(name: str, policy: CachePolicy, traces: Sequence[StepTrace], seconds: Sequence[Floats]) -> StepCurves:
    first = traces[0]
    trajectories = np.full((first.length, len(first.places)), np.nan)
    for number, (places, values) in enumerate(zip(first.places, first.probability, strict=True)):
        inside = (places >= 0) & (places < first.length)
        trajectories[places[inside], number] = values[inside]
    drifts = [_by_block_step(traces, side) for side in (1, 2)]
    return StepCurves(
        cache=name,
        settings=settings_of(policy),
        passes=tuple(len(trace.row_layers) for trace in traces),
        entropy=by_pass([np.array(trace.entropy) for trace in traces]),
        probability=by_pass([np.array([mean(values) for values in trace.probability]) for trace in traces]),
        change_rate=by_pass([np.array(trace.change_rate) for trace in traces]),
        row_layers=by_pass([np.array(trace.row_layers, dtype=np.float64) for trace in traces]),
        milliseconds=by_pass([1e3 * own for own in seconds]),
        k_drift=drifts[0],
        v_drift=drifts[1],
        trajectories=as_table(trajectories),
    )


def _by_block_step(traces: Sequence[StepTrace], side: int) -> Series:
    """Mean drift towards each step of a block, over all blocks of all requests."""
    every = [pair for trace in traces for pair in trace.drift]
    steps = 1 + max((pair[0] for pair in every), default=0)
    return tuple(mean(np.array([pair[side] for pair in every if pair[0] == step])) for step in range(steps))


def text(report: StepsReport) -> str:
    """A line a policy, for people."""
    width = max(len(curves.cache) for curves in report.policies) + 2
    lines = [
        f"{report.model}: {report.requests} requests",
        "",
        f"{'':<{width}}{'passes':>7}{'entropy first':>14}{'last':>7}{'changes %':>11}{'row-layers':>12}"
        f"{'ms a pass':>11}",
    ]
    for curves in report.policies:
        passes = len(curves.row_layers)
        lines.append(
            f"{curves.cache:<{width}}{sum(curves.passes):>7}{curves.entropy[0]:>14.2f}{curves.entropy[-1]:>7.2f}"
            f"{100 * sum(curves.change_rate) / passes:>11.2f}{sum(curves.row_layers):>12.0f}"
            f"{sum(curves.milliseconds) / passes:>11.2f}"
        )
    return "\n".join(lines)


def plot_steps(report: StepsReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {
        "steps-tokens": _draw_tokens(report),
        "steps-cost": _draw_cost(report),
        "steps-probability": _draw_positions(report),
    }
    if any(np.isfinite(curves.v_drift).any() for curves in report.policies):
        figures["steps-drift"] = _draw_drift(report)
    return save_figures(figures, folder, report.model)


def _draw_tokens(report: StepsReport) -> Figure:
    """Entropy, largest probability and changes by pass (thesis, figures 4.2, 6.6 and A.1)."""
    # A schedule that changes as many tokens in every pass needs no panel.
    changing = any(max(each.change_rate) - min(each.change_rate) > 1e-9 for each in report.policies)
    figure = new_figure(
        "certainty from pass to pass",
        width=10 if changing else 8,
        how="a cache whose line leaves that of none predicts other tokens from there on",
    )
    left, middle, *others = figure.subplots(1, 3 if changing else 2)
    for index, curves in enumerate(report.policies):
        _draw_line(left, index, curves, curves.entropy)
        _draw_line(middle, index, curves, curves.probability)
        for right in others:
            _draw_line(right, index, curves, tuple(100 * rate for rate in curves.change_rate))
    label(left, "uncertainty of the predicted positions", "pass", "mean entropy (nats)")
    label(middle, "confidence in them", "pass", "mean largest probability")
    middle.set_ylim(0, 1.03)
    for right in others:
        label(right, "tokens changed", "pass", "share of the response (%)")
    for axes in (left, *others):
        axes.set_ylim(bottom=0)
    legend_below(figure, min(4, len(report.policies)), figure.axes[0], "outside lower center")
    return figure


def _draw_cost(report: StepsReport) -> Figure:
    """Row-layers and milliseconds by pass (thesis, figure 6.3)."""
    figure = new_figure(
        "cost of each pass", width=9, how="lower is cheaper; where a line jumps up, the policy refreshes"
    )
    left, right = figure.subplots(1, 2)
    for index, curves in enumerate(report.policies):
        _draw_line(left, index, curves, curves.row_layers)
        _draw_line(right, index, curves, curves.milliseconds)
    log_axis(left, "y", [value for curves in report.policies for value in curves.row_layers])
    label(left, "work", "pass", "row-layers")
    log_axis(right, "y", [value for curves in report.policies for value in curves.milliseconds])
    label(right, "time, one request at a time", "pass", "milliseconds")
    legend_below(figure, min(4, len(report.policies)), figure.axes[0], "outside lower center")
    return figure


def _draw_drift(report: StepsReport) -> Figure:
    """Drift of the block within the block (thesis, figure A.2)."""
    figure = new_figure(
        "drift of the current block by step within the block",
        width=9,
        how="a fall to the right means that the block's K/V settle",
    )
    for axes, side in zip(figure.subplots(1, 2, sharey=True), ("k", "v"), strict=True):
        for index, curves in enumerate(report.policies):
            # A logarithm of 0 would be drawn as a line to the bottom.
            _draw_line(axes, index, curves, tuple(value or np.nan for value in getattr(curves, f"{side}_drift")))
        log_axis(axes, "y", [v for curves in report.policies for v in (*curves.k_drift, *curves.v_drift)])
        label(axes, side.upper(), "step within the block, compared with the one before")
    figure.axes[0].set_ylabel("mean cosine distance")
    legend_below(figure, min(4, len(report.policies)), figure.axes[0], "outside lower center")
    return figure


def _draw_positions(report: StepsReport) -> Figure:
    """Trajectories of the largest probability, a panel for each policy."""
    shown = report.policies[:PANELS]
    figure = new_figure(
        "largest probability of each predicted position, first request",
        width=3.2 * len(shown) + 1.4,
        how="a row ends where its position is decoded; yellow is certain",
    )
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, curves in zip(panels, shown, strict=True):
        table = np.array(curves.trajectories, dtype=np.float64)
        edges = (0.5, table.shape[1] + 0.5, len(table) + 0.5, 0.5)
        axes.set_facecolor("#dddddd")
        image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto", extent=edges, interpolation="nearest")
        label(axes, curves.cache, "pass")
        for axis in (axes.xaxis, axes.yaxis):
            whole_ticks(axis, 6)
    panels[0].set_ylabel("response position")
    figure.colorbar(image, ax=list(panels), label="probability (grey: not predicted)", shrink=0.9)
    return figure


def _draw_line(axes: Axes, index: int, curves: StepCurves, values: Series) -> None:
    distinct_line(axes, index, range(1, len(values) + 1), values, curves.cache)
    whole_ticks(axes.xaxis, 8)
    axes.grid(alpha=0.3)

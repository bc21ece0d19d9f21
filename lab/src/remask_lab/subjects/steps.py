"""`remask analyze steps`: certainty, token changes, drift and cost of every pass, by policy.

The same requests run under `none` and under cache policies (thesis, figures 4.2, 6.3, 6.6, A.1 and A.2).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.transformer import Transformer
from remask.policies import CachePolicy, settings_of
from remask_lab.asked import Outcome, about_requests, check_least, compared_policies, open_requests
from remask_lab.bench.names import COMPARED_CACHES
from remask_lab.bench.workload import seeded
from remask_lab.drawing import distinct_line, heatmap, label, legend_below, log_axis, new_panels
from remask_lab.instruments.series import Changes, Floats, Series, Table, as_table, by_pass, mean
from remask_lab.instruments.watch import NONE, Trace, Watcher, certainty, check_ends, check_uncached
from remask_lab.observe import ObservedPass, observe_passes
from remask_lab.records.markdown import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 4  # policies whose positions are drawn one by one


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name under every policy."""
    check_least(args, rounds=1)
    llm, requests = open_requests(args)
    named = compared_policies(args, COMPARED_CACHES[llm.loaded.config.kind])
    policies = [(one.name, llm.session.policy(one.name, one.settings)) for one in named]
    report = measure_steps(llm, requests, policies, args.rounds, progress=llm.session.progress)
    facts = about_requests(args, llm, requests, rounds=args.rounds)
    return Outcome(facts, asdict(report), text(report), reading(report), lambda: figures(report))


@dataclass(frozen=True, slots=True)
class StepCurves:
    """One policy. Series by pass are means over the requests that ran that pass.

    Attributes:
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


@dataclass(slots=True)
class StepTrace(Trace):
    """What the passes of `model` over one canvas showed; lists have an entry a pass, but `drift` one a pair of passes.

    `drift` holds the step within the block of the later pass, and the mean cosine distance of the block's K and V; it
    leaves out pairs that lead from one block to another. `probability` are [predicted], at the response positions in
    `places`.
    """

    model: Transformer
    length: int = 0
    entropy: list[float] = field(default_factory=list)
    probability: list[Floats] = field(default_factory=list)
    places: list[NDArray[np.int64]] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    drift: list[tuple[int, float, float]] = field(default_factory=list)
    _block: range = range(0)
    _changes: Changes = field(default_factory=Changes)

    def change(self, changed: NDArray[np.bool_]) -> None:
        self.change_rate.append(float(changed.mean()))

    def observe(self, seen: ObservedPass) -> None:
        block, self.length = seen.block, seen.end - seen.prompt
        entropy, probability = certainty(self.model, seen.hidden)
        self.entropy.append(mean(entropy))
        self.probability.append(probability)
        self.places.append(np.flatnonzero(seen.plan.predict) - seen.prompt)
        self.row_layers.append(seen.cost)
        if block != self._block:
            self._block, self._changes = block, Changes()
        moved = self._changes.take(seen.kv(slice(block.start, block.stop)))
        if moved is not None:
            k, v = moved.double().mean(dim=(1, 2)).cpu().tolist()
            self.drift.append((seen.block_step, k, v))


def time_passes(watcher: Watcher, item: Request) -> Floats:
    """Seconds of each denoising pass of the request, [passes]; only whether a step has such a pass is observed."""
    engine, seconds, ran = watcher.engine, [], []
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
    watchers = [Watcher(llm) for _ in rows]
    traces: list[list[StepTrace]] = [[] for _ in rows]
    seconds: list[list[Floats]] = [[] for _ in rows]
    for item in tqdm(work, desc="steps", unit="request", disable=not progress):
        own = [item.with_policy(policy) for _, policy in rows]
        for watcher, request, found in zip(watchers, own, traces, strict=True):
            found.append(watcher.trace(request, StepTrace(watcher.engine.model)))
        turns = [[time_passes(*pair) for pair in zip(watchers, own, strict=True)] for _ in range(rounds)]
        for times, turn in zip(seconds, zip(*turns, strict=True), strict=True):
            times.append(np.median(np.stack(turn), axis=0))
    curves = (_curves(*row, own, times) for row, own, times in zip(rows, traces, seconds, strict=True))
    return StepsReport(llm.loaded.name, llm.loaded.config.kind, len(work), rounds, tuple(curves))


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
        entropy=by_pass([trace.entropy for trace in traces]),
        probability=by_pass([list(map(mean, trace.probability)) for trace in traces]),
        change_rate=by_pass([trace.change_rate for trace in traces]),
        row_layers=by_pass([trace.row_layers for trace in traces]),
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
        cost = f"every pass computes {low:.0f}" if low == high else f"passes compute {low:.0f} to {high:.0f}"
        parts.append(
            f"Under {curves.cache} {_certain(curves)}; {cost} row-layers, {sum(curves.row_layers) / work:.2f} of "
            f"none's in all, in {sum(curves.milliseconds) / spent:.2f} of its time."
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
    said = f"The block's V moves most towards step {step} of a block ({most:.2e})"
    return f"{said}, the last." if step == last else f"{said}, and by {end:.2e} towards step {last}, the last."


def text(report: StepsReport) -> str:
    """A line a policy, for people."""
    table = text_table(
        report.policies,
        {
            "": lambda curves: curves.cache,
            "passes": lambda curves: str(sum(curves.passes)),
            "entropy first": lambda curves: f"{curves.entropy[0]:.2f}",
            "last": lambda curves: f"{curves.entropy[-1]:.2f}",
            "changes %": lambda curves: f"{100 * np.mean(curves.change_rate):.2f}",
            "row-layers": lambda curves: f"{sum(curves.row_layers):.0f}",
            "ms a pass": lambda curves: f"{np.mean(curves.milliseconds):.2f}",
        },
    )
    return f"{report.model}: {report.requests} requests\n\n{table}"


def figures(report: StepsReport) -> dict[str, Figure]:
    """Certainty, cost and single positions by pass, and drift where a block has several."""
    found = {"steps-tokens": _tokens(report), "steps-cost": _cost(report), "steps-probability": _positions(report)}
    if any(np.isfinite(curves.v_drift).any() for curves in report.policies):
        found["steps-drift"] = _drift(report)
    return found


def _lines(axes: Axes, report: StepsReport, values: Callable[[StepCurves], Sequence[float]]) -> None:
    for index, curves in enumerate(report.policies):
        own = values(curves)
        distinct_line(axes, index, range(1, len(own) + 1), own, curves.cache)


def _legend(figure: Figure, report: StepsReport) -> None:
    legend_below(figure, min(4, len(report.policies)), figure.axes[0], "outside lower center")


def _tokens(report: StepsReport) -> Figure:
    """Entropy, largest probability and changes by pass (thesis, figures 4.2, 6.6 and A.1)."""
    # A schedule that changes as many tokens in every pass needs no panel.
    changing = any(max(each.change_rate) - min(each.change_rate) > 1e-9 for each in report.policies)
    figure, panels = new_panels(
        "certainty from pass to pass",
        3 if changing else 2,
        width=10 if changing else 8,
        how="a cache whose line leaves that of none predicts other tokens from there on",
    )
    series: list[tuple[str, str, Callable[[StepCurves], Sequence[float]]]] = [
        ("uncertainty of the predicted positions", "mean entropy (nats)", lambda each: each.entropy),
        ("confidence in them", "mean largest probability", lambda each: each.probability),
        ("tokens changed", "share of the response (%)", lambda each: [100 * rate for rate in each.change_rate]),
    ]
    for axes, (title, y, values) in zip(panels, series, strict=False):
        _lines(axes, report, values)
        label(axes, title, "pass", y, grid="both", ticks=8, floor=True)
    panels[1].set_ylim(0, 1.03)
    _legend(figure, report)
    return figure


def _cost(report: StepsReport) -> Figure:
    """Row-layers and milliseconds by pass (thesis, figure 6.3)."""
    how = "lower is cheaper; where a line jumps up, the policy refreshes"
    figure, panels = new_panels("cost of each pass", 2, width=9, how=how)
    series: list[tuple[str, str, Callable[[StepCurves], Series]]] = [
        ("work", "row-layers", lambda each: each.row_layers),
        ("time, one request at a time", "milliseconds", lambda each: each.milliseconds),
    ]
    for axes, (title, y, values) in zip(panels, series, strict=True):
        _lines(axes, report, values)
        log_axis(axes, "y", [value for curves in report.policies for value in values(curves)])
        label(axes, title, "pass", y, grid="both", ticks=8)
    _legend(figure, report)
    return figure


def _drift(report: StepsReport) -> Figure:
    """Drift of the block within the block (thesis, figure A.2)."""
    how = "a fall to the right means that the block's K/V settle"
    title = "drift of the current block by step within the block"
    figure, panels = new_panels(title, 2, width=9, how=how, sharey=True)
    for axes, side in zip(panels, ("k", "v"), strict=True):
        # A logarithm of 0 would be drawn as a line to the bottom.
        _lines(axes, report, lambda each: [value or np.nan for value in getattr(each, f"{side}_drift")])  # noqa: B023
        log_axis(axes, "y", [v for curves in report.policies for v in (*curves.k_drift, *curves.v_drift)])
        label(axes, side.upper(), "step within the block, compared with the one before", grid="both", ticks=8)
    panels[0].set_ylabel("mean cosine distance")
    _legend(figure, report)
    return figure


def _positions(report: StepsReport) -> Figure:
    """Trajectories of the largest probability, a panel for each policy."""
    shown = report.policies[:PANELS]
    figure, panels = new_panels(
        "largest probability of each predicted position, first request",
        len(shown),
        width=3.2 * len(shown) + 1.4,
        how="a row ends where its position is decoded; yellow is certain",
        sharey=True,
    )
    for axes, curves in zip(panels, shown, strict=True):
        axes.set_facecolor("#dddddd")
        image = heatmap(axes, curves.trajectories, low=0, high=1)
        label(axes, curves.cache, "pass")
    panels[0].set_ylabel("response position")
    figure.colorbar(image, ax=panels, label="probability (grey: not predicted)", shrink=0.9)
    return figure

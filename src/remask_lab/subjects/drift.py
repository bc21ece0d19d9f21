"""`remask analyze drift`: what changes from pass to pass in a model without a cache.

Requests run under `none`. The definitions are those of the thesis "Block-Wise KV Caching for Uniform Diffusion Language
Models", sections 6.5 and 6.6; `docs/analysis.md` states the choices that it leaves open.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.request import Request
from remask.llm import LLM
from remask.observe import ObservedPass
from remask_lab.asked.requests import about_requests, open_requests
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, log_axis, new_figure, save_figures, whole_ticks
from remask_lab.instruments.distances import Changes
from remask_lab.instruments.mass import QueryTap, attention_mass
from remask_lab.instruments.moments import Moments, off_diagonal_mean
from remask_lab.instruments.regions import REGIONS, SINK, Regions, regions, words
from remask_lab.instruments.series import Floats, Series, Table, as_table, by_pass, mean
from remask_lab.instruments.watch import UncachedWatcher, certainty
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DISTANCES = (0.001, 0.01, 0.1)
"""Cosine distances that `DriftReport.v_moved` counts."""
COLORS = ("#7f7f7f", "#8c564b", "#9467bd", "#1f77b4", "#d62728", "#ff7f0e", "#2ca02c", "#17becf")  # of `REGIONS`


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name and compare their passes."""
    llm, requests = open_requests(args)
    report = measure_drift(llm, requests, progress=llm.progress)
    record = Record("analyze drift", about_requests(args, llm, requests), asdict(report))
    return Outcome(text(report), record, partial(plot_drift, report), reading(report))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    `passes` counts the denoising steps of each request. Prompt and response tokens are those of the longest ones.
    """

    model: str
    family: str
    kind: str
    layers: int
    dtype: str
    passes: tuple[int, ...]
    prompt_tokens: int
    response_tokens: int
    block_length: int


@dataclass(frozen=True, slots=True)
class RegionMeans:
    """Means over all positions and passes of one region. Drift is a cosine distance per pass, NaN for too few passes.

    `k_within` and `v_within` leave out the pairs from a block's last pass to the next block's first. `attention` counts
    passes without the region as 0, so that the shares of all regions sum to 1.
    """

    k_drift: float
    v_drift: float
    k_within: float
    v_within: float
    attention: float


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Drift, attention mass and token dynamics of one model.

    Attributes:
        regions: by name, those that the canvases have.
        k_drift, v_drift, attention: by region and pass. Drift leads to the pass at that index, so the first is NaN.
        change_rate: share of the response's tokens that each pass changed.
        entropy: mean over the predicted positions of each pass, in nats.
        k_layers, v_layers: Pearson's r of drift between layers, [layers][layers].
        k_layers_mean, v_layers_mean: the means of their entries off the diagonal.
        kv_correlation: Pearson's r between the drift of K and of V.
        v_moved: for each of `DISTANCES` and each layer, of the rows of the block being denoised the share whose V moved
            further between two passes of the block, [distances][layers]. NaN where no block has two passes.
    """

    subject: Measured
    regions: dict[str, RegionMeans]
    k_drift: dict[str, Series]
    v_drift: dict[str, Series]
    attention: dict[str, Series]
    change_rate: Series
    entropy: Series
    k_layers: Table
    v_layers: Table
    k_layers_mean: float
    v_layers_mean: float
    kv_correlation: float
    v_moved: Table


def reading(report: DriftReport) -> str:
    """The report in a paragraph: where K and V move, what gets attention, how tokens settle."""
    moved = {
        name: (means.k_drift + means.v_drift) / 2
        for name, means in report.regions.items()
        if name != "bias" and not math.isnan(means.k_drift)
    }
    parts = []
    if moved:
        most, least = max(moved, key=lambda name: moved[name]), min(moved, key=lambda name: moved[name])
        parts.append(
            f"K and V move most in the region {words(most)} ({moved[most]:.2e} a pass) and least in {words(least)} "
            f"({moved[least]:.2e})."
        )
        still = [name for name, means in report.regions.items() if name in moved and means.v_within == 0]
        if still:
            parts.append(f"Within a block {', '.join(map(words, still))} do not move at all.")
    else:
        parts.append("No request has two passes, so nothing is known of drift.")
    attended = sorted(report.regions, key=lambda name: -report.regions[name].attention)[:2]
    shares = " and ".join(f"{words(name)} ({100 * report.regions[name].attention:.1f} %)" for name in attended)
    parts.append(
        f"The current block attends most to {shares}. A pass changes "
        f"{100 * sum(report.change_rate) / len(report.change_rate):.2f} % of the response, and entropy goes from "
        f"{report.entropy[0]:.2f} to {report.entropy[-1]:.2f} nats."
    )
    if not math.isnan(report.kv_correlation):
        parts.append(f"Drift of K and of V correlate by {report.kv_correlation:.2f}.")
    return " ".join(parts)


@dataclass(slots=True)
class DriftTrace:
    """What P passes over one canvas of T positions showed.

    Attributes:
        prompt, response, block: tokens of the prompt, of the response and of a block.
        moments: of the drift by layer.
        region: of every position in every pass, P arrays int8 [T].
        starts: the first position of each pass' block, P numbers.
        k_drift: how far each position's K moved between pass and next pass, P - 1 arrays [T]: the cosine distance with
            the heads concatenated, mean over layers. NaN where a position was not computed in both.
        v_drift: the same of V.
        attention: share of attention that the block's queries give to each of `REGIONS`, P arrays [8].
        entropy: of the predicted positions in nats, over all tokens but the mask; P arrays.
        change_rate: share of the response's tokens that each pass changed, P numbers.
        block_v: V drift of the block's rows in each layer, an array [layers, block] for each pair of passes of a block.
    """

    prompt: int
    response: int
    block: int
    moments: Moments
    region: list[Regions] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    k_drift: list[Floats] = field(default_factory=list)
    v_drift: list[Floats] = field(default_factory=list)
    attention: list[Floats] = field(default_factory=list)
    entropy: list[Floats] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)
    block_v: list[Floats] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """How many denoising steps were run."""
        return len(self.starts)


class DriftTracer:
    """Runs requests of one model one at a time under `none`, on an engine of its own, and traces them."""

    def __init__(self, llm: LLM) -> None:
        self._tap = QueryTap(llm.model.attention)
        self.watcher = UncachedWatcher(llm, "drift", self._tap)
        self._trace: DriftTrace | None = None
        self._changes = Changes()

    def trace(self, item: Request) -> DriftTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self._trace, self._changes = None, Changes()
        self.watcher.run(item, self._observe, self._changed)
        assert self._trace is not None
        return self._trace

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        assert self._trace is not None
        self._trace.change_rate.append(float(changed.mean()))

    def _observe(self, observed: ObservedPass) -> None:
        model, block = self.watcher.engine.model, observed.block
        if self._trace is None:
            moments = Moments(model.config.layers)
            self._trace = DriftTrace(observed.prompt, observed.end - observed.prompt, observed.block_length, moments)
        trace = self._trace
        trace.starts.append(block.start)
        trace.region.append(regions(len(observed.tokens), observed.prompt, observed.end, block.start, trace.block))
        trace.entropy.append(certainty(model, observed.hidden)[0])
        queries, self._tap.queries = self._tap.queries, []
        kept = observed.kv(slice(observed.leading))
        trace.attention.append(self._attention(trace.region[-1], observed, queries, kept))
        moved = self._changes.take(kept)
        if moved is not None:
            k_moved, v_moved = moved.cpu().double().numpy()
            trace.moments.add(k_moved, v_moved)
            if trace.starts[-2] == block.start:
                trace.block_v.append(v_moved[:, block.start : block.stop])
            for drifts, by_layer in ((trace.k_drift, k_moved), (trace.v_drift, v_moved)):
                drift = np.full(len(observed.tokens), np.nan)
                drift[: by_layer.shape[1]] = by_layer.mean(axis=0)
                drifts.append(drift)

    def _attention(
        self, region: Regions, observed: ObservedPass, queries: Sequence[Tensor], kept: Sequence[tuple[Tensor, Tensor]]
    ) -> Floats:
        """The share of attention that the block's queries give to each of `REGIONS`, [8]: mean over layers."""
        model, plan, block = self.watcher.engine.model, observed.plan, observed.block
        reach = observed.leading if plan.sees is None else min(observed.leading, int(plan.sees[block.start]))
        keys = torch.from_numpy(region[:reach].astype(np.int64)).to(model.device)
        mass = torch.zeros(len(REGIONS), device=model.device)
        for weights, q, (k, _) in zip(model.weights.layers, queries, kept, strict=True):
            mass += attention_mass(q[block.start : block.stop], k[:reach], keys, weights.sink_k, model.config.score_cap)
        shares: Floats = (mass / len(kept)).cpu().double().numpy()
        return shares


def measure_drift(llm: LLM, work: Sequence[Request], progress: bool = False) -> DriftReport:
    """Run requests one at a time under `none` and report what changed from pass to pass.

    Nothing of `llm` is changed, and its engine does not run. Raises `ConfigError`, before anything runs, where there is
    no request, or one cannot run or asks for a cache.
    """
    tracer = DriftTracer(llm)
    return summarise(llm, tracer.watcher.trace_all(tracer.trace, work, progress))


def summarise(llm: LLM, traces: Sequence[DriftTrace]) -> DriftReport:
    """The report of `traces`, which are not changed."""
    shape = llm.loaded.config
    moments = Moments(shape.layers)
    for trace in traces:
        moments.merge(trace.moments)
    present = [index for index in range(len(REGIONS)) if _exists(index, traces, sink=shape.sink)]
    k_layers, v_layers = moments.layer_correlations()
    return DriftReport(
        subject=Measured(
            model=llm.loaded.name,
            family=shape.family,
            kind=shape.kind,
            layers=shape.layers,
            dtype=str(llm.model.dtype).removeprefix("torch."),
            passes=tuple(trace.passes for trace in traces),
            prompt_tokens=max(trace.prompt for trace in traces),
            response_tokens=max(trace.response for trace in traces),
            block_length=max(trace.block for trace in traces),
        ),
        regions={REGIONS[index]: _means(index, traces) for index in present},
        k_drift={REGIONS[index]: by_pass([_drift(t, t.k_drift, index) for t in traces]) for index in present},
        v_drift={REGIONS[index]: by_pass([_drift(t, t.v_drift, index) for t in traces]) for index in present},
        attention={REGIONS[index]: by_pass([_attention(t, index) for t in traces]) for index in present},
        change_rate=by_pass([np.array(trace.change_rate) for trace in traces]),
        entropy=by_pass([np.array([mean(e) for e in trace.entropy]) for trace in traces]),
        k_layers=as_table(k_layers),
        v_layers=as_table(v_layers),
        k_layers_mean=off_diagonal_mean(k_layers),
        v_layers_mean=off_diagonal_mean(v_layers),
        kv_correlation=moments.kv_correlation(),
        v_moved=as_table(_moved_further(shape.layers, traces)),
    )


def _moved_further(layers: int, traces: Sequence[DriftTrace]) -> Floats:
    """What `DriftReport.v_moved` holds, [distances, layers]."""
    pairs = [moved for trace in traces for moved in trace.block_v]
    if not pairs:
        return np.full((len(DISTANCES), layers), np.nan)
    moved = np.concatenate(pairs, axis=1)
    shares: Floats = np.stack([(moved > distance).mean(axis=1) for distance in DISTANCES])
    return shares


def _exists(index: int, traces: Sequence[DriftTrace], *, sink: bool) -> bool:
    """Whether any block's queries could attend to a region: a block-causal canvas has no rows after the block."""
    if index == SINK:
        return sink
    return any((mass[index] > 0) for trace in traces for mass in trace.attention)


def _means(index: int, traces: Sequence[DriftTrace]) -> RegionMeans:
    attention = np.concatenate([[mass[index] for mass in trace.attention] for trace in traces])
    if index == SINK:  # it is a weight, and never moves
        return RegionMeans(0.0, 0.0, 0.0, 0.0, mean(attention))
    return RegionMeans(
        k_drift=_pooled([_moved(trace, trace.k_drift, index) for trace in traces]),
        v_drift=_pooled([_moved(trace, trace.v_drift, index) for trace in traces]),
        k_within=_pooled([_moved(trace, trace.k_drift, index, within=True) for trace in traces]),
        v_within=_pooled([_moved(trace, trace.v_drift, index, within=True) for trace in traces]),
        attention=mean(attention),
    )


def _pooled(moved: Sequence[Sequence[Floats]]) -> float:
    """Mean over all positions of all pairs of passes of all requests."""
    return mean(np.concatenate([np.empty(0), *(values for one in moved for values in one)]))


def _moved(trace: DriftTrace, drifts: Sequence[Floats], index: int, *, within: bool = False) -> list[Floats]:
    """Drift of the region's positions, an array for each pair of passes; `within` leaves out pairs across blocks."""
    return [
        drift[trace.region[after] == index]
        for after, drift in enumerate(drifts, start=1)
        if not within or trace.starts[after] == trace.starts[after - 1]
    ]


def _drift(trace: DriftTrace, drifts: Sequence[Floats], index: int) -> Floats:
    """Mean drift of a region that leads to each pass, [passes]."""
    if index == SINK:
        return np.array([np.nan] + [0.0] * len(drifts))
    return np.array([np.nan, *map(mean, _moved(trace, drifts, index))])


def _attention(trace: DriftTrace, index: int) -> Floats:
    """The region's share in each pass, [passes]; NaN where the canvas has no such region then."""
    shares = [
        mass[index] if index == SINK or (region == index).any() else np.nan
        for mass, region in zip(trace.attention, trace.region, strict=True)
    ]
    return np.array(shares)


def text(report: DriftReport) -> str:
    """The means by region and the correlations, for people."""
    subject = report.subject
    lines = [
        f"{subject.model}: {subject.family}, {subject.layers} layers, {subject.dtype}; {len(subject.passes)} requests, "
        f"{sum(subject.passes)} passes, blocks of {subject.block_length}",
        "",
        "             drift, cosine distance a pass       within a block",
        f"{'region':<12}{'K':>12}{'V':>12}{'K':>12}{'V':>12}{'attention %':>13}",
    ]
    for name, means in report.regions.items():
        drifts = (means.k_drift, means.v_drift, means.k_within, means.v_within)
        lines.append(f"{name:<12}" + "".join(f"{value:>12.2e}" for value in drifts) + f"{100 * means.attention:>13.1f}")
    lines += [
        "",
        f"tokens changed a pass: {100 * sum(report.change_rate) / len(report.change_rate):.2f} % of the response",
        f"entropy: {report.entropy[0]:.2f} nats in the first pass, {report.entropy[-1]:.2f} in the last",
        f"correlation of K and V drift: {report.kv_correlation:.2f}; between layers: K {report.k_layers_mean:.2f}, "
        f"V {report.v_layers_mean:.2f}",
        "",
        "share of the block's rows whose V moves further than a distance between two passes, %, by layer",
        *(
            f"{distance:<8g}" + "".join(f"{100 * share:>7.1f}" for share in shares)
            for distance, shares in zip(DISTANCES, report.v_moved, strict=True)
        ),
    ]
    return "\n".join(lines)


def plot_drift(report: DriftReport, folder: str | Path) -> list[Path]:
    """Draw four PNG files into `folder`, which is made if it is not there, and return their paths.

    Raises `ConfigError` where the folder cannot be made.
    """
    figures = {
        "drift-regions": _draw_regions(report),
        "drift-passes": _draw_passes(report),
        "drift-tokens": _draw_tokens(report),
        "drift-layers": _draw_layers(report),
    }
    return save_figures(figures, folder, report.subject.model)


def _draw_regions(report: DriftReport) -> Figure:
    """Bars of drift and of attention mass."""
    figure = new_figure("drift and attention mass by region")
    left, right = figure.subplots(1, 2)
    names = [name for name in report.regions if name != "bias"]  # a weight: its drift is 0 by construction
    places = np.arange(len(names))
    means = [report.regions[name] for name in names]
    for side, color, shift in (("K", K_COLOR, -0.2), ("V", V_COLOR, 0.2)):
        whole = [m.k_drift if side == "K" else m.v_drift for m in means]
        within = [m.k_within if side == "K" else m.v_within for m in means]
        left.barh(places + shift, whole, 0.36, color=color, label=f"{side}, all passes")
        left.plot(within, places + shift, "|", color="black", markersize=9, markeredgewidth=2)
    left.plot([], [], "|", color="black", markersize=9, markeredgewidth=2, label="within a block")
    left.set_yticks(places, [words(name) for name in names])
    left.invert_yaxis()
    log_axis(left, "x", [x for m in means for x in (m.k_drift, m.v_drift, m.k_within, m.v_within)])
    label(left, "K/V drift", "mean cosine distance per pass")
    left.grid(axis="x", alpha=0.3)
    left.set_axisbelow(True)
    shares = {name: 100 * m.attention for name, m in report.regions.items()}
    colors = [_color(name) for name in shares]
    bars = right.barh([words(name) for name in shares], list(shares.values()), color=colors)
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize="small")
    right.invert_yaxis()
    right.set_xlim(0, 1.15 * max(shares.values()))
    label(right, "attention of the current block", "attention mass (%)")
    legend_below(figure, 3, left)
    return figure


def _draw_passes(report: DriftReport) -> Figure:
    """Drift and attention over passes, one line a region."""
    figure = new_figure("drift and attention mass from pass to pass", height=5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    # A logarithm of 0 would be drawn as a line to the bottom.
    moving = {
        name: tuple((k + v) / 2 or math.nan for k, v in zip(report.k_drift[name], report.v_drift[name], strict=True))
        for name in report.k_drift
        if name != "bias"
    }
    _draw_lines(upper, moving)
    log_axis(upper, "y", [value for series in moving.values() for value in series])
    label(upper, "drift, mean of K and V (none where it is 0)", y="cosine distance per pass")
    _draw_lines(lower, {name: tuple(100 * x for x in series) for name, series in report.attention.items()})
    label(lower, "attention of the current block", "pass", "attention mass (%)")
    lower.set_ylim(bottom=0)
    whole_ticks(lower.xaxis, 10)
    figure.legend(
        *lower.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False, title="region"
    )
    return figure


def _draw_lines(axes: Axes, series: Mapping[str, Series]) -> None:
    for name, values in series.items():
        passes = range(1, len(values) + 1)
        axes.plot(passes, values, ".-", color=_color(name), linewidth=1.2, markersize=5, label=words(name))
    axes.grid(alpha=0.3)


def _color(region: str) -> str:
    return COLORS[REGIONS.index(region)]


def _draw_tokens(report: DriftReport) -> Figure:
    """Entropy and token changes over passes."""
    figure = new_figure("entropy and token changes from pass to pass")
    left, right = figure.subplots(1, 2)
    passes = range(1, len(report.entropy) + 1)
    left.plot(passes, report.entropy, ".-", color=K_COLOR, linewidth=1.2, markersize=4)
    label(left, "uncertainty of the predicted positions", "pass", "mean entropy (nats)")
    right.plot(passes, [100 * rate for rate in report.change_rate], ".-", color=V_COLOR, linewidth=1.2, markersize=4)
    label(right, "tokens changed", "pass", "share of the response (%)")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        whole_ticks(axes.xaxis, 8)
        axes.grid(alpha=0.3)
    return figure


def _draw_layers(report: DriftReport) -> Figure:
    """Pearson's r of drift between layers, K beside V."""
    figure = new_figure(f"correlation of drift between layers (K with V: r = {report.kv_correlation:.2f})")
    panels = figure.subplots(1, 2)
    sides = (("K", report.k_layers, report.k_layers_mean), ("V", report.v_layers, report.v_layers_mean))
    edges = (0.5, report.subject.layers + 0.5)
    for axes, (side, r, average) in zip(panels, sides, strict=True):
        image = axes.imshow(np.array(r), vmin=-1, vmax=1, cmap="RdBu_r", extent=(*edges, *edges[::-1]))
        label(axes, f"{side}: mean off the diagonal {average:.2f}", "layer", "layer")
        for axis in (axes.xaxis, axes.yaxis):
            whole_ticks(axis, 8)
    figure.colorbar(image, ax=panels, label="Pearson's r", shrink=0.85)
    return figure

"""`remask analyze drift`: what changes from pass to pass in a model, without a cache or under one.

The definitions are those of the thesis "Block-Wise KV Caching for Uniform Diffusion Language
Models", sections 6.5 and 6.6; `docs/lab/analysis.md` states the choices that it leaves open.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.cli.options import object_option
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.transformer import Transformer
from remask.plan.spans import Span
from remask.policies import CachePolicy
from remask_lab.asked import Outcome, about_requests, open_requests
from remask_lab.drawing import K_COLOR, V_COLOR, heatmap, label, legend_below, log_axis, new_panels
from remask_lab.instruments.attention import REGIONS, SINK, QueryTap, Regions, attention_mass, regions, words
from remask_lab.instruments.series import (
    Changes,
    Floats,
    Moments,
    Series,
    Table,
    as_table,
    by_pass,
    mean,
    off_diagonal_mean,
)
from remask_lab.instruments.watch import Trace, UncachedWatcher, certainty
from remask_lab.observe import ObservedPass
from remask_lab.records.markdown import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DISTANCES = (0.001, 0.01, 0.1)
"""Cosine distances that `DriftReport.v_moved` counts."""
COLORS = ("#7f7f7f", "#8c564b", "#9467bd", "#1f77b4", "#d62728", "#ff7f0e", "#2ca02c", "#17becf")  # of `REGIONS`


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name and compare their passes."""
    llm, requests = open_requests(args)
    settings = object_option("--cache-config", args.cache_config)
    report = measure_drift(llm, requests, llm.session.policy(args.cache, settings), progress=llm.session.progress)
    facts = about_requests(args, llm, requests, cache=args.cache, cache_config=settings)
    return Outcome(facts, asdict(report), text(report), reading(report), lambda: figures(report))


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured: `passes` of each request; prompt and response tokens are those of the longest ones."""

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
        k_mean, v_mean: drift a pass, over all positions and layers.
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
    k_mean: float
    v_mean: float
    k_layers: Table
    v_layers: Table
    k_layers_mean: float
    v_layers_mean: float
    kv_correlation: float
    v_moved: Table


@dataclass(slots=True)
class DriftTrace(Trace):
    """What P passes of `model`, whose queries `tap` keeps, over one canvas of T positions showed.

    Attributes:
        prompt, response, block: tokens of the prompt, of the response and of a block.
        moments: of the drift by layer.
        region: of every position in every pass, P arrays int8 [T].
        starts: the first position of each pass' block, P numbers.
        k_drift: how far each position's K moved between pass and next pass, P - 1 arrays [T]: the cosine distance with
            the heads concatenated, mean over layers. NaN where a position has none yet; 0 where a cache keeps it.
        v_drift: the same of V.
        attention: share of attention that the block's queries give to each of `REGIONS`, P arrays [8].
        entropy: of the predicted positions in nats, over all tokens but the mask; P arrays.
        change_rate: share of the response's tokens that each pass changed, P numbers.
        block_v: V drift of the block's rows in each layer, an array [layers, block] for each pair of passes of a block.
    """

    model: Transformer
    tap: QueryTap
    moments: Moments
    prompt: int = 0
    response: int = 0
    block: int = 0
    region: list[Regions] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    k_drift: list[Floats] = field(default_factory=list)
    v_drift: list[Floats] = field(default_factory=list)
    attention: list[Floats] = field(default_factory=list)
    entropy: list[Floats] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)
    block_v: list[Floats] = field(default_factory=list)
    _written: int = 0
    _changes: Changes = field(default_factory=Changes)

    @property
    def passes(self) -> int:
        """How many denoising steps were run."""
        return len(self.starts)

    def change(self, changed: NDArray[np.bool_]) -> None:
        self.change_rate.append(float(changed.mean()))

    def observe(self, seen: ObservedPass) -> None:
        block = seen.block
        self.prompt, self.response, self.block = seen.prompt, seen.end - seen.prompt, seen.block_length
        self.starts.append(block.start)
        self.region.append(regions(len(seen.tokens), seen.prompt, seen.end, block.start, self.block))
        self.entropy.append(certainty(self.model, seen.hidden)[0])
        # What a cache leaves out of a pass has K/V of an earlier one.
        self._written = max(self._written, seen.leading)
        kept = seen.kv(slice(self._written))
        self.attention.append(self._attention(seen, kept))
        moved = self._changes.take(kept)
        if moved is None:
            return
        k_moved, v_moved = moved.cpu().double().numpy()
        self.moments.add(k_moved, v_moved)
        if self.starts[-2] == block.start:
            self.block_v.append(v_moved[:, block.start : block.stop])
        for drifts, by_layer in ((self.k_drift, k_moved), (self.v_drift, v_moved)):
            drift = np.full(len(seen.tokens), np.nan)
            drift[: by_layer.shape[1]] = by_layer.mean(axis=0)
            drifts.append(drift)

    def _attention(self, seen: ObservedPass, kept: Sequence[tuple[Tensor, Tensor]]) -> Floats:
        """The share of attention that the block's queries give to each of `REGIONS`, [8]: mean over layers."""
        model, plan, block = self.model, seen.plan, seen.block
        reach = self._written if plan.sees is None else min(self._written, int(plan.sees[block.start]))
        keys = torch.from_numpy(self.region[-1][:reach].astype(np.int64)).to(model.device)
        mass = torch.zeros(len(REGIONS), device=model.device)
        own = [_block_rows(span, block) for span in plan.spans for _ in span.layers]
        for weights, q, rows, (k, _) in zip(model.weights.layers, self.tap.take(), own, kept, strict=True):
            mass += attention_mass(q[rows], k[:reach], keys, weights.sink_k, model.config.score_cap)
        shares: Floats = (mass / len(kept)).cpu().double().numpy()
        return shares


def _block_rows(span: Span, block: range) -> slice:
    """Where the rows of `block` are among those that `span` computes. Raises `ConfigError` where it leaves any out."""
    if span.pick is not None or not span.rows[block.start : block.stop].all():
        raise ConfigError("drift is measured where every pass computes its whole block, which this cache does not")
    before = int(span.rows[: block.start].sum())
    return slice(before, before + len(block))


class DriftTracer(UncachedWatcher):
    """Runs requests of one model one at a time under `policy`, on an engine of its own, and traces them."""

    def __init__(self, llm: LLM, policy: CachePolicy | None = None) -> None:
        self._tap = QueryTap(llm.model.attention)
        super().__init__(llm, "drift", self._tap, policy)

    def begin(self) -> DriftTrace:
        """The trace of a request that has not run."""
        model = self.engine.model
        return DriftTrace(model, self._tap, Moments(model.config.layers))


def measure_drift(
    llm: LLM, work: Sequence[Request], policy: CachePolicy | None = None, progress: bool = False
) -> DriftReport:
    """Run requests one at a time under `policy`, by default `none`, and report what changed from pass to pass.

    Nothing of `llm` is changed, and its engine does not run. Raises `ConfigError`, before anything runs, where there is
    no request, or one cannot run or asks for a cache, and where a pass under `policy` leaves out rows of its block.
    """
    tracer = DriftTracer(llm, policy)
    return summarise(llm, tracer.trace_all(tracer.begin, work, progress))


def summarise(llm: LLM, traces: Sequence[DriftTrace]) -> DriftReport:
    """The report of `traces`, which are not changed."""
    shape = llm.loaded.config
    moments = Moments(shape.layers)
    for trace in traces:
        moments.merge(trace.moments)
    present = {REGIONS[index]: index for index in range(len(REGIONS)) if _exists(index, traces, sink=shape.sink)}
    k_layers, v_layers = moments.layer_correlations()
    k_mean, v_mean = moments.means()
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
        regions={name: _means(index, traces) for name, index in present.items()},
        k_drift={name: by_pass([_drift(t, t.k_drift, index) for t in traces]) for name, index in present.items()},
        v_drift={name: by_pass([_drift(t, t.v_drift, index) for t in traces]) for name, index in present.items()},
        attention={name: by_pass([_attention(t, index) for t in traces]) for name, index in present.items()},
        change_rate=by_pass([trace.change_rate for trace in traces]),
        entropy=by_pass([list(map(mean, trace.entropy)) for trace in traces]),
        k_mean=k_mean,
        v_mean=v_mean,
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
    attention = mean(np.array([mass[index] for trace in traces for mass in trace.attention]))
    if index == SINK:  # it is a weight, and never moves
        return RegionMeans(0.0, 0.0, 0.0, 0.0, attention)
    k_drift, v_drift, k_within, v_within = (
        mean(np.concatenate([np.empty(0), *(m for t in traces for m in _moved(t, getattr(t, name), index, within))]))
        for within in (False, True)
        for name in ("k_drift", "v_drift")
    )
    return RegionMeans(k_drift, v_drift, k_within, v_within, attention)


def _moved(trace: DriftTrace, drifts: Sequence[Floats], index: int, within: bool = False) -> list[Floats]:
    """Drift of the region's positions, an array for each pair of passes; `within` leaves out pairs across blocks."""
    return [
        drift[trace.region[after] == index]
        for after, drift in enumerate(drifts, start=1)
        if not within or trace.starts[after] == trace.starts[after - 1]
    ]


def _drift(trace: DriftTrace, drifts: Sequence[Floats], index: int) -> list[float]:
    """Mean drift of a region that leads to each pass, [passes]."""
    return [np.nan, *([0.0] * len(drifts) if index == SINK else map(mean, _moved(trace, drifts, index)))]


def _attention(trace: DriftTrace, index: int) -> list[float]:
    """The region's share in each pass, [passes]; NaN where the canvas has no such region then."""
    return [
        mass[index] if index == SINK or (region == index).any() else np.nan
        for mass, region in zip(trace.attention, trace.region, strict=True)
    ]


def reading(report: DriftReport) -> str:
    """The report in a paragraph: where K and V move, what gets attention, how tokens settle."""
    moved = {
        name: (means.k_drift + means.v_drift) / 2
        for name, means in report.regions.items()
        if name != "bias" and not math.isnan(means.k_drift)
    }
    if moved:
        most, least = max(moved, key=lambda name: moved[name]), min(moved, key=lambda name: moved[name])
        said = (
            f"K and V move most in the region {words(most)} ({moved[most]:.2e} a pass) and least in {words(least)} "
            f"({moved[least]:.2e})."
        )
        still = [words(name) for name in moved if report.regions[name].v_within == 0]
        said += f" Within a block {', '.join(still)} do not move at all." if still else ""
    else:
        said = "No request has two passes, so nothing is known of drift."
    attended = sorted(report.regions, key=lambda name: -report.regions[name].attention)[:2]
    shares = " and ".join(f"{words(name)} ({100 * report.regions[name].attention:.1f} %)" for name in attended)
    said += (
        f" The current block attends most to {shares}. A pass changes {100 * np.mean(report.change_rate):.2f} % of the "
        f"response, and entropy goes from {report.entropy[0]:.2f} to {report.entropy[-1]:.2f} nats."
    )
    if math.isnan(report.kv_correlation):
        return said
    return f"{said} Drift of K and of V correlate by {report.kv_correlation:.2f}."


def text(report: DriftReport) -> str:
    """The means by region and the correlations, for people."""
    subject = report.subject
    table = text_table(
        report.regions.items(),
        {
            "region": lambda row: row[0],
            "K drift a pass": lambda row: f"{row[1].k_drift:.2e}",
            "V drift a pass": lambda row: f"{row[1].v_drift:.2e}",
            "K within a block": lambda row: f"{row[1].k_within:.2e}",
            "V within a block": lambda row: f"{row[1].v_within:.2e}",
            "attention %": lambda row: f"{100 * row[1].attention:.1f}",
        },
    )
    lines = [
        f"{subject.model}: {subject.family}, {subject.layers} layers, {subject.dtype}; {len(subject.passes)} requests, "
        f"{sum(subject.passes)} passes, blocks of {subject.block_length}",
        f"\n{table}\n",
        f"tokens changed a pass: {100 * np.mean(report.change_rate):.2f} % of the response",
        f"entropy: {report.entropy[0]:.2f} nats in the first pass, {report.entropy[-1]:.2f} in the last",
        f"correlation of K and V drift: {report.kv_correlation:.2f}; between layers: K {report.k_layers_mean:.2f}, "
        f"V {report.v_layers_mean:.2f}\n",
        "share of the block's rows whose V moves further than a distance between two passes, %, by layer",
    ]
    for distance, shares in zip(DISTANCES, report.v_moved, strict=True):
        lines.append(f"{distance:<8g}" + "".join(f"{100 * share:>7.1f}" for share in shares))
    return "\n".join(lines)


def figures(report: DriftReport) -> dict[str, Figure]:
    """Drift and attention by region and by pass, tokens by pass, and layers beside one another."""
    return {
        "drift-regions": _regions(report),
        "drift-passes": _passes(report),
        "drift-tokens": _tokens(report),
        "drift-layers": _layers(report),
    }


def _regions(report: DriftReport) -> Figure:
    """Bars of drift and of attention mass."""
    figure, (left, right) = new_panels("drift and attention mass by region", 2)
    means = {name: own for name, own in report.regions.items() if name != "bias"}  # a weight: its drift is 0
    places = np.arange(len(means))
    tick: dict[str, Any] = {"color": "black", "markersize": 9, "markeredgewidth": 2}
    for side, color, shift in (("k", K_COLOR, -0.2), ("v", V_COLOR, 0.2)):
        whole, within = ([getattr(m, f"{side}_{what}") for m in means.values()] for what in ("drift", "within"))
        left.barh(places + shift, whole, 0.36, color=color, label=f"{side.upper()}, all passes")
        left.plot(within, places + shift, "|", **tick)
    left.plot([], [], "|", label="within a block", **tick)
    left.set_yticks(places, list(map(words, means)))
    log_axis(left, "x", [x for m in means.values() for x in (m.k_drift, m.v_drift, m.k_within, m.v_within)])
    label(left, "K/V drift", "mean cosine distance per pass", grid="x")
    shares = {name: 100 * m.attention for name, m in report.regions.items()}
    bars = right.barh(list(map(words, shares)), list(shares.values()), color=list(map(_color, shares)))
    right.bar_label(bars, fmt="%.1f", padding=2, fontsize="small")
    right.set_xlim(0, 1.15 * max(shares.values()))
    label(right, "attention of the current block", "attention mass (%)")
    for axes in (left, right):
        axes.invert_yaxis()
    legend_below(figure, 3, left)
    return figure


def _passes(report: DriftReport) -> Figure:
    """Drift and attention over passes, one line a region."""
    title = "drift and attention mass from pass to pass"
    figure, (upper, lower) = new_panels(title, 1, 2, height=5.6, sharex=True)
    # A logarithm of 0 would be drawn as a line to the bottom.
    moving = {
        name: [(k + v) / 2 or math.nan for k, v in zip(report.k_drift[name], report.v_drift[name], strict=True)]
        for name in report.k_drift
        if name != "bias"
    }
    _lines(upper, moving)
    log_axis(upper, "y", [value for series in moving.values() for value in series])
    label(upper, "drift, mean of K and V (none where it is 0)", y="cosine distance per pass", grid="both")
    _lines(lower, {name: [100 * x for x in series] for name, series in report.attention.items()})
    title = "attention of the current block"
    label(lower, title, "pass", "attention mass (%)", grid="both", ticks=10, floor=True)
    place: dict[str, Any] = {"loc": "outside right center", "fontsize": "small", "frameon": False, "title": "region"}
    figure.legend(*lower.get_legend_handles_labels(), **place)
    return figure


def _lines(axes: Axes, series: Mapping[str, Sequence[float]]) -> None:
    for name, values in series.items():
        passes = range(1, len(values) + 1)
        axes.plot(passes, values, ".-", color=_color(name), linewidth=1.2, markersize=5, label=words(name))


def _color(region: str) -> str:
    return COLORS[REGIONS.index(region)]


def _tokens(report: DriftReport) -> Figure:
    """Entropy and token changes over passes."""
    figure, (left, right) = new_panels("entropy and token changes from pass to pass", 2)
    passes = range(1, len(report.entropy) + 1)
    left.plot(passes, report.entropy, ".-", color=K_COLOR, linewidth=1.2, markersize=4)
    right.plot(passes, [100 * rate for rate in report.change_rate], ".-", color=V_COLOR, linewidth=1.2, markersize=4)
    title = "uncertainty of the predicted positions"
    label(left, title, "pass", "mean entropy (nats)", grid="both", ticks=8, floor=True)
    label(right, "tokens changed", "pass", "share of the response (%)", grid="both", ticks=8, floor=True)
    return figure


def _layers(report: DriftReport) -> Figure:
    """Pearson's r of drift between layers, K beside V."""
    title = f"correlation of drift between layers (K with V: r = {report.kv_correlation:.2f})"
    figure, panels = new_panels(title, 2)
    sides = (("K", report.k_layers, report.k_layers_mean), ("V", report.v_layers, report.v_layers_mean))
    for axes, (side, r, average) in zip(panels, sides, strict=True):
        image = heatmap(axes, r, low=-1, high=1, colors="RdBu_r")
        axes.set_aspect("equal")
        label(axes, f"{side}: mean off the diagonal {average:.2f}", "layer", "layer")
    figure.colorbar(image, ax=panels, label="Pearson's r", shrink=0.85)
    return figure

"""`remask analyze features`: how K, V, attention and FFN outputs change from pass to pass, and what foretells it.

Requests run under `none`; adjacent passes are compared (dLLM-Cache, figures 1 and 2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from remask.checks.values import real
from remask.engine.request import Request
from remask.llm import LLM
from remask.observe import ObservedPass
from remask.policies.base import Traits
from remask.policies.dense import Dense
from remask_lab.asked.requests import about_requests, open_requests
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_figure, save_figures, whole_ticks
from remask_lab.instruments.distances import Changes
from remask_lab.instruments.moments import Moments
from remask_lab.instruments.series import Floats, Table
from remask_lab.instruments.watch import UncachedWatcher
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES = ("k", "v", "attention", "ffn")
WORDS = {"k": "K", "v": "V", "attention": "attention output", "ffn": "FFN output"}
PAIRS = (("k", "attention"), ("k", "ffn"), ("v", "attention"), ("v", "ffn"))  # what is seen early, what follows from it
_COLORS = {"k": K_COLOR, "v": V_COLOR, "attention": "#2ca02c", "ffn": "#9467bd"}
FLOOR = 1e-8  # changes below it are rounding, and drawn at it


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name and compare their passes."""
    real("--ratio", args.ratio, 0, 1, above=True)
    llm, requests = open_requests(args)
    report = measure_features(llm, requests, args.ratio, progress=llm.progress)
    record = Record("analyze features", about_requests(args, llm, requests, ratio=args.ratio), asdict(report))
    return Outcome(text(report), record, partial(plot_features, report), reading(report))


@dataclass(frozen=True, slots=True)
class FeatureMeans:
    """Mean cosine similarity of a feature between a pass and the next; by layer, [layers]. NaN for too few passes."""

    prompt: float
    response: float
    prompt_layers: tuple[float, ...]
    response_layers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Foresight:
    """How well the change of an early feature of a layer predicts that of a late one, over response positions.

    Attributes:
        early, late: features.
        correlation: Pearson's r of their cosine distances, over all layers, positions and pairs of passes.
        layers: the same within each layer.
        overlap: of the share `ratio` of positions that moved most by the early feature, how many are among those that
            moved most by the late one; mean over layers and pairs of passes.
    """

    early: str
    late: str
    correlation: float
    layers: tuple[float, ...]
    overlap: float


@dataclass(frozen=True, slots=True)
class FeaturesReport:
    """Similarity of K, V, attention and FFN outputs between adjacent passes (dLLM-Cache, figures 1 and 2).

    Attributes:
        model, layers, requests, passes: what was measured; `passes` of all requests together.
        prompt_tokens: of the first request, whose `maps` begin with them.
        ratio: share of the response that is picked.
        chance: `Foresight.overlap` of positions drawn at random.
        means: by feature.
        foresight: of `PAIRS`.
        maps: by feature, similarity of the first request's positions, [pairs of passes][positions], mean over layers;
            NaN where a position was not computed in both passes.
        sample: cosine distances by feature at the same layers, positions and pairs of passes, a few drawn from all.
    """

    model: str
    layers: int
    requests: int
    passes: int
    prompt_tokens: int
    ratio: float
    chance: float
    means: dict[str, FeatureMeans]
    foresight: tuple[Foresight, ...]
    maps: dict[str, Table]
    sample: dict[str, tuple[float, ...]]


def reading(report: FeaturesReport) -> str:
    """The report in a paragraph."""
    if not report.maps["k"]:
        return f"{report.passes} passes of {report.requests} requests: too few to compare one with the next."
    prompt, response = (
        ", ".join(f"{WORDS[name]} {getattr(report.means[name], region):.4f}" for name in FEATURES)
        for region in ("prompt", "response")
    )
    steadier = [WORDS[name] for name in FEATURES if report.means[name].prompt > report.means[name].response]
    where = "every feature" if len(steadier) == len(FEATURES) else ", ".join(steadier) or "no feature"
    foretold = "; ".join(
        f"{WORDS[pair.early]} with {WORDS[pair.late]} {pair.correlation:.2f} (overlap {100 * pair.overlap:.0f} %)"
        for pair in report.foresight
    )
    return (
        f"Mean similarity from one pass to the next: prompt: {prompt}; response: {response}. The prompt is steadier "
        f"than the response in {where}. Correlation of changes within the response: {foretold}. Overlap is that of the "
        f"{100 * report.ratio:g} % of positions that move most by either; drawn at random, {100 * report.chance:.0f} % "
        "would be common."
    )


SAMPLE = 2000  # points that a report keeps
DIGITS = 7  # of a similarity in a map

Moved = NDArray[np.float32]
"""Cosine distances of `FEATURES` from one pass to the next, [4, layers, rows]."""


@dataclass(frozen=True, slots=True)
class DenseWithOutputs(Dense):
    """`none`, whose passes also leave their attention and FFN outputs in the pool, as `dllm-cache` has them."""

    @property
    def traits(self) -> Traits:
        """Those of `none`, and room for outputs."""
        return replace(Dense().traits, keeps=frozenset({"outputs"}))


@dataclass(slots=True)
class FeatureTrace:
    """What the passes over one canvas showed.

    `moved` has an entry for each pair of passes, of the leading rows that both computed; the response is the positions
    from `prompt` to `end` of a canvas of `length`.
    """

    prompt: int
    end: int
    length: int
    passes: int = 0
    moved: list[Moved] = field(default_factory=list)


class FeatureTracer:
    """Runs requests of one model one at a time under `none`, and compares the features of adjacent passes."""

    def __init__(self, llm: LLM) -> None:
        self.watcher = UncachedWatcher(llm, "the similarity of features", policy=DenseWithOutputs())
        self._trace: FeatureTrace | None = None
        self._changes = Changes()

    def trace(self, item: Request) -> FeatureTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self._trace, self._changes = None, Changes()
        self.watcher.run(item, self._observe)
        assert self._trace is not None
        return self._trace

    def _observe(self, observed: ObservedPass) -> None:
        if self._trace is None:
            self._trace = FeatureTrace(observed.prompt, observed.end, len(observed.tokens))
        self._trace.passes += 1
        rows = slice(observed.leading)
        features = zip(observed.kv(rows), observed.outputs(rows), strict=True)
        moved = self._changes.take((*kv, *outputs) for kv, outputs in features)
        if moved is not None:
            self._trace.moved.append(moved.cpu().numpy())


def measure_features(llm: LLM, work: Sequence[Request], ratio: float = 0.25, progress: bool = False) -> FeaturesReport:
    """Run requests one at a time under `none`, and report how K, V, attention and FFN outputs change from pass to pass.

    `ratio` is the share of the response that is picked where early and late features are compared (dLLM-Cache's rho).
    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run or asks for a cache.
    """
    tracer = FeatureTracer(llm)
    return summarise(llm, tracer.watcher.trace_all(tracer.trace, work, progress), ratio)


def summarise(llm: LLM, traces: Sequence[FeatureTrace], ratio: float = 0.25) -> FeaturesReport:
    """The report of `traces`, which are not changed."""
    first, layers = traces[0], llm.loaded.config.layers
    responses = [moved[:, :, trace.prompt : trace.end] for trace in traces for moved in trace.moved]
    prompts = [moved[:, :, : trace.prompt] for trace in traces for moved in trace.moved]
    picked = [pick_count(part.shape[2], ratio) / part.shape[2] for part in responses if part.shape[2]]
    return FeaturesReport(
        model=llm.loaded.name,
        layers=layers,
        requests=len(traces),
        passes=sum(trace.passes for trace in traces),
        prompt_tokens=first.prompt,
        ratio=ratio,
        chance=float(np.mean(picked)) if picked else math.nan,
        means=_means(prompts, responses, layers),
        foresight=tuple(_foresight(responses, layers, early, late, ratio) for early, late in PAIRS),
        maps={name: tuple(_map(first, index)) for index, name in enumerate(FEATURES)},
        sample=_sample(responses),
    )


def pick_count(rows: int, ratio: float) -> int:
    """How many of `rows` are picked: as many as dLLM-Cache would, but one at least."""
    return max(1, int(rows * ratio))


def _means(prompts: Sequence[Moved], responses: Sequence[Moved], layers: int) -> dict[str, FeatureMeans]:
    prompt, response = _similarity(prompts, layers), _similarity(responses, layers)
    return {
        name: FeatureMeans(
            prompt=float(prompt[index].mean()),
            response=float(response[index].mean()),
            prompt_layers=tuple(prompt[index].tolist()),
            response_layers=tuple(response[index].tolist()),
        )
        for index, name in enumerate(FEATURES)
    }


def _similarity(parts: Sequence[Moved], layers: int) -> Floats:
    """Mean similarity of each feature in each layer, over all positions of all pairs of passes, [4, layers]."""
    count = sum(part.shape[2] for part in parts)
    if not count:
        return np.full((len(FEATURES), layers), np.nan)
    total: Floats = np.sum([part.sum(axis=2, dtype=np.float64) for part in parts], axis=0)
    similarity: Floats = 1 - total / count
    return similarity


def _foresight(parts: Sequence[Moved], layers: int, early: str, late: str, ratio: float) -> Foresight:
    one, other = FEATURES.index(early), FEATURES.index(late)
    moments, shared = Moments(layers), []
    for part in parts:
        moments.add(part[one], part[other])
        count = pick_count(part.shape[2], ratio)
        if part.shape[2]:
            first, second = (np.argsort(-part[index], axis=1, kind="stable")[:, :count] for index in (one, other))
            shared += [len(np.intersect1d(*pair)) / count for pair in zip(first, second, strict=True)]
    return Foresight(
        early,
        late,
        moments.kv_correlation(),
        tuple(moments.paired_correlations().tolist()),
        float(np.mean(shared)) if shared else math.nan,
    )


def _map(trace: FeatureTrace, index: int) -> Iterator[tuple[float, ...]]:
    """Similarity of every position, mean over layers, a row for each pair of passes."""
    for moved in trace.moved:
        row = np.full(trace.length, np.nan)
        row[: moved.shape[2]] = 1 - moved[index].mean(axis=0, dtype=np.float64)
        yield tuple(row.round(DIGITS).tolist())


def _sample(parts: Sequence[Moved]) -> dict[str, tuple[float, ...]]:
    if not parts:
        return dict.fromkeys(FEATURES, ())
    every = np.concatenate([part.reshape(len(FEATURES), -1) for part in parts], axis=1)
    chosen = np.random.default_rng(0).permutation(every.shape[1])[:SAMPLE]
    return {name: tuple(every[index, chosen].tolist()) for index, name in enumerate(FEATURES)}


def text(report: FeaturesReport) -> str:
    """Means and correlations, for people."""
    lines = [
        f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes",
        "",
        f"{'similarity a pass':<24}{'prompt':>12}{'response':>12}",
    ]
    lines += [
        f"{WORDS[name]:<24}{report.means[name].prompt:>12.5f}{report.means[name].response:>12.5f}" for name in FEATURES
    ]
    lines += ["", f"{'change of':<24}{'with':<20}{'r':>8}{'overlap %':>12}"]
    lines += [
        f"{WORDS[pair.early]:<24}{WORDS[pair.late]:<20}{pair.correlation:>8.2f}{100 * pair.overlap:>12.1f}"
        for pair in report.foresight
    ]
    return "\n".join(lines)


def plot_features(report: FeaturesReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Without two passes to compare there is nothing to draw. Raises `ConfigError` where the folder cannot be made.
    """
    if not report.maps["k"]:
        return save_figures({}, folder, report.model)
    figures = {"features-maps": _maps(report), "features-layers": _layers(report), "features-changes": _changes(report)}
    return save_figures(figures, folder, report.model)


def _maps(report: FeaturesReport) -> Figure:
    """Similarity over steps and positions, a row of panels for each feature (dLLM-Cache, figure 1)."""
    figure = new_figure("similarity between adjacent passes, mean over layers", height=7.2, width=9)
    tables = {name: np.array(report.maps[name], dtype=np.float64) for name in FEATURES}
    low = min(float(np.nanmin(table)) for table in tables.values())
    panels = figure.subplots(len(tables), 2, sharex="col", sharey=True)
    split, passes = report.prompt_tokens, len(tables["k"])
    for row, (name, table) in zip(panels, tables.items(), strict=True):
        for axes, first, last in ((row[0], 0, split), (row[1], split, table.shape[1])):
            image = axes.imshow(
                table[:, first:last],
                vmin=low,
                vmax=1,
                cmap="viridis",
                aspect="auto",
                extent=(first - 0.5, last - 0.5, passes + 1.5, 1.5),
                interpolation="nearest",
            )
            whole_ticks(axes.yaxis, 5)
        row[0].set_ylabel(WORDS[name])
    panels[0][0].set_title("prompt", fontsize="medium")
    panels[0][1].set_title("response and what follows it", fontsize="medium")
    figure.supxlabel("position", fontsize="medium")
    figure.supylabel("pass, compared with the one before", fontsize="medium")
    figure.colorbar(image, ax=list(panels.flat), label="cosine similarity", shrink=0.9)
    return figure


def _layers(report: FeaturesReport) -> Figure:
    """Mean similarity by layer, prompt and response."""
    figure = new_figure("similarity between adjacent passes by layer")
    layers = range(1, report.layers + 1)
    for axes, region in zip(figure.subplots(1, 2, sharey=True), ("prompt", "response"), strict=True):
        for name in FEATURES:
            values = getattr(report.means[name], f"{region}_layers")
            axes.plot(layers, values, ".-", color=_COLORS[name], linewidth=1.3, label=WORDS[name])
        label(axes, f"{region} positions", "layer")
        whole_ticks(axes.xaxis, 10)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean cosine similarity")
    legend_below(figure, 4, figure.axes[0], "outside lower center")
    return figure


def _changes(report: FeaturesReport) -> Figure:
    """Late changes over early ones, a point for each position, layer and pair of passes (dLLM-Cache, figure 2)."""
    figure = new_figure("change of the outputs over that of K and V, response positions", height=6.4, width=8)
    values = {name: np.maximum(np.array(report.sample[name]), FLOOR) for name in FEATURES}
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for axes, (early, late), pair in zip(panels, PAIRS, report.foresight, strict=True):
        axes.loglog(values[early], values[late], ".", color=_COLORS[early], markersize=2.5, alpha=0.35)
        label(
            axes,
            f"r = {pair.correlation:.2f}, overlap {100 * pair.overlap:.0f} %",
            f"change of {WORDS[early]}",
            f"change of {WORDS[late]}",
        )
        axes.grid(alpha=0.3)
    figure.supxlabel(
        "cosine distances from one pass to the next, in one layer; below 1e-8 drawn there", fontsize="small"
    )
    return figure

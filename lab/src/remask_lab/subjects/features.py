"""`remask analyze features`: how K, V, attention and FFN outputs change from pass to pass, and what foretells it.

Requests run under `none`; adjacent passes are compared (dLLM-Cache, figures 1 and 2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remask.checks.values import real
from remask.engine.request import Request
from remask.llm import LLM
from remask.policies.dense import Dense
from remask_lab.asked import Outcome, about_requests, open_requests
from remask_lab.drawing import K_COLOR, V_COLOR, heatmap, label, legend_below, new_panels
from remask_lab.instruments.series import Changes, Floats, Moments, Table, as_table
from remask_lab.instruments.watch import Trace, UncachedWatcher
from remask_lab.observe import ObservedPass
from remask_lab.records.markdown import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES = ("k", "v", "attention", "ffn")
WORDS = {"k": "K", "v": "V", "attention": "attention output", "ffn": "FFN output"}
PAIRS = (("k", "attention"), ("k", "ffn"), ("v", "attention"), ("v", "ffn"))  # what is seen early, what follows from it
_COLORS = {"k": K_COLOR, "v": V_COLOR, "attention": "#2ca02c", "ffn": "#9467bd"}
FLOOR = 1e-8  # changes below it are rounding, and drawn at it
SAMPLE = 2000  # points that a report keeps
DIGITS = 7  # of a similarity in a map

Moved = NDArray[np.float32]
"""Cosine distances of `FEATURES` from one pass to the next, [4, layers, rows]."""


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name and compare their passes."""
    real("--ratio", args.ratio, 0, 1, above=True)
    llm, requests = open_requests(args)
    report = measure_features(llm, requests, args.ratio, progress=llm.session.progress)
    facts = about_requests(args, llm, requests, ratio=args.ratio)
    return Outcome(facts, asdict(report), text(report), reading(report), lambda: figures(report))


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
        passes: of all requests together.
        prompt_tokens: of the first request, whose `maps` begin with them.
        ratio: share of the response that is picked; `chance` is the `Foresight.overlap` of positions drawn at random.
        means: by feature. `foresight`: of `PAIRS`.
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


@dataclass(frozen=True, slots=True)
class DenseWithOutputs(Dense):
    """`none`, whose passes also leave their attention and FFN outputs in the pool, as `dllm-cache` has them."""

    traits = replace(Dense.traits, keeps=frozenset({"outputs"}))


@dataclass(slots=True)
class FeatureTrace(Trace):
    """What the passes over one canvas showed.

    `moved` has an entry for each pair of passes, of the leading rows that both computed; the response is the positions
    from `prompt` to `end` of a canvas of `length`.
    """

    prompt: int = 0
    end: int = 0
    length: int = 0
    passes: int = 0
    moved: list[Moved] = field(default_factory=list)
    _changes: Changes = field(default_factory=Changes)

    def observe(self, seen: ObservedPass) -> None:
        """Compare the features with those of the pass before."""
        self.prompt, self.end, self.length = seen.prompt, seen.end, len(seen.tokens)
        self.passes += 1
        rows = slice(seen.leading)
        features = zip(seen.kv(rows), seen.outputs(rows), strict=True)
        moved = self._changes.take((*kv, *outputs) for kv, outputs in features)
        if moved is not None:
            self.moved.append(moved.cpu().numpy())


def watcher(llm: LLM) -> UncachedWatcher:
    """Runs the requests that are traced."""
    return UncachedWatcher(llm, "the similarity of features", policy=DenseWithOutputs())


def measure_features(llm: LLM, work: Sequence[Request], ratio: float = 0.25, progress: bool = False) -> FeaturesReport:
    """Run requests one at a time under `none`, and report how K, V, attention and FFN outputs change from pass to pass.

    `ratio` is the share of the response that is picked where early and late features are compared (dLLM-Cache's rho).
    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run or asks for a cache.
    """
    return summarise(llm, watcher(llm).trace_all(FeatureTrace, work, progress), ratio)


def summarise(llm: LLM, traces: Sequence[FeatureTrace], ratio: float = 0.25) -> FeaturesReport:
    """The report of `traces`, which are not changed."""
    first, layers = traces[0], llm.loaded.config.layers
    responses = [moved[:, :, trace.prompt : trace.end] for trace in traces for moved in trace.moved]
    prompt, response = (
        _similarity(parts, layers)
        for parts in ([moved[:, :, : trace.prompt] for trace in traces for moved in trace.moved], responses)
    )
    picked = [pick_count(part.shape[2], ratio) / part.shape[2] for part in responses if part.shape[2]]
    return FeaturesReport(
        model=llm.loaded.name,
        layers=layers,
        requests=len(traces),
        passes=sum(trace.passes for trace in traces),
        prompt_tokens=first.prompt,
        ratio=ratio,
        chance=float(np.mean(picked)) if picked else math.nan,
        means={
            name: FeatureMeans(float(p.mean()), float(r.mean()), tuple(p.tolist()), tuple(r.tolist()))
            for name, p, r in zip(FEATURES, prompt, response, strict=True)
        },
        foresight=tuple(_foresight(responses, layers, early, late, ratio) for early, late in PAIRS),
        maps={name: _map(first, index) for index, name in enumerate(FEATURES)},
        sample=_sample(responses),
    )


def pick_count(rows: int, ratio: float) -> int:
    """How many of `rows` are picked: as many as dLLM-Cache would, but one at least."""
    return max(1, int(rows * ratio))


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
    by_layer = tuple(moments.paired_correlations().tolist())
    return Foresight(early, late, moments.kv_correlation(), by_layer, float(np.mean(shared)) if shared else math.nan)


def _map(trace: FeatureTrace, index: int) -> Table:
    """Similarity of every position, mean over layers, a row for each pair of passes."""
    table = np.full((len(trace.moved), trace.length), np.nan)
    for row, moved in zip(table, trace.moved, strict=True):
        row[: moved.shape[2]] = 1 - moved[index].mean(axis=0, dtype=np.float64)
    return as_table(table.round(DIGITS))


def _sample(parts: Sequence[Moved]) -> dict[str, tuple[float, ...]]:
    if not parts:
        return dict.fromkeys(FEATURES, ())
    every = np.concatenate([part.reshape(len(FEATURES), -1) for part in parts], axis=1)
    chosen = np.random.default_rng(0).permutation(every.shape[1])[:SAMPLE]
    return {name: tuple(every[index, chosen].tolist()) for index, name in enumerate(FEATURES)}


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


def text(report: FeaturesReport) -> str:
    """Means and correlations, for people."""
    means = text_table(
        FEATURES,
        {
            "similarity a pass": lambda name: WORDS[name],
            "prompt": lambda name: f"{report.means[name].prompt:.5f}",
            "response": lambda name: f"{report.means[name].response:.5f}",
        },
    )
    foresight = text_table(
        report.foresight,
        {
            "change of": lambda pair: WORDS[pair.early],
            "with": lambda pair: WORDS[pair.late],
            "r": lambda pair: f"{pair.correlation:.2f}",
            "overlap %": lambda pair: f"{100 * pair.overlap:.1f}",
        },
    )
    header = f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes"
    return f"{header}\n\n{means}\n\n{foresight}"


def figures(report: FeaturesReport) -> dict[str, Figure]:
    """Maps, means by layer, and late changes over early ones; none without two passes to compare."""
    if not report.maps["k"]:
        return {}
    return {"features-maps": _maps(report), "features-layers": _layers(report), "features-changes": _changes(report)}


def _maps(report: FeaturesReport) -> Figure:
    """Similarity over steps and positions, a row of panels for each feature (dLLM-Cache, figure 1)."""
    title = "similarity between adjacent passes, mean over layers"
    figure, panels = new_panels(title, 2, len(FEATURES), height=7.2, width=9, sharex="col", sharey=True)
    tables = {name: np.array(report.maps[name], dtype=np.float64) for name in FEATURES}
    low = min(float(np.nanmin(table)) for table in tables.values())
    split = report.prompt_tokens
    for left, right, (name, table) in zip(panels[::2], panels[1::2], tables.items(), strict=True):
        heatmap(left, table[:, :split], (-0.5, 1.5), low=low, high=1)
        image = heatmap(right, table[:, split:], (split - 0.5, 1.5), low=low, high=1)
        left.set_ylabel(WORDS[name])
    panels[0].set_title("prompt", fontsize="medium")
    panels[1].set_title("response and what follows it", fontsize="medium")
    figure.supxlabel("position", fontsize="medium")
    figure.supylabel("pass, compared with the one before", fontsize="medium")
    figure.colorbar(image, ax=panels, label="cosine similarity", shrink=0.9)
    return figure


def _layers(report: FeaturesReport) -> Figure:
    """Mean similarity by layer, prompt and response."""
    figure, panels = new_panels("similarity between adjacent passes by layer", 2, sharey=True)
    for axes, region in zip(panels, ("prompt", "response"), strict=True):
        for name in FEATURES:
            values = getattr(report.means[name], f"{region}_layers")
            axes.plot(range(1, report.layers + 1), values, ".-", color=_COLORS[name], linewidth=1.3, label=WORDS[name])
        label(axes, f"{region} positions", "layer", grid="both", ticks=10)
    panels[0].set_ylabel("mean cosine similarity")
    legend_below(figure, 4, panels[0], "outside lower center")
    return figure


def _changes(report: FeaturesReport) -> Figure:
    """Late changes over early ones, a point for each position, layer and pair of passes (dLLM-Cache, figure 2)."""
    title = "change of the outputs over that of K and V, response positions"
    figure, panels = new_panels(title, 2, 2, height=6.4, width=8, sharex=True, sharey=True)
    values = {name: np.maximum(np.array(report.sample[name]), FLOOR) for name in FEATURES}
    for axes, pair in zip(panels, report.foresight, strict=True):
        style: dict[str, Any] = {"color": _COLORS[pair.early], "markersize": 2.5, "alpha": 0.35}
        axes.loglog(values[pair.early], values[pair.late], ".", **style)
        title = f"r = {pair.correlation:.2f}, overlap {100 * pair.overlap:.0f} %"
        label(axes, title, f"change of {WORDS[pair.early]}", f"change of {WORDS[pair.late]}", grid="both")
    note = "cosine distances from one pass to the next, in one layer; below 1e-8 drawn there"
    figure.supxlabel(note, fontsize="small")
    return figure

"""`remask analyze decoding`: K and V of a token before, at and after the step that decodes it.

Requests run under `none` (dKV-Cache, figure 2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.request import Request
from remask.llm import LLM
from remask_lab.asked import Outcome, about_requests, check_least, open_requests
from remask_lab.drawing import K_COLOR, V_COLOR, heatmap, label, legend_below, log_axis, new_panels
from remask_lab.instruments.series import Floats, Table, as_table, distance, units
from remask_lab.instruments.watch import Trace, UncachedWatcher
from remask_lab.observe import ObservedPass
from remask_lab.records.markdown import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDES = ("k", "v")
MEASURES = ("cosine", "euclidean")
KEPT = 24  # passes of a request whose states are kept to be compared with one another

Moves = NDArray[np.float32]
"""K's cosine distance, V's, K's Euclidean distance, V's, from one pass to the next: [4, layers, rows]."""


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name and follow the tokens of their responses."""
    check_least(args, window=1)
    llm, requests = open_requests(args)
    report = measure_decoding(llm, requests, args.window, progress=llm.session.progress)
    facts = about_requests(args, llm, requests, window=args.window)
    return Outcome(facts, asdict(report), text(report), reading(report), lambda: figures(report))


@dataclass(frozen=True, slots=True)
class Aligned:
    """A distance from each pass to the next, aligned at the pass that decoded the token.

    `mean` is over tokens and layers, by offset; `layers` over tokens, [layers][offsets].
    """

    mean: tuple[float, ...]
    layers: Table


@dataclass(frozen=True, slots=True)
class DecodingReport:
    """K/V dynamics of response tokens around their decoding (dKV-Cache, figure 2).

    A token is decoded by the pass at whose end its position gets its final token; on uniform models that may be the
    last of several changes. What stands at offset 0 leads from this pass, which saw a mask or noise, to the next one,
    which is the first to see the token.

    Attributes:
        tokens: decoded tokens with a pass after the one that decoded them; `passes` are those of all requests.
        offsets: passes from the one that decoded a token; `counts` the tokens that a mean at each of them is over.
        aligned: by "k" or "v" and "cosine" or "euclidean", as "k cosine".
        steps: passes of the first request, from 1, that `similarity` compares.
        similarity: by "k" and "v": mean cosine similarity of response positions between two passes, [passes][passes].
        order: response positions of the first request in the order in which they were decoded, from 0.
        decoded: the pass, from 1, that decoded each of `order`.
        moves: by "k" and "v": Euclidean distance of each of `order` from pass to pass, mean over layers,
            [positions][pairs of passes]; NaN where a position was not computed in both.
    """

    model: str
    layers: int
    requests: int
    passes: int
    tokens: int
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    aligned: dict[str, Aligned]
    steps: tuple[int, ...]
    similarity: dict[str, Table]
    order: tuple[int, ...]
    decoded: tuple[int, ...]
    moves: dict[str, Table]

    def around(self, name: str) -> tuple[float, float, float]:
        """The mean before a token's decoding, at it and after it, over all tokens and offsets; NaN for none."""
        values, counts, offsets = (np.array(each) for each in (self.aligned[name].mean, self.counts, self.offsets))
        before, at, after = (
            float(np.average(values[part], weights=counts[part])) if part.any() else math.nan
            for part in (side & (counts > 0) for side in (offsets < 0, offsets == 0, offsets > 0))
        )
        return before, at, after


@dataclass(slots=True)
class DecodingTrace(Trace):
    """What the passes over one canvas showed.

    `decoded` is the pass, from 0, at whose end each response position got its final token; -1 where it never changed.
    `moves` has an entry for each pair of passes, of the response rows that both computed. `kept` holds passes, from 0,
    and their unit vectors [2, layers, rows, D]: as many as `KEPT` allows, every `_stride`-th one.
    """

    decoded: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    passes: int = 0
    moves: list[Moves] = field(default_factory=list)
    kept: list[tuple[int, Tensor]] = field(default_factory=list)
    _before: list[Tensor] = field(default_factory=list)  # K and V, [2, rows, D] a layer
    _stride: int = 1

    def observe(self, seen: ObservedPass) -> None:
        """Compare the response's K and V with those of the pass before."""
        if not self.passes:
            self.decoded = np.full(seen.end - seen.prompt, -1)
        after = [
            torch.stack(pair).flatten(2).float() for pair in seen.kv(slice(seen.prompt, min(seen.end, seen.leading)))
        ]
        if self._before:
            moved = [_moved(*pair) for pair in zip(self._before, after, strict=True)]
            self.moves.append(torch.stack(moved, dim=1).cpu().numpy())
        self._before = after
        if self.passes % self._stride == 0:
            unit = torch.stack([torch.stack([units(side) for side in layer]) for layer in after], dim=1)
            self.kept.append((self.passes, unit))
            if len(self.kept) > KEPT:
                self.kept = self.kept[::2]
                self._stride *= 2
        self.passes += 1

    def change(self, changed: NDArray[np.bool_]) -> None:
        self.decoded[changed] = self.passes - 1

    def similarity(self) -> Floats:
        """Mean cosine similarity of K and of V between kept passes, over layers and rows of both, [2, n, n]."""
        found = np.full((2, len(self.kept), len(self.kept)), np.nan)
        for i, (_, one) in enumerate(self.kept):
            for j, (_, other) in enumerate(self.kept[: i + 1]):
                apart = distance(one, other)
                if apart.shape[-1]:
                    found[:, i, j] = found[:, j, i] = 1 - apart.double().mean(dim=(1, 2)).cpu().numpy()
        return found


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Cosine and Euclidean distances of K and V, [2, rows, D] each, of the rows that both have: [4, rows]."""
    common = min(before.shape[1], after.shape[1])
    one, other = before[:, :common], after[:, :common]
    cosine = [distance(units(a), units(b)) for a, b in zip(one, other, strict=True)]
    return torch.stack([*cosine, *(one - other).norm(dim=-1)])


def measure_decoding(llm: LLM, work: Sequence[Request], window: int = 8, progress: bool = False) -> DecodingReport:
    """Run requests one at a time under `none`, and report how K and V move around the decoding of each token.

    `window` is how many passes before and after it are reported. Raises `ConfigError`, before anything runs, where
    there is no request, or one cannot run or asks for a cache.
    """
    watcher = UncachedWatcher(llm, "the movement of K and V")
    return summarise(llm, watcher.trace_all(DecodingTrace, work, progress), window)


def summarise(llm: LLM, traces: Sequence[DecodingTrace], window: int = 8) -> DecodingReport:
    """The report of `traces`, which are not changed."""
    layers, first = llm.loaded.config.layers, traces[0]
    offsets = range(-window, window + 1)
    totals = np.zeros((2 * len(MEASURES), layers, len(offsets)))
    counts = np.zeros(len(offsets), dtype=np.int64)
    tokens = 0
    for trace in traces:
        for position, decoded in enumerate(trace.decoded.tolist()):
            tokens += 0 <= decoded < len(trace.moves)
            for pair, moved in enumerate(trace.moves):
                if decoded >= 0 and abs(pair - decoded) <= window and position < moved.shape[2]:
                    totals[:, :, pair - decoded + window] += moved[:, :, position]
                    counts[pair - decoded + window] += 1
    with np.errstate(invalid="ignore"):
        means = iter(totals / counts)
    similarity = first.similarity()
    order = [int(at) for at in np.argsort(first.decoded, kind="stable") if first.decoded[at] >= 0]
    return DecodingReport(
        model=llm.loaded.name,
        layers=layers,
        requests=len(traces),
        passes=sum(trace.passes for trace in traces),
        tokens=tokens,
        offsets=tuple(offsets),
        counts=tuple(counts.tolist()),
        aligned={f"{side} {measure}": _over_layers(next(means)) for measure in MEASURES for side in SIDES},
        steps=tuple(step + 1 for step, _ in first.kept),
        similarity={side: as_table(similarity[index]) for index, side in enumerate(SIDES)},
        order=tuple(order),
        decoded=tuple(int(first.decoded[at]) + 1 for at in order),
        moves={side: as_table(_euclidean(first, order, index)) for index, side in enumerate(SIDES)},
    )


def _over_layers(layers: Floats) -> Aligned:
    return Aligned(tuple(layers.mean(axis=0).tolist()), as_table(layers))


def _euclidean(trace: DecodingTrace, order: Sequence[int], side: int) -> Floats:
    """Euclidean distances from pass to pass, mean over layers, [positions of `order`, pairs of passes]."""
    found = np.full((len(order), len(trace.moves)), math.nan)
    for pair, moved in enumerate(trace.moves):
        means = moved[2 + side].mean(axis=0)
        known = [row for row, position in enumerate(order) if position < len(means)]
        found[known, pair] = means[[order[row] for row in known]]
    return found


def reading(report: DecodingReport) -> str:
    """The report in a paragraph."""
    if not report.tokens:
        return (
            f"No pass follows the one that decodes a token ({report.passes} passes of {report.requests} requests): "
            "there is nothing to align."
        )
    parts = [f"{report.tokens} tokens of {report.requests} requests."]
    for side in SIDES:
        before, at, after = report.around(f"{side} cosine")
        peak = report.offsets[int(np.nanargmax(report.aligned[f"{side} cosine"].mean))]
        moves = f"{side.upper()} moves by a mean cosine distance of {at:.2e} when its token appears"
        if not np.isnan(before):
            moves += f", {before:.2e} from pass to pass before it"
        if not np.isnan(after):
            moves += f", {after:.2e} after it" + (f" ({at / after:.1f} times less)" if at > after > 0 else "")
        parts.append(f"{moves}. It moves most {'when it appears' if peak == 0 else f'at offset {peak:+d}'}.")
    cosine = np.array([row[report.offsets.index(0)] for row in report.aligned["v cosine"].layers])
    parts.append(
        f"By layer, V's move at decoding is largest in layer {int(cosine.argmax()) + 1} ({cosine.max():.2e}) and "
        f"smallest in layer {int(cosine.argmin()) + 1} ({cosine.min():.2e})."
    )
    return " ".join(parts)


def text(report: DecodingReport) -> str:
    """The mean curves, for people."""
    header = f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes"
    table = text_table(
        [place for place, count in enumerate(report.counts) if count],
        {
            "offset": lambda place: str(report.offsets[place]),
            "tokens": lambda place: str(report.counts[place]),
            **{name: lambda place, own=own: f"{own.mean[place]:.3e}" for name, own in report.aligned.items()},  # type: ignore[misc]
        },
    )
    return f"{header}\n\n{table}"


def figures(report: DecodingReport) -> dict[str, Figure]:
    """The parts of figure 2; none where no token could be followed."""
    if not report.tokens:
        return {}
    return {
        "decoding-passes": _passes(report),
        "decoding-tokens": _tokens(report),
        "decoding-aligned": _aligned(report),
        "decoding-layers": _layers(report),
    }


def _passes(report: DecodingReport) -> Figure:
    """Similarity between any two passes (figure 2a)."""
    title = "similarity of the response's K and V between passes, mean over layers and positions"
    figure, panels = new_panels(title, 2, width=9)
    low = min(float(np.nanmin(report.similarity[side])) for side in SIDES)
    ticks = range(0, len(report.steps), max(1, len(report.steps) // 8))
    for axes, side in zip(panels, SIDES, strict=True):
        image = axes.imshow(np.array(report.similarity[side]), vmin=low, vmax=1, cmap="viridis")
        axes.set_xticks(ticks, [str(report.steps[tick]) for tick in ticks])
        axes.set_yticks(ticks, [str(report.steps[tick]) for tick in ticks])
        label(axes, side.upper(), "pass", "pass")
    figure.colorbar(image, ax=panels, label="cosine similarity", shrink=0.9)
    return figure


def _tokens(report: DecodingReport) -> Figure:
    """Every token's move from pass to pass, tokens in the order of decoding (figure 2b)."""
    title = "moves of the first request's tokens, mean over layers"
    figure, panels = new_panels(title, 2, width=9, height=4.4, sharey=True)
    # What a pass decodes is seen by the next one, whose row of moves leads to it.
    ring: dict[str, Any] = {"markersize": 4, "markerfacecolor": "none", "markeredgecolor": "#4fc3f7"}
    seen, places = [step + 1 for step in report.decoded], range(1, len(report.order) + 1)
    for axes, side in zip(panels, SIDES, strict=True):
        image = heatmap(axes, report.moves[side], (1.5, 0.5), low=0, colors="magma")
        width = axes.get_xlim()
        axes.plot(seen, places, "o", label="first pass that sees the token", **ring)
        axes.set_xlim(width)
        label(axes, side.upper(), "pass, compared with the one before")
        figure.colorbar(image, ax=axes, label="Euclidean distance", shrink=0.9)
    panels[0].set_ylabel("response token, in decoding order")
    legend_below(figure, 1, panels[0], "outside lower center", "medium")
    return figure


def _aligned(report: DecodingReport) -> Figure:
    """Mean curves around decoding (figure 2c)."""
    title = f"moves of K and V around decoding, mean of {report.tokens} tokens and all layers"
    figure, panels = new_panels(title, 2, width=9)
    for axes, measure in zip(panels, MEASURES, strict=True):
        curves = {side: report.aligned[f"{side} {measure}"].mean for side in SIDES}
        for (side, values), color in zip(curves.items(), (K_COLOR, V_COLOR), strict=True):
            axes.plot(report.offsets, values, ".-", color=color, linewidth=1.3, label=side.upper())
        axes.axvline(0, color="grey", linestyle=":", linewidth=1)
        cosine = measure == "cosine"
        y = "cosine distance" if cosine else "Euclidean distance"
        label(axes, "", "passes from decoding (0: the token appears)", y, grid="both", ticks=9, floor=not cosine)
        if cosine:
            log_axis(axes, "y", [x for values in curves.values() for x in values])
    legend_below(figure, 2, panels[0], "outside lower center", "medium")
    return figure


def _layers(report: DecodingReport) -> Figure:
    """The same by layer."""
    figure, panels = new_panels("moves of K and V around decoding by layer", 2, width=9, sharey=True)
    for axes, side in zip(panels, SIDES, strict=True):
        table = np.array(report.aligned[f"{side} cosine"].layers, dtype=np.float64)
        # What moves less than a ten thousandth of the most is shown as that.
        moved = np.log10(np.maximum(table, 1e-4 * np.nanmax(table)))
        image = heatmap(axes, moved, (report.offsets[0] - 0.5, 0.5), colors="magma")
        label(axes, side.upper(), "passes from decoding (0: the token appears)")
        figure.colorbar(image, ax=axes, label="log10 of cosine distance", shrink=0.9)
    panels[0].set_ylabel("layer")
    return figure

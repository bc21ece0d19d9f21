"""`remask analyze decoding`: K and V of a token before, at and after the step that decodes it.

Requests run under `none` (dKV-Cache, figure 2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
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
from remask_lab.arguments.common import check_least
from remask_lab.asked.requests import about_requests, open_requests
from remask_lab.drawing import (
    K_COLOR,
    V_COLOR,
    label,
    legend_below,
    log_axis,
    new_figure,
    save_figures,
    whole_ticks,
)
from remask_lab.instruments.distances import distance, units
from remask_lab.instruments.series import Floats, Table, as_table
from remask_lab.instruments.watch import UncachedWatcher
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record

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
    report = measure_decoding(llm, requests, args.window, progress=llm.progress)
    record = Record("analyze decoding", about_requests(args, llm, requests, window=args.window), asdict(report))
    return Outcome(text(report), record, partial(plot_decoding, report), reading(report))


@dataclass(frozen=True, slots=True)
class Aligned:
    """A distance from each pass to the next, aligned at the pass that decoded the token.

    Attributes:
        mean: over tokens and layers, by offset.
        layers: over tokens, [layers][offsets].
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
        model, layers, requests: what was measured.
        passes: of all requests.
        tokens: decoded tokens with a pass after the one that decoded them.
        offsets: passes from the one that decoded a token.
        counts: tokens that a mean at each offset is over.
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
        values, counts = np.array(self.aligned[name].mean), np.array(self.counts)
        offsets = np.array(self.offsets)
        parts = (offsets < 0, offsets == 0, offsets > 0)
        before, at, after = (
            float(np.average(values[part & (counts > 0)], weights=counts[part & (counts > 0)]))
            if counts[part].sum()
            else math.nan
            for part in parts
        )
        return before, at, after


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
            moves += f", {after:.2e} after it"
            if at > after > 0:
                moves += f" ({at / after:.1f} times less)"
        where = "when it appears" if peak == 0 else f"at offset {peak:+d}"
        parts.append(f"{moves}. It moves most {where}.")
    cosine = np.array([row[report.offsets.index(0)] for row in report.aligned["v cosine"].layers])
    parts.append(
        f"By layer, V's move at decoding is largest in layer {int(cosine.argmax()) + 1} ({cosine.max():.2e}) and "
        f"smallest in layer {int(cosine.argmin()) + 1} ({cosine.min():.2e})."
    )
    return " ".join(parts)


@dataclass(slots=True)
class DecodingTrace:
    """What the passes over one canvas showed.

    `moves` has an entry for each pair of passes, of the response rows that both computed. `decoded` is the pass, from
    0, at whose end each response position got its final token; -1 where it never changed. `similarity` [2, n, n] is
    that of K and of V between the passes `steps`, as far apart as `KEPT` of them allow.
    """

    length: int
    decoded: NDArray[np.int64]
    passes: int = 0
    moves: list[Moves] = field(default_factory=list)
    steps: tuple[int, ...] = ()
    similarity: Floats = field(default_factory=lambda: np.empty((2, 0, 0)))


class DecodingTracer:
    """Runs requests of one model one at a time under `none`, and follows the K and V of their responses."""

    def __init__(self, llm: LLM) -> None:
        self.watcher = UncachedWatcher(llm, "the movement of K and V")
        self._trace: DecodingTrace | None = None
        self._before: list[Tensor] = []  # K and V, [2, rows, kv_heads * Dh] a layer
        self._kept: list[tuple[int, Tensor]] = []  # a pass, and its unit vectors [2, layers, rows, D]
        self._stride = 1

    def trace(self, item: Request) -> DecodingTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self._trace, self._before, self._kept, self._stride = None, [], [], 1
        self.watcher.run(item, self._observe, self._changed)
        assert self._trace is not None
        self._trace.steps = tuple(step for step, _ in self._kept)
        self._trace.similarity = _similarity([states for _, states in self._kept])
        self._before, self._kept = [], []
        return self._trace

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        assert self._trace is not None
        self._trace.decoded[changed] = self._trace.passes - 1

    def _observe(self, observed: ObservedPass) -> None:
        if self._trace is None:
            length = observed.end - observed.prompt
            self._trace = DecodingTrace(length, np.full(length, -1))
        trace = self._trace
        trace.passes += 1
        response = slice(observed.prompt, min(observed.end, observed.leading))
        after = [torch.stack(pair).flatten(2).float() for pair in observed.kv(response)]
        if self._before:
            moved = [_moved(*pair) for pair in zip(self._before, after, strict=True)]
            trace.moves.append(torch.stack(moved, dim=1).cpu().numpy())
        self._before = after
        self._keep(trace.passes - 1, after)

    def _keep(self, step: int, states: Sequence[Tensor]) -> None:
        """Keep every n-th pass; n doubles where there would be too many."""
        if step % self._stride:
            return
        unit = torch.stack([torch.stack([units(side) for side in layer]) for layer in states], dim=1)
        self._kept.append((step, unit))
        if len(self._kept) > KEPT:
            self._kept = self._kept[::2]
            self._stride *= 2


def measure_decoding(llm: LLM, work: Sequence[Request], window: int = 8, progress: bool = False) -> DecodingReport:
    """Run requests one at a time under `none`, and report how K and V move around the decoding of each token.

    `window` is how many passes before and after it are reported. Raises `ConfigError`, before anything runs, where
    there is no request, or one cannot run or asks for a cache.
    """
    tracer = DecodingTracer(llm)
    return summarise(llm, tracer.watcher.trace_all(tracer.trace, work, progress), window)


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
            for pair, place in _pairs(trace, position, decoded, window):
                totals[:, :, place] += trace.moves[pair][:, :, position]
                counts[place] += 1
    with np.errstate(invalid="ignore"):
        means = totals / counts
    order = [int(at) for at in np.argsort(first.decoded, kind="stable") if first.decoded[at] >= 0]
    return DecodingReport(
        model=llm.loaded.name,
        layers=layers,
        requests=len(traces),
        passes=sum(trace.passes for trace in traces),
        tokens=tokens,
        offsets=tuple(offsets),
        counts=tuple(counts.tolist()),
        aligned={
            f"{side} {measure}": _over_layers(means[2 * row + column])
            for row, measure in enumerate(MEASURES)
            for column, side in enumerate(SIDES)
        },
        steps=tuple(step + 1 for step in first.steps),
        similarity={side: as_table(first.similarity[index]) for index, side in enumerate(SIDES)},
        order=tuple(order),
        decoded=tuple(int(first.decoded[at]) + 1 for at in order),
        moves={side: as_table(_euclidean(first, order, index)) for index, side in enumerate(SIDES)},
    )


def _pairs(trace: DecodingTrace, position: int, decoded: int, window: int) -> Iterator[tuple[int, int]]:
    """Pairs of passes around a token's decoding, and their places among the offsets."""
    if decoded < 0:
        return
    for offset in range(-window, window + 1):
        pair = decoded + offset
        if 0 <= pair < len(trace.moves) and position < trace.moves[pair].shape[2]:
            yield pair, offset + window


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


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """Cosine and Euclidean distances of K and V, [2, rows, D] each, of the rows that both have: [4, rows]."""
    common = min(before.shape[1], after.shape[1])
    one, other = before[:, :common], after[:, :common]
    cosine = [distance(units(a), units(b)) for a, b in zip(one, other, strict=True)]
    return torch.stack([*cosine, *(one - other).norm(dim=-1)])


def _similarity(kept: Sequence[Tensor]) -> Floats:
    """Mean cosine similarity over layers and rows that both have, [2, n, n]; `kept` [2, layers, rows, D] each."""
    found = np.full((2, len(kept), len(kept)), np.nan)
    for i, one in enumerate(kept):
        for j, other in enumerate(kept[: i + 1]):
            apart = distance(one, other)
            if apart.shape[-1]:
                found[:, i, j] = found[:, j, i] = 1 - apart.double().mean(dim=(1, 2)).cpu().numpy()
    return found


def text(report: DecodingReport) -> str:
    """The mean curves, for people."""
    names = list(report.aligned)
    lines = [
        f"{report.model}: {report.layers} layers; {report.requests} requests, {report.passes} passes",
        "",
        f"{'offset':>6}{'tokens':>8}" + "".join(f"{name:>14}" for name in names),
    ]
    for place, (offset, count) in enumerate(zip(report.offsets, report.counts, strict=True)):
        if count:
            values = "".join(f"{report.aligned[name].mean[place]:>14.3e}" for name in names)
            lines.append(f"{offset:>6}{count:>8}{values}")
    return "\n".join(lines)


def plot_decoding(report: DecodingReport, folder: str | Path) -> list[Path]:
    """Draw PNG files into `folder`, which is made if it is not there, and return their paths.

    Where no token could be followed there is nothing to draw. Raises `ConfigError` where the folder cannot be made.
    """
    figures = {}
    if report.tokens:
        figures = {
            "decoding-passes": _draw_passes(report),
            "decoding-tokens": _draw_tokens(report),
            "decoding-aligned": _draw_aligned(report),
            "decoding-layers": _draw_layers(report),
        }
    return save_figures(figures, folder, report.model)


def _draw_passes(report: DecodingReport) -> Figure:
    """Similarity between any two passes (figure 2a)."""
    figure = new_figure("similarity of the response's K and V between passes, mean over layers and positions", width=9)
    tables = [np.array(report.similarity[side]) for side in SIDES]
    low = min(float(np.nanmin(table)) for table in tables)
    ticks = range(0, len(report.steps), max(1, len(report.steps) // 8))
    for axes, side, table in zip(figure.subplots(1, 2), SIDES, tables, strict=True):
        image = axes.imshow(table, vmin=low, vmax=1, cmap="viridis")
        axes.set_xticks(ticks, [str(report.steps[tick]) for tick in ticks])
        axes.set_yticks(ticks, [str(report.steps[tick]) for tick in ticks])
        label(axes, side.upper(), "pass", "pass")
    figure.colorbar(image, ax=figure.axes[:2], label="cosine similarity", shrink=0.9)
    return figure


def _draw_tokens(report: DecodingReport) -> Figure:
    """Every token's move from pass to pass, tokens in the order of decoding (figure 2b)."""
    figure = new_figure("moves of the first request's tokens, mean over layers", width=9, height=4.4)
    tables = [np.array(report.moves[side], dtype=np.float64) for side in SIDES]
    for axes, side, table in zip(figure.subplots(1, 2, sharey=True), SIDES, tables, strict=True):
        edges = (1.5, table.shape[1] + 1.5, len(table) + 0.5, 0.5)
        image = axes.imshow(table, cmap="magma", aspect="auto", extent=edges, interpolation="nearest", vmin=0)
        # What a pass decodes is seen by the next one, whose row of moves leads to it.
        axes.plot(
            [step + 1 for step in report.decoded],
            range(1, len(table) + 1),
            "o",
            markersize=4,
            markerfacecolor="none",
            markeredgecolor="#4fc3f7",
            label="first pass that sees the token",
        )
        axes.set_xlim(edges[0], edges[1])
        label(axes, side.upper(), "pass, compared with the one before")
        for axis in (axes.xaxis, axes.yaxis):
            whole_ticks(axis, 8)
        figure.colorbar(image, ax=axes, label="Euclidean distance", shrink=0.9)
    figure.axes[0].set_ylabel("response token, in decoding order")
    legend_below(figure, 1, figure.axes[0], "outside lower center", "medium")
    return figure


def _draw_aligned(report: DecodingReport) -> Figure:
    """Mean curves around decoding (figure 2c)."""
    figure = new_figure(f"moves of K and V around decoding, mean of {report.tokens} tokens and all layers", width=9)
    for axes, measure in zip(figure.subplots(1, 2), MEASURES, strict=True):
        for side, color in zip(SIDES, (K_COLOR, V_COLOR), strict=True):
            values = report.aligned[f"{side} {measure}"].mean
            axes.plot(report.offsets, values, ".-", color=color, linewidth=1.3, label=side.upper())
        axes.axvline(0, color="grey", linestyle=":", linewidth=1)
        if measure == "cosine":
            log_axis(axes, "y", [x for side in SIDES for x in report.aligned[f"{side} {measure}"].mean])
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("passes from decoding (0: the token appears)")
        axes.set_ylabel("cosine distance" if measure == "cosine" else "Euclidean distance")
        whole_ticks(axes.xaxis, 9)
        axes.grid(alpha=0.3)
    legend_below(figure, 2, figure.axes[0], "outside lower center", "medium")
    return figure


def _draw_layers(report: DecodingReport) -> Figure:
    """The same by layer."""
    figure = new_figure("moves of K and V around decoding by layer", width=9)
    for axes, side in zip(figure.subplots(1, 2, sharey=True), SIDES, strict=True):
        table = np.array(report.aligned[f"{side} cosine"].layers, dtype=np.float64)
        edges = (report.offsets[0] - 0.5, report.offsets[-1] + 0.5, report.layers + 0.5, 0.5)
        # What moves less than a ten thousandth of the most is shown as that.
        shown = np.log10(np.maximum(table, 1e-4 * np.nanmax(table)))
        image = axes.imshow(shown, cmap="magma", aspect="auto", extent=edges, interpolation="nearest")
        label(axes, side.upper(), "passes from decoding (0: the token appears)")
        for axis in (axes.xaxis, axes.yaxis):
            whole_ticks(axis, 9)
        figure.colorbar(image, ax=axes, label="log10 of cosine distance", shrink=0.9)
    figure.axes[0].set_ylabel("layer")
    return figure

"""`measure_decoding`: how K and V of a token move before, at and after the step that decodes it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.llm import LLM
from remask_lab.subjects.decoding_report import MEASURES, SIDES, Aligned, DecodingReport, Table
from remask_lab.subjects.series import Floats
from remask_lab.subjects.watch import Watcher, check_uncached, distance, leading_slots, trace_all, units

KEPT = 24  # passes of a request whose states are kept to be compared with one another

Moves = NDArray[np.float32]
"""K's cosine distance, V's, K's Euclidean distance, V's, from one pass to the next: [4, layers, rows]."""


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
        self._none = llm.policy("none")
        self._watcher = Watcher(llm, store_budget_tokens=0)
        self._trace: DecodingTrace | None = None
        self._before: list[Tensor] = []  # K and V, [2, rows, kv_heads * Dh] a layer
        self._kept: list[tuple[int, Tensor]] = []  # a pass, and its unit vectors [2, layers, rows, D]
        self._stride = 1

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where `trace` would."""
        check_uncached(item, self._none, "the movement of K and V")
        self._watcher.engine.check(replace(item, prefix_length=0, policy=self._none))

    def trace(self, item: Request) -> DecodingTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self.check(item)
        self._trace, self._before, self._kept, self._stride = None, [], [], 1
        self._watcher.run(replace(item, prefix_length=0), self._look, self._changed)
        assert self._trace is not None
        self._trace.steps = tuple(step for step, _ in self._kept)
        self._trace.similarity = _similarity([states for _, states in self._kept])
        self._before, self._kept = [], []
        return self._trace

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        trace = self._trace
        assert trace is not None
        trace.decoded[changed[self._prompt : self._prompt + trace.length]] = trace.passes - 1

    def _look(self, running: RunningRequest, hidden: Tensor) -> None:  # noqa: ARG002
        canvas, pool = running.branches[0].canvas, self._watcher.engine.pool
        if self._trace is None:
            self._prompt, length = canvas.prompt, canvas.end - canvas.prompt
            self._trace = DecodingTrace(length, np.full(length, -1))
        trace = self._trace
        trace.passes += 1
        slots = leading_slots(running, self._watcher.engine.model.device)[canvas.prompt : canvas.end]
        after = [
            torch.stack([pool.k[layer][slots], pool.v[layer][slots]]).flatten(2).float() for layer in range(len(pool.k))
        ]
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
    """Run requests one at a time under `none`, and tell how K and V move around the decoding of each token.

    `window` is how many passes before and after it are told. Raises `ConfigError`, before anything runs, where there is
    no request, or one cannot run or asks for a cache.
    """
    return summarise(llm, trace_all(DecodingTracer(llm), work, progress), window)


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
            f"{side} {measure}": _aligned(means[2 * row + column])
            for row, measure in enumerate(MEASURES)
            for column, side in enumerate(SIDES)
        },
        steps=tuple(step + 1 for step in first.steps),
        similarity={side: _table(first.similarity[index]) for index, side in enumerate(SIDES)},
        order=tuple(order),
        decoded=tuple(int(first.decoded[at]) + 1 for at in order),
        moves={side: _table(_euclidean(first, order, index)) for index, side in enumerate(SIDES)},
    )


def _pairs(trace: DecodingTrace, position: int, decoded: int, window: int) -> Iterator[tuple[int, int]]:
    """Pairs of passes around a token's decoding, and their places among the offsets."""
    if decoded < 0:
        return
    for offset in range(-window, window + 1):
        pair = decoded + offset
        if 0 <= pair < len(trace.moves) and position < trace.moves[pair].shape[2]:
            yield pair, offset + window


def _aligned(layers: Floats) -> Aligned:
    return Aligned(tuple(layers.mean(axis=0).tolist()), _table(layers))


def _euclidean(trace: DecodingTrace, order: Sequence[int], side: int) -> Floats:
    """Euclidean distances from pass to pass, mean over layers, [positions of `order`, pairs of passes]."""
    found = np.full((len(order), len(trace.moves)), math.nan)
    for pair, moved in enumerate(trace.moves):
        means = moved[2 + side].mean(axis=0)
        known = [row for row, position in enumerate(order) if position < len(means)]
        found[known, pair] = means[[order[row] for row in known]]
    return found


def _table(values: Floats) -> Table:
    return tuple(tuple(row) for row in values.tolist())


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

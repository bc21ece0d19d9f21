"""`measure_features`: similarity of K, V, attention and FFN outputs between adjacent passes under `none`."""

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
from remask.policies.base import Traits
from remask.policies.dense import Dense
from remask_lab.subjects.features_report import FEATURES, PAIRS, FeatureMeans, FeaturesReport, Foresight
from remask_lab.subjects.moments import Moments
from remask_lab.subjects.series import Floats
from remask_lab.subjects.watch import Watcher, check_uncached, distance, leading_slots, trace_all, units

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
        self._none = llm.policy("none")
        self._watcher = Watcher(llm, store_budget_tokens=0)
        self._trace: FeatureTrace | None = None
        self._before: list[list[Tensor]] = []  # unit vectors [rows, D], by layer and feature

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where `trace` would."""
        check_uncached(item, self._none, "the similarity of features")
        self._watcher.engine.check(replace(item, prefix_length=0, policy=self._none))

    def trace(self, item: Request) -> FeatureTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self.check(item)
        self._trace, self._before = None, []
        watched = replace(item, prefix_length=0, policy=DenseWithOutputs())
        self._watcher.run(watched, self._look)
        self._before = []
        assert self._trace is not None
        return self._trace

    def _look(self, running: RunningRequest, hidden: Tensor) -> None:  # noqa: ARG002
        canvas, pool = running.branches[0].canvas, self._watcher.engine.pool
        if self._trace is None:
            self._trace = FeatureTrace(canvas.prompt, canvas.end, len(canvas))
        self._trace.passes += 1
        slots = leading_slots(running, self._watcher.engine.model.device)
        after = [
            [units(kept[slots]) for kept in (pool.k[layer], pool.v[layer], *pool.outputs[layer])]
            for layer in range(len(pool.k))
        ]
        if self._before:
            moved = [
                torch.stack([distance(*pair) for pair in zip(*layers, strict=True)])
                for layers in zip(self._before, after, strict=True)
            ]
            self._trace.moved.append(torch.stack(moved, dim=1).cpu().numpy())
        self._before = after


def measure_features(llm: LLM, work: Sequence[Request], ratio: float = 0.25, progress: bool = False) -> FeaturesReport:
    """Run requests one at a time under `none`, and tell how K, V, attention and FFN outputs change from pass to pass.

    `ratio` is the share of the response that is picked where early and late features are compared (dLLM-Cache's rho).
    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run or asks for a cache.
    """
    return summarise(llm, trace_all(FeatureTracer(llm), work, progress), ratio)


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

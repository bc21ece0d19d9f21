"""`measure_drift`: the traces of some requests, summed up."""

from collections.abc import Sequence

import numpy as np

from remask.engine.request import Request
from remask.llm import LLM
from remask_lab.instruments.moments import Moments, off_diagonal_mean
from remask_lab.instruments.regions import REGIONS, SINK
from remask_lab.instruments.series import Floats, by_pass, mean
from remask_lab.instruments.watch import trace_all
from remask_lab.subjects.report import DriftReport, RegionMeans, Subject
from remask_lab.subjects.trace import Trace, Tracer


def measure_drift(llm: LLM, work: Sequence[Request], progress: bool = False) -> DriftReport:
    """Run requests one at a time under `none` and tell what changed from pass to pass.

    The definitions are those of the thesis "Block-Wise KV Caching for Uniform Diffusion Language Models", section 6.5
    and 6.6; `docs/analysis.md` says where it leaves a choice. Nothing of `llm` is changed, and its engine does not run.

    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run or asks for a cache.
    """
    return summarise(llm, trace_all(Tracer(llm), work, progress))


def summarise(llm: LLM, traces: Sequence[Trace]) -> DriftReport:
    """The report of `traces`, which are not changed."""
    shape = llm.loaded.config
    moments = Moments(shape.layers)
    for trace in traces:
        moments.merge(trace.moments)
    present = [index for index in range(len(REGIONS)) if _exists(index, traces, sink=shape.sink)]
    k_layers, v_layers = moments.layer_correlations()
    return DriftReport(
        subject=Subject(
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
        k_layers=tuple(tuple(row) for row in k_layers.tolist()),
        v_layers=tuple(tuple(row) for row in v_layers.tolist()),
        k_layers_mean=off_diagonal_mean(k_layers),
        v_layers_mean=off_diagonal_mean(v_layers),
        kv_correlation=moments.kv_correlation(),
    )


def _exists(index: int, traces: Sequence[Trace], *, sink: bool) -> bool:
    """Whether any block's queries could look at a region: rows to come are not there yet on block-causal models."""
    if index == SINK:
        return sink
    return any((mass[index] > 0) for trace in traces for mass in trace.attention)


def _means(index: int, traces: Sequence[Trace]) -> RegionMeans:
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


def _moved(trace: Trace, drifts: Sequence[Floats], index: int, *, within: bool = False) -> list[Floats]:
    """Per pair of passes, the drift of the region's positions; `within` leaves out pairs across blocks."""
    return [
        drift[trace.region[after] == index]
        for after, drift in enumerate(drifts, start=1)
        if not within or trace.starts[after] == trace.starts[after - 1]
    ]


def _drift(trace: Trace, drifts: Sequence[Floats], index: int) -> Floats:
    """Mean drift of a region that leads to each pass, [passes]."""
    if index == SINK:
        return np.array([np.nan] + [0.0] * len(drifts))
    return np.array([np.nan, *map(mean, _moved(trace, drifts, index))])


def _attention(trace: Trace, index: int) -> Floats:
    """The region's share in each pass, [passes]; NaN where the canvas has no such region then."""
    shares = [
        mass[index] if index == SINK or (region == index).any() else np.nan
        for mass, region in zip(trace.attention, trace.region, strict=True)
    ]
    return np.array(shares)

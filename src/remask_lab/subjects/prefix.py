"""Similarity of a shared prefix's K/V over layers and steps (BiCache section 4.1, figure 3)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.depth.profile import check_tau, run_depth
from remask.depth.similarity import KV, Measure, PrefixProbe, layer_cosines
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.llm import LLM
from remask_lab.subjects.passes import Look, Passes
from remask_lab.subjects.prefix_report import PrefixSimilarity, Table

Floats = NDArray[np.float64]


def measure_prefix(
    llm: LLM, requests: Sequence[Request], tau: float = 0.97, measure: Measure = "flat", progress: bool = False
) -> PrefixSimilarity:
    """Run `requests` under `none` and compare their prefixes with the same prefixes alone after every step.

    The definitions are those of `PrefixProbe.similarity`, which looks at the first step alone. Raises `ConfigError`,
    before anything runs, where `Passes` refuses a request or one cannot run.
    """
    check_tau(tau)
    passes, policy = Passes(llm, requests), llm.policy("none")
    passes.check(requests, policy)
    probe = PrefixProbe(llm.model, passes.max_tokens)
    traces = []
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        count = passes.prefix(request)
        alone = probe.states(request.prompt_token_ids[:count])
        seen: list[Floats] = []
        passes.run(request, policy, _look(passes, count, alone, measure, seen))
        traces.append(np.stack(seen, axis=-1))
    prefixes = [passes.prefix(request) for request in requests]
    canvases = [len(request.prompt_token_ids) + request.params.max_tokens for request in requests]
    return summarise(traces, tau, measure, float(np.mean(prefixes)), float(np.mean(canvases)))


def summarise(
    traces: Sequence[Floats], tau: float, measure: Measure, prefix_tokens: float, canvas_tokens: float
) -> PrefixSimilarity:
    """The report of one array [2, layers, steps] a request, K before V; they are not changed."""
    steps = max(trace.shape[-1] for trace in traces)
    every = np.full((len(traces), *traces[0].shape[:2], steps), np.nan)
    for row, trace in zip(every, traces, strict=True):
        row[..., : trace.shape[-1]] = trace
    both = every.mean(axis=1)  # [requests, layers, steps]
    mean = np.nanmean(both, axis=0)
    depth = [run_depth(least.tolist(), tau) for least in np.nanmin(both, axis=2)]
    shallow = min(depth)
    return PrefixSimilarity(
        requests=len(traces),
        steps=steps,
        prefix_tokens=prefix_tokens,
        canvas_tokens=canvas_tokens,
        tau=tau,
        measure=measure,
        similarity=_table(mean),
        k=_table(np.nanmean(every[:, 0], axis=0)),
        v=_table(np.nanmean(every[:, 1], axis=0)),
        over_steps=tuple(mean.std(axis=1).tolist()),
        over_requests=tuple(np.nanmean(both, axis=2).std(axis=0).tolist()),
        depth=tuple(depth),
        first_depth=tuple(run_depth(request[:, 0].tolist(), tau) for request in both),
        shallow=shallow,
        shallow_mean=_mean(mean[:shallow]),
        deep_mean=_mean(mean[shallow:]),
    )


def _look(passes: Passes, count: int, alone: KV, measure: Measure, seen: list[Floats]) -> Look:
    def look(running: RunningRequest) -> None:
        seen.append(layer_cosines(passes.kv(running, count), alone, measure))

    return look


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def _table(values: Floats) -> Table:
    return tuple(tuple(row) for row in values.tolist())

"""Similarity of a shared prefix's K/V over layers and steps (BiCache section 4.1, figure 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.analysis.passes import Look, Passes
from remask.core.request import Request
from remask.engine.job import Job
from remask.llm import LLM
from remask.profiling.profile import check_tau, run_depth
from remask.profiling.similarity import KV, Measure, PrefixProbe, layer_cosines

Floats = NDArray[np.float64]
Table = tuple[tuple[float, ...], ...]  # [layers][steps]


@dataclass(frozen=True, slots=True)
class PrefixSimilarity:
    """How much a prefix's K/V inside whole canvases are like those of the prefix alone, while requests are denoised.

    Attributes:
        requests, steps: how many; steps are those of the longest request.
        prefix_tokens, canvas_tokens: means over requests.
        tau: similarity that a shallow layer must exceed; `measure` is the definition of similarity.
        similarity: of K and V with equal weight, mean over requests, [layers][steps]; `k` and `v` are its halves.
        over_steps: per layer, standard deviation over steps of `similarity`.
        over_requests: per layer, standard deviation over requests of a request's mean over its steps.
        depth: per request, the leading layers above tau in every step; `first_depth` in the first step alone.
        shallow: the least of `depth`.
        shallow_mean, deep_mean: of `similarity` in the layers up to `shallow`, and above it; NaN without such layers.
    """

    requests: int
    steps: int
    prefix_tokens: float
    canvas_tokens: float
    tau: float
    measure: Measure
    similarity: Table
    k: Table
    v: Table
    over_steps: tuple[float, ...]
    over_requests: tuple[float, ...]
    depth: tuple[int, ...]
    first_depth: tuple[int, ...]
    shallow: int
    shallow_mean: float
    deep_mean: float


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


def reading(report: PrefixSimilarity) -> str:
    """What the numbers show, in one paragraph."""
    layers = len(report.similarity)
    ratio = 100 * report.prefix_tokens / report.canvas_tokens
    parts = [
        f"A prefix of {report.prefix_tokens:.0f} tokens ({ratio:.0f} % of the canvas) stays above {report.tau:g} in "
        f"every step of every request in the first {report.shallow} of {layers} layers"
    ]
    if report.shallow in (0, layers):
        mean = report.shallow_mean if report.shallow else report.deep_mean
        parts[0] += f"; the mean over all layers is {mean:.3f}."
    else:
        parts[0] += f": {report.shallow_mean:.3f} on average there, {report.deep_mean:.3f} in the layers above."
    lowest = min(min(row) for row in report.similarity)
    where = next(layer for layer, row in enumerate(report.similarity, 1) if min(row) == lowest)
    parts.append(f"It is lowest in layer {where}, at {lowest:.3f}.")
    if report.steps > 1:
        worst = int(np.argmax(report.over_steps))
        spread = (
            f"Over {report.steps} steps a layer's similarity has a standard deviation of "
            f"{np.mean(report.over_steps):.4f} on average and {max(report.over_steps):.4f} at most (layer {worst + 1})"
        )
        if report.requests > 1:
            spread += f", and between {report.requests} requests of {np.mean(report.over_requests):.4f} on average"
        parts.append(spread + ".")
        changed = sum(a != b for a, b in zip(report.depth, report.first_depth, strict=True))
        if changed:
            parts.append(
                f"The first step alone would give {changed} of {report.requests} requests another depth: on average "
                f"{np.mean(report.first_depth):.2f} layers, where all steps give {np.mean(report.depth):.2f}."
            )
        else:
            parts.append("The first step alone gives every request the depth that all steps give.")
    return " ".join(parts)


def _look(passes: Passes, count: int, alone: KV, measure: Measure, seen: list[Floats]) -> Look:
    def look(job: Job) -> None:
        seen.append(layer_cosines(passes.kv(job, count), alone, measure))

    return look


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")


def _table(values: Floats) -> Table:
    return tuple(tuple(row) for row in values.tolist())

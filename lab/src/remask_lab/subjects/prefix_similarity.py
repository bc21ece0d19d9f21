"""`remask analyze prefix-similarity`: a shared prefix's K/V inside whole canvases against those of the prefix alone.

Similarity is measured by layer and by denoising step (BiCache section 4.1, figure 3).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.engine.request import Request
from remask.llm import LLM
from remask_lab.arguments import (
    Outcome,
    check_workload_options,
    draw_workload,
    heading,
    open_without_pool,
    required_input,
    workload_settings,
)
from remask_lab.drawing import K_COLOR, V_COLOR, heatmap, label, legend_below, new_panels
from remask_lab.instruments.depths import run_depth, states
from remask_lab.instruments.watch import Passes, check_masked, leading_kv
from remask_lab.records.markdown import text_table
from remask_lab.records.record import about
from remask_lab.similarity.probe import Measure, PrefixProbe, layer_cosines
from remask_lab.similarity.rule import check_tau

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Floats = NDArray[np.float64]
Table: TypeAlias = tuple[tuple[float, ...], ...]
"""[layers][steps]."""


def measure(args: argparse.Namespace) -> Outcome:
    """Draw the requests that `args` describe, run them, and compare their prefixes."""
    llm = open_without_pool(args, required_input(check_workload_options(args)))
    check_masked(llm)
    workload = draw_workload(llm, args)
    definition: Measure = "official" if args.official else "flat"
    requests = [task.request for task in workload.tasks]
    report = measure_prefix(llm, requests, args.tau, definition, progress=llm.session.progress)
    facts = about(llm, seed=args.seed, settings=workload_settings(workload) | {"tau": args.tau, "measure": definition})
    report_text = f"{heading(llm, workload)}\n\n{text(report)}"
    return Outcome(facts, report, report_text, lambda: figures(report))


@dataclass(frozen=True, slots=True)
class PrefixSimilarity:
    """How similar a prefix's K/V inside whole canvases are to those of the prefix alone, in every step.

    Attributes:
        requests, steps: numbers of requests, and of steps of the longest one.
        prefix_tokens, canvas_tokens: means over requests.
        tau: similarity that a shallow layer must exceed.
        measure: the definition of similarity, as in `layer_cosines`.
        similarity: the mean of `k` and `v`, which are means over requests, [layers][steps].
        over_steps: per layer, standard deviation over steps of `similarity`.
        over_requests: per layer, standard deviation over requests of a request's mean over its steps.
        depth: per request, number of leading layers above tau in every step; `first_depth` in the first step alone.
        shallow: the least of `depth`.
        shallow_mean, deep_mean: mean of `similarity` up to `shallow`, and above it; NaN without such layers.
    """

    requests: int
    steps: int
    prefix_tokens: float
    canvas_tokens: float
    tau: float
    measure: str
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
    """Run `requests` under `none`, and compare their prefixes' K/V in every step with those of the prefixes alone.

    `measure` is as in `layer_cosines`. Raises `ConfigError`, before anything runs, where `Passes` refuses a request or
    one cannot run.
    """
    check_tau(tau)
    passes, policy = Passes(llm, requests), llm.session.policy("none")
    passes.check(requests, policy)
    probe = PrefixProbe(llm.model, passes.max_tokens)
    traces = []
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        prefix = passes.prefix(request)
        alone = states(probe, request.prompt_token_ids[:prefix])
        steps = passes.run(request, policy, lambda seen: layer_cosines(leading_kv(seen, prefix), alone, measure))  # noqa: B023
        traces.append(np.stack(steps, axis=-1))
    prefixes = [passes.prefix(request) for request in requests]
    canvases = [len(request.prompt_token_ids) + request.params.max_tokens for request in requests]
    return summarise(traces, tau, measure, float(np.mean(prefixes)), float(np.mean(canvases)))


def summarise(
    traces: Sequence[Floats], tau: float, measure: Measure, prefix_tokens: float, canvas_tokens: float
) -> PrefixSimilarity:
    """The report of similarities [2, layers, steps] of each request, K before V. `traces` are not changed."""
    similarities = np.full((len(traces), *traces[0].shape[:-1], max(trace.shape[-1] for trace in traces)), np.nan)
    for row, trace in zip(similarities, traces, strict=True):
        row[..., : trace.shape[-1]] = trace
    means = similarities.mean(axis=1)  # [requests, layers, steps]
    similarity = np.nanmean(means, axis=0)
    depth = [run_depth(least_similarities.tolist(), tau) for least_similarities in np.nanmin(means, axis=2)]
    shallow = min(depth)
    return PrefixSimilarity(
        requests=len(traces),
        steps=similarities.shape[-1],
        prefix_tokens=prefix_tokens,
        canvas_tokens=canvas_tokens,
        tau=tau,
        measure=measure,
        similarity=_table(similarity),
        k=_table(np.nanmean(similarities[:, 0], axis=0)),
        v=_table(np.nanmean(similarities[:, 1], axis=0)),
        over_steps=tuple(similarity.std(axis=1).tolist()),
        over_requests=tuple(np.nanmean(means, axis=2).std(axis=0).tolist()),
        depth=tuple(depth),
        first_depth=tuple(run_depth(request[:, 0].tolist(), tau) for request in means),
        shallow=shallow,
        shallow_mean=_mean(similarity[:shallow]),
        deep_mean=_mean(similarity[shallow:]),
    )


def _table(values: Floats) -> Table:
    """An array [layers, steps] as nested tuples."""
    return tuple(tuple(row) for row in values.tolist())


def _mean(values: Floats) -> float:
    """The mean of `values`, NaN without any."""
    return float(values.mean()) if values.size else float("nan")


def text(report: PrefixSimilarity) -> str:
    """A table with one line per layer, and the depths at tau."""
    layers = text_table(
        range(len(report.similarity)),
        {
            "layer": lambda layer: str(layer + 1),
            "K": lambda layer: f"{np.mean(report.k[layer]):.4f}",
            "V": lambda layer: f"{np.mean(report.v[layer]):.4f}",
            "mean": lambda layer: f"{np.mean(report.similarity[layer]):.4f}",
            "least step": lambda layer: f"{min(report.similarity[layer]):.4f}",
            "std over steps": lambda layer: f"{report.over_steps[layer]:.4f}",
            "std over requests": lambda layer: f"{report.over_requests[layer]:.4f}",
        },
    )
    depths = f"in all steps {report.shallow}, in the first step {min(report.first_depth)}"
    return f"{layers}\n\nleading layers above tau {report.tau:g} in every request: {depths}"


def figures(report: PrefixSimilarity) -> dict[str, Figure]:
    """The picture of a report by the name of its file: similarity over layers and steps, and its spread by layer."""
    figure, (left, right) = new_panels(
        f"K/V of a shared prefix in its canvas against the prefix alone ({report.requests} requests, "
        f"r = {100 * report.prefix_tokens / report.canvas_tokens:.0f} %)",
        2,
        width_ratios=(3, 2),
        sharey=True,
    )
    layers = len(report.similarity)
    figure.colorbar(heatmap(left, report.similarity), ax=left, label="cosine similarity")
    if 0 < report.shallow < layers:
        left.axhline(report.shallow + 0.5, color="white", linestyle="--", linewidth=1.5)
    title = f"mean similarity; dashed: depth {report.shallow}, above {report.tau:g} always"
    label(left, title, "denoising step", "layer")
    places = np.arange(1, layers + 1)
    right.barh(places - 0.2, report.over_steps, 0.36, color=K_COLOR, label="over steps")
    right.barh(places + 0.2, report.over_requests, 0.36, color=V_COLOR, label="over requests")
    label(right, "spread", "standard deviation of the similarity", grid="x")
    right.locator_params(axis="x", nbins=4)
    legend_below(figure, 2, right, "outside lower right")
    return {"prefix-similarity": figure}

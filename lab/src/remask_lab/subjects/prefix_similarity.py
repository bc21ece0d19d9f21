"""`remask analyze prefix-similarity`: a shared prefix's K/V inside whole canvases against those of the prefix alone.

Similarity is measured by layer and by denoising step (BiCache section 4.1, figure 3).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from remask.depth.rule import check_tau
from remask.depth.similarity import Measure, PrefixProbe, layer_cosines
from remask.engine.request import Request
from remask.llm import LLM
from remask_lab.asked import Outcome, asked_workload, described, heading, open_without_pool
from remask_lab.drawing import K_COLOR, V_COLOR, heatmap, label, legend_below, new_panels
from remask_lab.instruments.depths import run_depth, states
from remask_lab.instruments.series import Floats, Table, as_table, mean, padded
from remask_lab.instruments.watch import Passes, check_masked, leading_kv
from remask_lab.records.markdown import text_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` shape and compare their prefixes."""
    llm = open_without_pool(args)
    check_masked(llm)
    workload = asked_workload(llm, args)
    definition: Measure = "official" if args.official else "flat"
    requests = [task.request for task in workload.tasks]
    report = measure_prefix(llm, requests, args.tau, definition, progress=llm.session.progress)
    facts = about(llm, seed=args.seed, settings=described(workload) | {"tau": args.tau, "measure": definition})
    told = f"{heading(llm, workload)}\n\n{text(report)}"
    return Outcome(facts, report, told, reading(report), lambda: figures(report))


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


def reading(report: PrefixSimilarity) -> str:
    """What the numbers show, in one paragraph."""
    layers = len(report.similarity)
    ratio = 100 * report.prefix_tokens / report.canvas_tokens
    said = (
        f"A prefix of {report.prefix_tokens:.0f} tokens ({ratio:.0f} % of the canvas) stays above {report.tau:g} in "
        f"every step of every request in the first {report.shallow} of {layers} layers"
    )
    if report.shallow in (0, layers):
        said += f"; the mean over all layers is {report.shallow_mean if report.shallow else report.deep_mean:.3f}."
    else:
        said += f": {report.shallow_mean:.3f} on average there, {report.deep_mean:.3f} in the layers above."
    least = np.min(report.similarity, axis=1)
    said += f" It is lowest in layer {int(least.argmin()) + 1}, at {least.min():.3f}."
    if report.steps == 1:
        return said
    said += (
        f" Over {report.steps} steps a layer's similarity has a standard deviation of {np.mean(report.over_steps):.4f} "
        f"on average and {max(report.over_steps):.4f} at most (layer {int(np.argmax(report.over_steps)) + 1})"
    )
    if report.requests > 1:
        said += f", and between {report.requests} requests of {np.mean(report.over_requests):.4f} on average"
    changed = sum(a != b for a, b in zip(report.depth, report.first_depth, strict=True))
    if not changed:
        return f"{said}. The first step alone gives every request the depth that all steps give."
    return (
        f"{said}. The first step alone would give {changed} of {report.requests} requests another depth: on average "
        f"{np.mean(report.first_depth):.2f} layers, where all steps give {np.mean(report.depth):.2f}."
    )


def measure_prefix(
    llm: LLM, requests: Sequence[Request], tau: float = 0.97, measure: Measure = "flat", progress: bool = False
) -> PrefixSimilarity:
    """Run `requests` under `none` and compare their prefixes with the same prefixes alone in every step.

    The definitions are those of `PrefixProbe.similarity`, which measures the first step alone. Raises `ConfigError`,
    before anything runs, where `Passes` refuses a request or one cannot run.
    """
    check_tau(tau)
    passes, policy = Passes(llm, requests), llm.session.policy("none")
    passes.check(requests, policy)
    probe = PrefixProbe(llm.model, passes.max_tokens)
    traces = []
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        count = passes.prefix(request)
        alone = states(probe, request.prompt_token_ids[:count])
        steps = passes.run(request, policy, lambda seen: layer_cosines(leading_kv(seen, count), alone, measure))  # noqa: B023
        traces.append(np.stack(steps, axis=-1))
    prefixes = [passes.prefix(request) for request in requests]
    canvases = [len(request.prompt_token_ids) + request.params.max_tokens for request in requests]
    return summarise(traces, tau, measure, float(np.mean(prefixes)), float(np.mean(canvases)))


def summarise(
    traces: Sequence[Floats], tau: float, measure: Measure, prefix_tokens: float, canvas_tokens: float
) -> PrefixSimilarity:
    """The report of one array [2, layers, steps] a request, K before V; they are not changed."""
    every = padded(traces)
    both = every.mean(axis=1)  # [requests, layers, steps]
    similarity = np.nanmean(both, axis=0)
    depth = [run_depth(least.tolist(), tau) for least in np.nanmin(both, axis=2)]
    shallow = min(depth)
    return PrefixSimilarity(
        requests=len(traces),
        steps=every.shape[-1],
        prefix_tokens=prefix_tokens,
        canvas_tokens=canvas_tokens,
        tau=tau,
        measure=measure,
        similarity=as_table(similarity),
        k=as_table(np.nanmean(every[:, 0], axis=0)),
        v=as_table(np.nanmean(every[:, 1], axis=0)),
        over_steps=tuple(similarity.std(axis=1).tolist()),
        over_requests=tuple(np.nanmean(both, axis=2).std(axis=0).tolist()),
        depth=tuple(depth),
        first_depth=tuple(run_depth(request[:, 0].tolist(), tau) for request in both),
        shallow=shallow,
        shallow_mean=mean(similarity[:shallow]),
        deep_mean=mean(similarity[shallow:]),
    )


def text(report: PrefixSimilarity) -> str:
    """One line a layer."""
    return text_table(
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


def figures(report: PrefixSimilarity) -> dict[str, Figure]:
    """Similarity over layers and steps, and its spread by layer."""
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

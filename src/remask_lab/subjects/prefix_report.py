"""What a measurement of prefix similarity came to, and what it shows in words."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Table: TypeAlias = tuple[tuple[float, ...], ...]  # [layers][steps]


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

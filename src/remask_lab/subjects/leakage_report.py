"""What a measurement of attention leakage came to, and what it shows in words."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the bound, per layer, over all requests, steps and ratios that were measured.

    Attributes:
        value_norm: V, greatest norm of a value vector of any head and position (A1).
        least_norm: m, least norm of the prefix's K/V, alone or in a canvas (A3).
        stability: C, greatest quotient of the shift of the prefix's K/V and its attention deviation (A4).
    """

    value_norm: tuple[float, ...]
    least_norm: tuple[float, ...]
    stability: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RatioLeakage:
    """What was measured at one prefix ratio, per layer over requests and steps, and what it guarantees.

    Attributes:
        leakage: share of attention that prefix rows give to what follows them; `greatest_leakage` is phi.
        deviation: greatest mean distance between their attention output and that over the prefix alone.
        similarity: the least.
        bound: lower bound of the similarity from phi, as the appendix has it; `deviation_bound` from `deviation`.
        depth: least depth of a request, over all its steps; `mean_depth` the mean.
        guaranteed_depth, deviation_depth: leading layers whose bounds exceed tau.
    """

    leakage: tuple[float, ...]
    greatest_leakage: tuple[float, ...]
    deviation: tuple[float, ...]
    similarity: tuple[float, ...]
    bound: tuple[float, ...]
    deviation_bound: tuple[float, ...]
    depth: int
    mean_depth: float
    guaranteed_depth: int
    deviation_depth: int


@dataclass(frozen=True, slots=True)
class LeakageReport:
    """Leakage and bounds by prefix ratio in percent; `steps` denoising steps of `samples` requests at each."""

    tau: float
    layers: int
    samples: int
    steps: int
    source: str
    constants: Constants
    ratios: Mapping[int, RatioLeakage]


def reading(report: LeakageReport) -> str:
    """What the numbers show, in one paragraph."""
    low, high = min(report.ratios), max(report.ratios)
    first, last = report.ratios[low], report.ratios[high]
    means = {ratio: 100 * float(np.mean(own.leakage)) for ratio, own in report.ratios.items()}
    parts = []
    if low == high:
        parts.append(f"At r = {low} % prefix rows give {means[low]:.1f} % of their attention to what follows them.")
    else:
        falls = all(means[b] <= means[a] for a, b in zip(sorted(means), sorted(means)[1:], strict=False))
        parts.append(
            f"From r = {low} % to {high} % the attention that prefix rows give to what follows them goes from "
            f"{means[low]:.1f} % to {means[high]:.1f} % (mean over layers), "
            + ("falling all the way" if falls else "not falling all the way")
            + f"; attention without preferences would give {100 - low} % and {100 - high} %."
        )
    parts.append(
        f"Every request keeps at least {_span(first.depth, last.depth)} of {report.layers} layers above {report.tau:g} "
        f"in all steps; the appendix's bound guarantees {_span(first.guaranteed_depth, last.guaranteed_depth)}, and "
        f"{_span(first.deviation_depth, last.deviation_depth)} with the measured deviation of attention in place of "
        "twice leakage times value."
    )
    slack = [own.depth - own.guaranteed_depth for own in report.ratios.values()]
    parts.append(
        "The bound reaches the measured depth at every ratio."
        if not any(slack)
        else f"The bound falls short of the measured depth by {np.mean(slack):.1f} layers on average over the ratios."
    )
    return " ".join(parts)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} (lowest r) to {last} (highest r)"

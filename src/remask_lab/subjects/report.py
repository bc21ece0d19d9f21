"""What a drift measurement came to: means by region and by pass, correlations. Plain numbers."""

import math
from dataclasses import dataclass
from typing import TypeAlias

Series: TypeAlias = tuple[float, ...]  # one number a pass; NaN where there is nothing to measure


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured.

    `passes` are each request's denoising steps; tokens are those of the longest prompt and response.
    """

    model: str
    family: str
    kind: str
    layers: int
    dtype: str
    passes: tuple[int, ...]
    prompt_tokens: int
    response_tokens: int
    block_length: int


@dataclass(frozen=True, slots=True)
class RegionMeans:
    """Means over all positions and passes of one region. Drift is a cosine distance per pass, NaN for too few passes.

    `k_within` and `v_within` leave out what happens from a block's last pass to the next block's first. `attention`
    counts passes without the region as 0, so that the regions' shares sum to 1.
    """

    k_drift: float
    v_drift: float
    k_within: float
    v_within: float
    attention: float


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Drift, attention mass and token dynamics of one model.

    Attributes:
        regions: by name, those that the canvases have.
        k_drift, v_drift, attention: by region and pass. Drift leads to the pass at that index, so the first is NaN.
        change_rate: share of the response's tokens that each pass changed.
        entropy: mean over the predicted positions of each pass, in nats.
        k_layers, v_layers: Pearson's r of drift between layers, [layers][layers].
        k_layers_mean, v_layers_mean: the means of their entries off the diagonal.
        kv_correlation: Pearson's r between the drift of K and of V.
    """

    subject: Subject
    regions: dict[str, RegionMeans]
    k_drift: dict[str, Series]
    v_drift: dict[str, Series]
    attention: dict[str, Series]
    change_rate: Series
    entropy: Series
    k_layers: tuple[Series, ...]
    v_layers: tuple[Series, ...]
    k_layers_mean: float
    v_layers_mean: float
    kv_correlation: float


def reading(report: DriftReport) -> str:
    """The report in a paragraph: where K and V move, where attention looks, how tokens settle."""
    moved = {
        name: (means.k_drift + means.v_drift) / 2
        for name, means in report.regions.items()
        if name != "bias" and not math.isnan(means.k_drift)
    }
    parts = []
    if moved:
        most, least = max(moved, key=lambda name: moved[name]), min(moved, key=lambda name: moved[name])
        parts.append(
            f"K and V move most in the region {words(most)} ({moved[most]:.2e} a pass) and least in {words(least)} "
            f"({moved[least]:.2e})."
        )
        still = [name for name, means in report.regions.items() if name in moved and means.v_within == 0]
        if still:
            parts.append(f"Within a block {', '.join(map(words, still))} do not move at all.")
    else:
        parts.append("No request has two passes, so nothing is known of drift.")
    looked = sorted(report.regions, key=lambda name: -report.regions[name].attention)[:2]
    shares = " and ".join(f"{words(name)} ({100 * report.regions[name].attention:.1f} %)" for name in looked)
    parts.append(
        f"The current block attends most to {shares}. A pass changes "
        f"{100 * sum(report.change_rate) / len(report.change_rate):.2f} % of the response, and entropy goes from "
        f"{report.entropy[0]:.2f} to {report.entropy[-1]:.2f} nats."
    )
    if not math.isnan(report.kv_correlation):
        parts.append(f"Drift of K and of V correlate by {report.kv_correlation:.2f}.")
    return " ".join(parts)


def words(region: str) -> str:
    """A region's name as text."""
    return region.replace("_", " ")

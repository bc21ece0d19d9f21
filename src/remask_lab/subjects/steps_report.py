"""What happened from pass to pass under several cache policies. Plain numbers."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

Series: TypeAlias = tuple[float, ...]  # NaN where there is nothing to measure


@dataclass(frozen=True, slots=True)
class StepCurves:
    """One policy. Series by pass are means over the requests that ran that pass.

    Attributes:
        cache, settings: the policy.
        passes: of each request.
        entropy: of the predicted positions, in nats, over all tokens but the mask.
        probability: the largest of each predicted position.
        change_rate: share of the response's tokens that the pass changed.
        row_layers: computed by the pass.
        milliseconds: that the pass took with nobody looking on, sampling included: median of the rounds.
        k_drift, v_drift: cosine distance of the current block's K (V) to those of the pass before, mean over layers and
            positions, by step within the block. The first step of a block follows another block, and is NaN.
        trajectories: of the first request: the largest probability of each response position by pass,
            [positions][passes]; NaN where it is not predicted.
    """

    cache: str
    settings: dict[str, Any]
    passes: tuple[int, ...]
    entropy: Series
    probability: Series
    change_rate: Series
    row_layers: Series
    milliseconds: Series
    k_drift: Series
    v_drift: Series
    trajectories: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class StepsReport:
    """Entropy, probability, token changes, drift and cost by pass, under each policy; `none` comes first."""

    model: str
    kind: str
    requests: int
    rounds: int
    policies: tuple[StepCurves, ...]


def reading(report: StepsReport) -> str:
    """The report in a paragraph."""
    none, *others = report.policies
    work, time = sum(none.row_layers), sum(none.milliseconds)
    parts = [
        f"Under none {_certainty(none)}; a pass changes {100 * _mean(none.change_rate):.1f} % of the response on "
        f"average, {100 * none.change_rate[0]:.1f} % in the first.",
        _drift(none),
    ]
    for curves in others:
        low, high = min(curves.row_layers), max(curves.row_layers)
        cost = (
            f"every pass computes {low:.0f} row-layers"
            if low == high
            else f"passes compute {low:.0f} to {high:.0f} row-layers"
        )
        parts.append(
            f"Under {curves.cache} {_certainty(curves)}; {cost}, {sum(curves.row_layers) / work:.2f} of none's in all, "
            f"in {sum(curves.milliseconds) / time:.2f} of its time."
        )
    return " ".join(part for part in parts if part)


def _certainty(curves: StepCurves) -> str:
    return (
        f"entropy goes from {curves.entropy[0]:.2f} to {curves.entropy[-1]:.2f} nats and the largest probability from "
        f"{curves.probability[0]:.2f} to {curves.probability[-1]:.2f} over {len(curves.entropy)} passes"
    )


def _drift(curves: StepCurves) -> str:
    known = [(step, value) for step, value in enumerate(curves.v_drift, start=1) if not math.isnan(value)]
    if len(known) < 2:
        return ""
    step, most = max(known, key=lambda pair: pair[1])
    last, end = known[-1]
    told = f"The block's V moves most towards step {step} of a block ({most:.2e})"
    return f"{told}, the last." if step == last else f"{told}, and by {end:.2e} towards step {last}, the last."


def _mean(values: Series) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan

"""What a drift measurement came to: means by region and by pass, correlations. Plain numbers."""

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

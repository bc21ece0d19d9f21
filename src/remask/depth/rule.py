"""`DepthRule`: how similarities become the depths of a table."""

from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

from remask.checks.values import one_of

OverLayers: TypeAlias = Literal["leading", "largest"]
OverRequests: TypeAlias = Literal["least-depth", "mean-depth", "mean-curve"]
AtBoundary: TypeAlias = Literal["safe", "paper"]
OVER_LAYERS: tuple[OverLayers, ...] = ("leading", "largest")
OVER_REQUESTS: tuple[OverRequests, ...] = ("least-depth", "mean-depth", "mean-curve")
AT_BOUNDARY: tuple[AtBoundary, ...] = ("safe", "paper")


@dataclass(frozen=True, slots=True)
class DepthRule:
    """Three choices that BiCache's text (section 5.1) and the authors' code leave open or make differently.

    A rule reads similarities as limits: for each depth b from 1 to the number of layers, the tau below which the depth
    is at least b. So a table can be read at any tau.

    Attributes:
        layers: which layers must exceed tau. "leading": all up to the depth. "largest": the layer at the depth alone,
            which is the paper's sentence taken literally.
        requests: what is made of many requests. "least-depth": the least of their depths, so that all of them may use
            it. "mean-depth": the mean of their depths, fractions floored (the paper). "mean-curve": the depth of their
            mean similarities (the authors' code).
        boundary: "safe" asks it of the layer above the depth too, because with a stored boundary the K/V there are
            those of the prefix alone. Above the last layer there is none. "paper" does not, so that layer is never
            looked at.
    """

    layers: OverLayers = "leading"
    requests: OverRequests = "least-depth"
    boundary: AtBoundary = "safe"

    def __post_init__(self) -> None:
        one_of("layers", self.layers, OVER_LAYERS)
        one_of("requests", self.requests, OVER_REQUESTS)
        one_of("boundary", self.boundary, AT_BOUNDARY)

    def __str__(self) -> str:
        return f"{self.layers}, {self.requests}, {self.boundary}"


RULES = tuple(DepthRule(*parts) for parts in product(OVER_LAYERS, OVER_REQUESTS, AT_BOUNDARY))
"""All rules, the default one first."""

AUTHORS = DepthRule("leading", "mean-curve", "paper")
"""The reading of the authors' code."""

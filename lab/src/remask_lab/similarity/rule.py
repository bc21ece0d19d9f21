"""`ProfileSettings` and `DepthRule`: how a depth table is measured, and how similarities become its depths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from remask.checks.values import check_choice, check_real, check_whole
from remask.errors import ConfigError

OverLayers: TypeAlias = Literal["leading", "largest"]
OverRequests: TypeAlias = Literal["least-depth", "mean-depth", "mean-curve"]
AtBoundary: TypeAlias = Literal["safe", "paper"]
OVER_LAYERS: tuple[OverLayers, ...] = ("leading", "largest")
OVER_REQUESTS: tuple[OverRequests, ...] = ("least-depth", "mean-depth", "mean-curve")
AT_BOUNDARY: tuple[AtBoundary, ...] = ("safe", "paper")


@dataclass(frozen=True, slots=True)
class DepthRule:
    """Three choices on which BiCache's text (section 5.1) and the authors' code differ or are silent.

    A rule turns similarities into limits: for each depth b from 1 to the number of layers, the tau below which the
    depth is at least b. So one table gives the depths at every tau.

    Attributes:
        layers: which layers must exceed tau. "leading": all up to the depth. "largest": the layer at the depth alone,
            which is the paper's sentence taken literally.
        requests: how several requests give one depth. "least-depth": the least of their depths. "mean-depth": the mean,
            rounded down (the paper). "mean-curve": the depth of their mean similarities (the authors' code).
        boundary: "safe": the layer above the depth, if there is one, must exceed tau too, because with a stored
            boundary the K/V there are those of the prefix alone. "paper": it need not.
    """

    layers: OverLayers = "leading"
    requests: OverRequests = "least-depth"
    boundary: AtBoundary = "safe"

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, OVER_LAYERS)
        check_choice("requests", self.requests, OVER_REQUESTS)
        check_choice("boundary", self.boundary, AT_BOUNDARY)

    def __str__(self) -> str:
        return f"{self.layers}, {self.requests}, {self.boundary}"


def depth_at(limits: Sequence[float], tau: float) -> int:
    """The depth that `limits`, one per depth from 1, give at `tau`."""
    return sum(limit > tau for limit in limits)


def depth_entries(limits: Mapping[int, Sequence[float]], tau: float) -> dict[int, int]:
    """Depth by ratio of a table with these limits by ratio; only ratios deeper than all smaller ones have an entry."""
    entries: dict[int, int] = {}
    deepest = 0
    for ratio in sorted(limits):
        depth = depth_at(limits[ratio], tau)
        if depth > deepest:
            entries[ratio] = deepest = depth
    return entries


def check_tau(tau: float) -> None:
    """Raise `ConfigError` unless `tau` is a cosine similarity that a layer can exceed or miss."""
    if not 0 < tau < 1:
        raise ConfigError(f"tau must lie between 0 and 1, got {tau}")


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The settings of a profile.

    Attributes:
        tau: similarity that a layer must exceed.
        rule: how depths follow from similarities.
        ratios: prefix ratios in percent; None takes those of 5, 10, ... 95 and 97 to 99 that fit.
        samples: requests per ratio; None doubles their number until the table no longer changes.
        max_samples: most requests per ratio.
        tolerance: L1 distance between tables, in layers per ratio, up to which a table counts as unchanged.
        official: follow the authors' profiler: no masks, r = prefix / (prefix + user prompt), one cosine per token.
            Otherwise the paper's definition on the canvas as BiCache sees it: masks included, flattened K and V.
        needed_layers: compute no layer that cannot change the depths at `tau`, those above the least depth so far. The
            table has the same entries, and no depths at a lower tau. Only with a rule of leading layers and least
            depths.
        joint: one cosine over K and V as one flattened vector (equation 3 read literally), where the default is the
            mean of two. Not together with `official`.
        canvas: tokens of the longest canvas; None takes the prompt set's usual length, at most the model's.
        response: masks at the end of a canvas, at most half of what follows the prefix; None: the prompt set's.
        seed: seed of the choice of prompts.
    """

    tau: float = 0.97
    rule: DepthRule = field(default_factory=DepthRule)
    ratios: tuple[int, ...] | None = None
    samples: int | None = None
    max_samples: int = 512
    tolerance: float = 0.1  # rare requests move a least depth by a layer at few ratios
    official: bool = False
    joint: bool = False
    needed_layers: bool = False
    canvas: int | None = None
    response: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_tau(self.tau)
        if self.official and self.joint:
            raise ConfigError("official and joint are two definitions of similarity; choose one of them")
        if self.needed_layers and (self.rule.layers, self.rule.requests) != ("leading", "least-depth"):
            raise ConfigError(
                f"needed_layers needs the rule 'leading, least-depth', got {str(self.rule)!r}, whose depths depend on "
                "the similarities of all layers; leave one of the two out"
            )
        check_real("tolerance", self.tolerance, low=0)
        for name, low in {"samples": 1, "max_samples": 1, "canvas": 2, "response": 1}.items():
            check_whole(name, getattr(self, name), low=low, optional=True)
        if self.ratios is not None and (not self.ratios or any(not 0 <= ratio < 100 for ratio in self.ratios)):
            raise ConfigError(f"ratios must be percents from 0 to 99, got {list(self.ratios)}")

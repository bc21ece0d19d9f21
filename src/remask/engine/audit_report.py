"""What audits have found, as numbers for people and programs."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from remask.policies.earned import MAX_NATS, Estimate

KEPT: Final = 512  # divergences of each policy that are remembered


@dataclass(frozen=True, slots=True)
class Divergence:
    """A mean divergence in nats, where predictions move most, with its 95 % interval (None of a single value)."""

    count: int
    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> "Divergence":
        """An estimate as JSON can hold it."""
        ends = (end if math.isfinite(end) else None for end in (estimate.low, estimate.high))
        return cls(estimate.count, estimate.mean, *ends)


@dataclass(frozen=True, slots=True)
class DepthReport:
    """What audits have shown of one prefix ratio."""

    adapter: str  # that requests are computed with; empty: none
    ratio: int  # least prefix ratio in percent; the next record begins ten higher
    depth: int  # layers that a prefix without audits of its own may read; 0: none is proven
    prefixes: int  # different prefixes that were audited
    # By depth: audits, their mean, and the ends of its 95 % interval; None of a single one
    nats: Mapping[int, Divergence]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What audits have found, and what they cost."""

    audits: int  # that have ended
    failed: int
    skipped: int  # those that found no room
    row_layers: int  # that they computed
    bound: float  # nats that count as unmoved, at most
    caches: Mapping[str, Divergence]  # by cache policy, what it moves at the depths and steps that requests used
    depths: tuple[DepthReport, ...]  # by adapter and prefix ratio


@dataclass(slots=True)
class Findings:
    """What audits of one policy have found."""

    # The last divergences in nats, of the position that moved most; what rounding moves is subtracted
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0  # audits
    warned: bool = False

    @property
    def estimate(self) -> Estimate:
        """The mean of the recent ones, which count at most `MAX_NATS` each, and its interval."""
        return Estimate.of([min(nats, MAX_NATS) for nats in self.recent])

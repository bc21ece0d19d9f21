"""The results of audits, as numbers for people and programs."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from remask.policies.earned import MAX_NATS, Estimate

MAX_DIVERGENCES: Final = 512  # of each policy that are remembered


@dataclass(frozen=True, slots=True)
class Divergence:
    """A mean divergence in nats, where predictions move most, with its 95 % interval (None of a single value)."""

    count: int
    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> "Divergence":
        """`estimate` with None for infinite ends, which JSON cannot hold."""
        low = estimate.low if math.isfinite(estimate.low) else None
        high = estimate.high if math.isfinite(estimate.high) else None
        return cls(estimate.count, estimate.mean, low, high)


@dataclass(frozen=True, slots=True)
class DepthReport:
    """The results of audits at one prefix ratio."""

    adapter: str  # that requests are computed with; empty without one
    ratio: int  # smallest prefix ratio in percent; the next report begins ten higher
    depth: int  # layers that a prefix without audits of its own may read; 0 if no depth is proven
    prefixes: int  # number of different prefixes that were audited
    nats: Mapping[int, Divergence]  # by depth


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The results of all audits, and their cost."""

    audits: int  # that have ended
    failed: int
    skipped: int  # audits that were due, for which the queue or memory had no room
    row_layers: int  # that audits computed
    bound: float  # largest mean divergence in nats that is allowed
    caches: Mapping[str, Divergence]  # by cache policy, at the depths and steps that requests used
    depths: tuple[DepthReport, ...]  # by adapter and prefix ratio


@dataclass(slots=True)
class Findings:
    """The results of the audits of one policy."""

    # The last divergences in nats, each of the position that moved most, less that of rounding
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DIVERGENCES))
    count: int = 0  # audits
    warned: bool = False  # whether the warning about this policy was logged

    @property
    def estimate(self) -> Estimate:
        """The mean of the recent divergences, each clipped to `MAX_NATS`, and its interval."""
        return Estimate.of([min(nats, MAX_NATS) for nats in self.recent])

"""What audits have found, as numbers for people and programs."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from remask.policies.earned import MOST, Estimate

KEPT: Final = 512
"""Divergences of each policy that are remembered."""


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
    """What audits have shown of one prefix ratio.

    Attributes:
        adapter: that requests are computed with; empty: none.
        ratio: least prefix ratio in percent; the next record begins ten higher.
        depth: layers that a prefix without audits of its own may read; 0: none is proven.
        prefixes: different prefixes that were audited.
        nats: by depth: audits, their mean, and the ends of its 95 % interval; None of a single one.
    """

    adapter: str
    ratio: int
    depth: int
    prefixes: int
    nats: Mapping[int, Divergence]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What audits have found, and what they cost.

    Attributes:
        audits, failed, skipped: how many ended, failed, and found no room.
        row_layers: that they computed.
        bound: nats that count as unmoved, at most.
        caches: by cache policy, what it moves at the depths and steps that requests used.
        depths: by adapter and prefix ratio.
    """

    audits: int
    failed: int
    skipped: int
    row_layers: int
    bound: float
    caches: Mapping[str, Divergence]
    depths: tuple[DepthReport, ...]


@dataclass(slots=True)
class Findings:
    """What audits of one policy have found.

    Attributes:
        recent: the last divergences in nats, of the position that moved most; what rounding moves is subtracted.
        count: audits.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    count: int = 0
    warned: bool = False

    @property
    def estimate(self) -> Estimate:
        """The mean of the recent ones, which count at most `MOST` each, and its interval."""
        return Estimate.of([min(nats, MOST) for nats in self.recent])

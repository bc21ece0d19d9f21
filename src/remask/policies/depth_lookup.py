"""How many shallow layers may reuse a shared prefix: a table by prefix ratio, or audits while requests are served."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from remask.checks.values import real, whole
from remask.errors import ConfigError


def percent(prefix: int, canvas: int) -> int:
    """The prefix ratio r in percent, masks counted into the canvas; halves round to even, as the authors' do."""
    return round(prefix / canvas * 100)


@dataclass(frozen=True, slots=True)
class DepthLookup:
    """Depth b over prefix ratio r in percent, increasing in both (BiCache section 5.1).

    Raises `ConfigError` where the entries are not increasing.
    """

    entries: Mapping[int, int]

    def __post_init__(self) -> None:
        ordered = dict(sorted(self.entries.items()))
        if any(not 0 <= r <= 100 for r in ordered):
            raise ConfigError(f"depth table: ratios are percents from 0 to 100, got {list(ordered)}")
        depths = list(ordered.values())
        if any(b < 0 for b in depths) or depths != sorted(depths):
            raise ConfigError(f"depth table: depths must not decrease as the ratio grows, got {ordered}")
        object.__setattr__(self, "entries", MappingProxyType(ordered))

    def depth(self, prefix: int, canvas: int) -> int:
        """Depth of the largest profiled ratio that is not above this request's; 0 (reuse nothing) below the first."""
        ratio = percent(prefix, canvas)
        return max((b for r, b in self.entries.items() if r <= ratio), default=0)


@dataclass(frozen=True, slots=True)
class Audits:
    """How the depth of a shared prefix is measured while requests are served.

    An audit computes a request's canvas at its first step without any cache, and compares the prefix's K and V with
    those of the store: the similarity of BiCache's profile (section 5.1), for this prefix and this request.

    Attributes:
        tau: similarity that a layer must exceed, from -1 (any does) to 1 (none does).
        interval: N; in the long run one in N requests of a prefix and ratio is audited.

    Raises `ConfigError` on values out of range.
    """

    tau: float = 0.97
    interval: int = 32

    def __post_init__(self) -> None:
        real("tau", self.tau, -1, 1)
        whole("audit_interval", self.interval, low=1)

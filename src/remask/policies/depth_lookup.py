"""How many shallow layers may reuse a shared prefix: a table by prefix ratio."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from remask.errors import ConfigError


def percent(prefix: int, canvas: int) -> int:
    """The prefix ratio r in percent, masks counted into the canvas; halves round to even, as the authors' do."""
    return round(prefix / canvas * 100)


@dataclass(frozen=True, slots=True)
class DepthLookup:
    """Depth b over prefix ratio r in percent, increasing in both (BiCache section 5.1).

    Raises `ConfigError` where the entries are not increasing.
    """

    entries: Mapping[int, int]  # depths by prefix ratio in percent

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

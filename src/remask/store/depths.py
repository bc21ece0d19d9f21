"""How deep requests could read one stored prefix, as audits found."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

RATIOS: tuple[int, ...] = (*range(0, 100, 5), 97, 98, 99, 100)
"""Lower ends of the classes of prefix ratios, in percent: those that `remask profile` measures."""

KEPT = 8
"""Audits of one class that are remembered."""


def ratio_class(percent: int) -> int:
    """The class of a prefix ratio in percent."""
    return RATIOS[bisect_right(RATIOS, percent) - 1]


def depth_limits(similarity: Sequence[float]) -> tuple[float, ...]:
    """For each depth from 1 on the tau below which one request bears at least that depth; `similarity` is per layer.

    All layers up to the depth must exceed tau, and the one above it too, because there K/V are the store's as well.
    """
    reached: list[float] = []
    for value in similarity:
        least = reached[-1] if reached else 1.0
        reached.append(min(least, value) if value == value else -1.0)  # a NaN is like nothing
    return (*reached[1:], reached[-1])


@dataclass(frozen=True, slots=True)
class DepthInfo:
    """What is known of one class of prefix ratios, for an operator.

    Attributes:
        ratio: the class, in percent.
        requests: how many asked for a depth in it.
        audits: how many audits are remembered.
        tau, depth: similarity that the last request asked for, and the depth that it was allowed.
        limits: for each depth from 1 on the tau below which the remembered audits allow it.
    """

    ratio: int
    requests: int
    audits: int
    tau: float
    depth: int
    limits: tuple[float, ...]


@dataclass(slots=True)
class _Class:
    """One class of ratios: `audits` hold limits, `requests` counts, `due` is the number of the next audited one."""

    audits: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=KEPT))
    requests: int = 0
    due: int = 1
    running: bool = False
    tau: float = 1.0


@dataclass(slots=True)
class PrefixDepths:
    """Estimates of the depth that one prefix bears, by class of prefix ratios.

    The depth is the least of those that the last audits of the class bore: it falls with the first audit that bears
    less, and rises once that one is forgotten. A class without audits has the depth of the nearest audited one below
    it, as depth increases with the ratio (BiCache section 5.1).

    Of the requests of a class the first is audited, then those numbered 2, 4, 8 and so on, until every N-th is.
    """

    _classes: dict[int, _Class] = field(default_factory=dict)

    def depth(self, ratio: int, tau: float) -> int | None:
        """The depth for requests of `ratio` percent; None where neither this class nor one below it has audits."""
        limits = self._limits(ratio_class(ratio))
        return None if limits is None else sum(limit > tau for limit in limits)

    def due(self, ratio: int) -> bool:
        """Whether the next request of `ratio` percent is to be audited, and no audit of its class runs."""
        each = self._classes.get(ratio_class(ratio))
        return each is None or (each.requests + 1 >= each.due and not each.running)

    def auditing(self, ratio: int) -> bool:
        """Whether an audit of this class runs."""
        each = self._classes.get(ratio_class(ratio))
        return each is not None and each.running

    def count(self, ratio: int, tau: float) -> None:
        """Note that a request of `ratio` percent begins, whose layers must exceed `tau`."""
        each = self._of(ratio)
        each.requests, each.tau = each.requests + 1, tau

    def begin(self, ratio: int, interval: int) -> None:
        """Note that an audit begins, on behalf of a request that is counted, or will be the first of its class."""
        each = self._of(ratio)
        number = max(1, each.requests)
        each.due, each.running = min(2 * number, number + interval), True

    def note(self, ratio: int, similarity: Sequence[float]) -> None:
        """End an audit that found this similarity for each layer."""
        each = self._of(ratio)
        each.audits.append(depth_limits(similarity))
        each.running = False

    def give_up(self, ratio: int) -> None:
        """End an audit that found nothing."""
        self._of(ratio).running = False

    def describe(self) -> tuple[DepthInfo, ...]:
        """All classes that a request asked for, ascending."""
        found = []
        for ratio, each in sorted(self._classes.items()):
            limits = self._limits(ratio)
            if each.requests and limits is not None:
                depth = sum(limit > each.tau for limit in limits)
                found.append(DepthInfo(ratio, each.requests, len(each.audits), each.tau, depth, limits))
        return tuple(found)

    def _of(self, ratio: int) -> _Class:
        return self._classes.setdefault(ratio_class(ratio), _Class())

    def _limits(self, ratio: int) -> tuple[float, ...] | None:
        """The least limits of the last audits of this class, or of the nearest one below it that has any."""
        audited = [low for low, each in self._classes.items() if low <= ratio and each.audits]
        if not audited:
            return None
        return tuple(min(column) for column in zip(*self._classes[max(audited)].audits, strict=True))

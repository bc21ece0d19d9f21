"""Depths that are earned: how many layers may read a shared prefix, as audits of requests have shown.

An audit of a request says, for some depths, how far its first predictions move where they move most
(`sampling.measures`). Here that becomes a depth: the deepest one up to which the mean over requests is shown to stay
below a bound. All of it is numbers of the host.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from remask.errors import TableError
from remask.policies.bicache import DepthLookup, percent

BOUND: Final = 0.1  # nats by which first predictions may move in the mean over requests, where they move most
MOST: Final = 1.0
"""Nats that one audit counts at most. Beyond, a prediction is another one, and how far decides nothing."""
PROOF: Final = 16  # audits at a depth before it may be read
PATIENCE: Final = 32  # audits at a depth after which it is no longer tried where it is neither proven nor refuted
PREFIXES: Final = 8  # different prefixes in the audits before what they show holds for others
REMEMBERED: Final = 64  # audits of a depth that count: the last ones, so that depths follow the traffic
ALARM: Final = 3.0
"""Times the bound: one audit beyond it ends what earlier ones have proven. It is rare where a depth may be read."""
BUCKET: Final = 10  # percent of the prefix ratio that share one record

# Quantiles of Student's t at 97.5 % for 1, 2, ... degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` values with its 95 % interval, in nats. That of a single value has no ends."""

    count: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The estimate of values that count at most `MOST` each, by Student's t over them."""
        count = len(values)
        if count < 2:
            return cls(count, values[0] if values else math.nan, -math.inf, math.inf)
        mean = math.fsum(values) / count
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
        away = (_T[count - 2] if count - 2 < len(_T) else 1.96 + 2.5 / (count - 1)) * spread
        return cls(count, mean, mean - away, mean + away)


@dataclass(frozen=True, slots=True)
class Audited:
    """How far one request's predictions moved at one depth: `nats`, at the position that moved most."""

    prefix: int
    depth: int
    nats: float


def ladder(layers: int) -> tuple[int, ...]:
    """The depths that are tried: 1, 2, 3, 4, 6, 8, 12 and so forth, by a half or a third deeper, and all `layers`."""
    return tuple(sorted({d for power in range(layers) for d in (2**power, 3 * 2**power) if d < layers} | {layers}))


class Record:
    """The audits of one prefix ratio, and what follows from them.

    Attributes:
        layers: of the model.
        bound: nats up to which predictions count as unmoved.
        alarm: nats of one audit that end what earlier ones have proven.
    """

    def __init__(self, layers: int, bound: float) -> None:
        self.layers, self.bound, self.alarm = layers, bound, ALARM * bound
        self.unaudited = 0  # requests that have read the store since the last audit
        self.common = 0  # layers that a prefix without audits of its own may read; any thread may ask
        self._by_depth: dict[int, deque[Audited]] = {}
        self._prefixes: set[int] = set()  # of the audits that count
        self._estimates: dict[int | None, dict[int, Estimate]] = {}  # since the last audit

    @property
    def audits(self) -> list[Audited]:
        """All audits that count, by depth."""
        return [audit for depth in sorted(self._by_depth) for audit in self._by_depth[depth]]

    def add(self, audits: Sequence[Audited]) -> bool:
        """Take in the audits of one request. Returns whether one of them ended what had been proven."""
        alarm = next((a for a in audits if a.nats > self.alarm and a.depth <= self.depth(a.prefix, 0)), None)
        if alarm is not None:
            self._forget(alarm)
        for audit in audits:
            self._by_depth.setdefault(audit.depth, deque(maxlen=REMEMBERED)).append(audit)
        self.unaudited = 0
        self._prefixes = {audit.prefix for audit in self.audits}
        self._estimates.clear()
        self.common = self.proven(None)
        return alarm is not None

    def estimates(self, prefix: int | None = None) -> dict[int, Estimate]:
        """By depth, ascending: over the requests of a prefix, or over prefixes (None), each of which counts once."""
        if prefix not in self._estimates:
            if prefix is not None and prefix not in self._prefixes:
                return {}  # and nothing is kept of it: there is no end of prefixes without audits
            values = ((depth, self._values(depth, prefix)) for depth in sorted(self._by_depth))
            self._estimates[prefix] = {depth: Estimate.of(nats) for depth, nats in values if nats}
        return self._estimates[prefix]

    def depth(self, prefix: int, start: int) -> int:
        """Layers that a request with this prefix may read; at most `start` where audits have not proven anything."""
        proven = self.proven(prefix)
        depth = proven or self.proven(None) or start
        return min(depth, self._refuted(prefix) - 1, self.layers if proven else self._refuted(None) - 1)

    def proven(self, prefix: int | None) -> int:
        """The deepest depth that audits of a prefix, or of several (None), have proven; 0 without one."""
        deepest = 0
        for depth, estimate in self.estimates(prefix).items():
            if estimate.mean > self.bound:
                break
            several = prefix is not None or estimate.count >= PREFIXES
            if several and estimate.high < self.bound and self._requests(depth, prefix) >= PROOF:
                deepest = depth
        return deepest

    def wanted(self, prefix: int) -> tuple[int, ...]:
        """The depths at which an audit of a request with this prefix would decide something; empty: at none."""
        rungs, estimates = ladder(self.layers), self.estimates()
        if not estimates:
            return tuple(sorted({rungs[len(rungs) // 3], rungs[2 * len(rungs) // 3], rungs[-1]}))
        proven = max(self.proven(prefix), self.proven(None))
        bad = min(self._refuted(None), self._refuted(prefix))
        good = max((depth for depth in estimates if depth < bad), default=0)
        wanted = {good} if good > proven and not self._tried(good, prefix) else set()
        between = [rung for rung in rungs if max(good, proven) < rung < bad]
        if between:
            wanted.add(between[len(between) // 2])
        elif proven < bad <= self.layers and not (self._hopeless(bad) or self._tried(bad, prefix)):
            wanted.add(bad)
        return tuple(sorted(wanted))

    @property
    def prefixes(self) -> int:
        """Different prefixes among the audits that count."""
        return len(self._prefixes)

    def next_depth(self, depth: int) -> int:
        """The rung above `depth`; all layers above the last one."""
        return next((rung for rung in ladder(self.layers) if rung > depth), self.layers)

    def _values(self, depth: int, prefix: int | None) -> list[float]:
        audits = self._by_depth[depth]
        if prefix is not None:
            return [min(audit.nats, MOST) for audit in audits if audit.prefix == prefix]
        by_prefix = sorted(audits, key=attrgetter("prefix"))
        groups = [[min(audit.nats, MOST) for audit in group] for _, group in groupby(by_prefix, attrgetter("prefix"))]
        return [math.fsum(group) / len(group) for group in groups]

    def _requests(self, depth: int, prefix: int | None) -> int:
        return sum(prefix in (None, audit.prefix) for audit in self._by_depth.get(depth, ()))

    def _refuted(self, prefix: int | None) -> int:
        """The least depth whose audits are beyond the bound in their mean, be it of one; else one beyond all layers.

        It costs work alone to read less than may be.
        """
        means = ((depth, estimate.mean) for depth, estimate in self.estimates(prefix).items())
        return next((depth for depth, mean in means if mean > self.bound), self.layers + 1)

    def _tried(self, depth: int, prefix: int) -> bool:
        """Whether further audits at a depth are given up: there were many, and they prove nothing."""
        several = self.estimates()[depth].count >= PREFIXES
        return self._requests(depth, None if several else prefix) >= PATIENCE

    def _hopeless(self, depth: int) -> bool:
        estimate = self.estimates()[depth]
        return estimate.low > self.bound or (estimate.mean > self.alarm and self._requests(depth, None) >= 4)

    def _forget(self, alarm: Audited) -> None:
        """Drop the audits that an alarm contradicts; other prefixes that have proven as much themselves keep theirs."""
        keep = {
            audit.prefix
            for audit in self.audits
            if audit.prefix != alarm.prefix and self.proven(audit.prefix) >= alarm.depth
        }
        for depth, audits in self._by_depth.items():
            if depth >= alarm.depth:
                left = [audit for audit in audits if audit.prefix in keep]
                audits.clear()
                audits.extend(left)
        self._estimates.clear()


@dataclass(slots=True)
class EarnedDepths:
    """The depths of one model, by prefix ratio, as its audits have shown them."""

    layers: int  # of the model
    bound: float = BOUND  # nats up to which predictions count as unmoved
    records: dict[tuple[str, int], Record] = field(default_factory=dict)  # by adapter and prefix ratio
    changed: Callable[[], None] | None = None  # is called where the depth of a record has changed; None: nobody

    def record(self, adapter: str, prefix: int, canvas: int) -> Record:
        """The record of a prefix of so many tokens on a canvas of so many."""
        key = adapter, percent(prefix, canvas) // BUCKET * BUCKET
        if key not in self.records:
            self.records[key] = Record(self.layers, self.bound)
        return self.records[key]

    def add(self, record: Record, audits: Sequence[Audited]) -> bool:
        """See `Record.add`."""
        prefix = audits[0].prefix
        before = record.proven(None), record.proven(prefix)
        alarm = record.add(audits)
        after = record.proven(None), record.proven(prefix)
        if self.changed is not None and before != after:
            self.changed()
        return alarm

    @property
    def lookup(self) -> DepthLookup:
        """What holds without audits of a prefix, or an adapter. Depths that a higher ratio contradicts are left out."""
        depths = {ratio: record.common for (adapter, ratio), record in self.records.items() if not adapter}
        return DepthLookup({ratio: min(d for r, d in depths.items() if r >= ratio) for ratio in sorted(depths)})

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return {
            "layers": self.layers,
            "bound": self.bound,
            "records": [
                {
                    "adapter": adapter,
                    "ratio": ratio,
                    "audits": [[f"{a.prefix:x}", a.depth, round(a.nats, 6)] for a in record.audits],
                }
                for (adapter, ratio), record in sorted(self.records.items())
            ],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], layers: int, bound: float = BOUND) -> "EarnedDepths":
        """What `to_json` wrote of a model of so many layers. Raises `TableError` where it did not."""
        depths = cls(layers, bound)
        try:
            if raw["layers"] != layers:
                raise ValueError(f"it is of a model of {raw['layers']} layers, and this one has {layers}")
            for item in raw["records"]:
                record = depths.records.setdefault((str(item["adapter"]), int(item["ratio"])), Record(layers, bound))
                for prefix, depth, nats in item["audits"]:
                    if not 1 <= depth <= layers or not nats >= 0:
                        raise ValueError(f"an audit at depth {depth} of {layers} by {nats} nats")
                    record.add([Audited(int(prefix, 16), int(depth), float(nats))])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError(f"no earned depths: {error}") from error
        return depths

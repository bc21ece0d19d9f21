"""Depths that are earned: how many layers may read a shared prefix, as proven by audits of requests.

An audit of a request measures, for some depths, how far its first predictions move at the position that moves most
(`sampling.measures`). From the audits follows a depth: the deepest one up to which the mean over requests is proven to
stay below a bound. All of it runs on the host.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from remask.errors import TableError
from remask.policies.bicache import DepthLookup, percent

BOUND: Final = 0.1  # nats by which first predictions may move in the mean over requests, where they move most
MAX_NATS: Final = 1.0
"""Larger values of one audit count as this many nats: the prediction is a different one, however far it moved."""
PROOF: Final = 16  # audits at a depth before it may be read
BORROWING: Final = 6
"""Audits at a depth of a ratio's own after which those of the ratios next to it count too, if its own agree.

Of draws of six from requests whose predictions move by 0.4 nats in the mean 4 % agree (`smollm2` at depth 8).
"""
PATIENCE: Final = 32  # audits at a depth after which it is given up, if it is neither proven nor refuted
PREFIXES: Final = 8  # different prefixes among the audits before they prove anything for other prefixes
WINDOW: Final = 64  # audits of a depth that count: the latest ones, so that depths follow the traffic
HOPELESS: Final = 4  # audits at a depth after which it is given up, if their mean is beyond the alarm
ALARM: Final = 3.0
"""Multiple of the bound: one audit beyond it revokes what earlier ones proved. It is rare if a depth may be read."""
BUCKET: Final = 10  # percent of the prefix ratio that share one record

# Quantiles of Student's t at 97.5 % for 1, 2, ... degrees of freedom.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` values with its 95 % interval, in nats. The interval of a single value is infinite."""

    count: int
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the mean of values of at most `MAX_NATS` each, by Student's t distribution."""
        count = len(values)
        if count < 2:
            return cls(count, values[0] if values else math.nan, -math.inf, math.inf)
        mean = math.fsum(values) / count
        standard_error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
        # Beyond the table: the normal quantile, and the first term of t's expansion in 1 / (count - 1), rounded up.
        quantile = _T_QUANTILES[count - 2] if count - 2 < len(_T_QUANTILES) else 1.96 + 2.5 / (count - 1)
        margin = quantile * standard_error
        return cls(count, mean, mean - margin, mean + margin)


@dataclass(frozen=True, slots=True)
class Audit:
    """How far one request's predictions moved at one depth, in nats, at the position that moved most."""

    prefix_key: int  # `PrefixStore.key` of the prefix
    depth: int
    nats: float


def ladder(layers: int) -> tuple[int, ...]:
    """Return the depths that audits try, ascending: `layers`, and powers of 2 and 3 times powers of 2 below it."""
    depths = {layers}
    power = 1
    while power < layers:
        depths.add(power)
        if 3 * power < layers:
            depths.add(3 * power)
        power *= 2
    return tuple(sorted(depths))


class Record:
    """The audits of one prefix ratio, and the depths that they prove.

    Attributes:
        layers: layers of the model.
        bound: nats up to which predictions count as unmoved.
        alarm: nats of one audit that revoke what earlier ones proved.
        unaudited: requests that have read the store since the last audit.
        common: layers that a prefix without audits of its own may read; any thread may read it.
        neighbours: records of the ratios next to this one.
    """

    def __init__(self, layers: int, bound: float) -> None:
        self.layers = layers
        self.bound = bound
        self.alarm = ALARM * bound
        self.unaudited = 0
        self.common = 0
        self.neighbours: list[Record] = []
        self._by_depth: dict[int, deque[Audit]] = {}
        self._prefixes: set[int] = set()  # of the audits that count
        self._estimates: dict[int | None, dict[int, Estimate]] = {}  # by prefix and depth; cleared by every audit

    @property
    def audits(self) -> list[Audit]:
        """All audits that count, by depth."""
        return [audit for depth in sorted(self._by_depth) for audit in self._by_depth[depth]]

    def add(self, audits: Sequence[Audit]) -> bool:
        """Add the audits of one request. Returns whether one of them revoked a depth that had been proven."""
        large_audits = [audit for audit in audits if audit.nats > self.alarm]
        alarms = [audit for audit in large_audits if audit.depth <= self.depth(audit.prefix_key, 0)]
        if alarms:
            self._drop_contradicted(alarms[0])
        self.restore(audits)
        self.unaudited = 0
        for record in (self, *self.neighbours):
            record.common = record.proven_depth(None)
        return bool(alarms)

    def restore(self, audits: Sequence[Audit]) -> None:
        """Add audits that revoke nothing, as all that they contradict is gone. The caller sets `common` anew."""
        for audit in audits:
            self._by_depth.setdefault(audit.depth, deque(maxlen=WINDOW)).append(audit)
        self._prefixes = {audit.prefix_key for audit in self.audits}
        self._estimates.clear()

    def estimates(self, prefix_key: int | None = None) -> dict[int, Estimate]:
        """Estimates by depth, ascending, over the requests of a prefix, or over the means of all prefixes (None)."""
        if prefix_key not in self._estimates:
            if prefix_key is not None and prefix_key not in self._prefixes:
                return {}  # not cached, as there is no limit to prefixes without audits
            values = {depth: self._values(depth, prefix_key) for depth in sorted(self._by_depth)}
            self._estimates[prefix_key] = {depth: Estimate.of(nats) for depth, nats in values.items() if nats}
        return self._estimates[prefix_key]

    def depth(self, prefix_key: int, start: int) -> int:
        """Return how many layers a request with this prefix may read; at most `start` if audits have proven nothing.

        What audits of all prefixes refute does not count against a prefix that has a proven depth of its own.
        """
        proven = self.proven_depth(prefix_key)
        if proven:
            return min(proven, self._refuted_depth(prefix_key) - 1)
        refuted = min(self._refuted_depth(prefix_key), self._refuted_depth(None))
        return min(self.common or start, refuted - 1)

    def proven_depth(self, prefix_key: int | None) -> int:
        """Return the deepest depth that audits of one prefix, or of all prefixes (None), have proven; 0 without one."""
        deepest = 0
        for depth, estimate in self.estimates(prefix_key).items():
            if estimate.mean > self.bound:
                break
            audit_count = self._audit_count(depth, prefix_key)
            if prefix_key is None and BORROWING <= audit_count < PROOF:
                records = (self, *self.neighbours)
                audits = [audit for record in records for audit in record._by_depth.get(depth, ())]
                estimate, audit_count = Estimate.of(_means_by_prefix(audits)), len(audits)
            is_general = prefix_key is not None or estimate.count >= PREFIXES
            if is_general and estimate.high < self.bound and audit_count >= PROOF:
                deepest = depth
        return deepest

    def audit_depths(self, prefix_key: int) -> tuple[int, ...]:
        """Return the depths, ascending, at which an audit of a request with this prefix would be informative.

        They are the deepest one that looks good but is not proven, and one in the middle between that and the smallest
        refuted depth. If there is none between them, the refuted depth itself is tried again.
        """
        rungs = ladder(self.layers)
        estimates = self.estimates()
        if not estimates:
            neighbour_depths = {record.common for record in self.neighbours if record.common}
            # A third, two thirds and all of the ladder: later audits search between two of these alone.
            return tuple(sorted(neighbour_depths or {rungs[len(rungs) // 3], rungs[2 * len(rungs) // 3], rungs[-1]}))
        proven = max(self.proven_depth(prefix_key), self.common)
        refuted = min(self._refuted_depth(None), self._refuted_depth(prefix_key))
        deepest_good = max((depth for depth in estimates if depth < refuted), default=0)
        # What a neighbour has refuted is not tried anew, until this ratio has proven as much.
        limits = [record._refuted_depth(None) for record in self.neighbours if record.common > proven]
        depths: set[int] = set()
        if deepest_good > proven and not self._is_exhausted(deepest_good, prefix_key):
            depths.add(deepest_good)
        between = [rung for rung in rungs if max(deepest_good, proven) < rung < min([refuted, *limits])]
        if between:
            depths.add(between[len(between) // 2])
        elif proven < refuted <= self.layers and not (
            self._is_hopeless(refuted) or self._is_exhausted(refuted, prefix_key)
        ):
            depths.add(refuted)
        return tuple(sorted(depths))

    @property
    def prefix_count(self) -> int:
        """Number of different prefixes among the audits that count."""
        return len(self._prefixes)

    def next_depth(self, depth: int) -> int:
        """Return the next larger depth of the ladder, at most all layers."""
        return next((rung for rung in ladder(self.layers) if rung > depth), self.layers)

    def _values(self, depth: int, prefix_key: int | None) -> list[float]:
        """Return the nats at a depth, at most `MAX_NATS` each: of a prefix's audits, or (None) every prefix's mean."""
        audits = self._by_depth[depth]
        if prefix_key is not None:
            return [min(audit.nats, MAX_NATS) for audit in audits if audit.prefix_key == prefix_key]
        return _means_by_prefix(audits)

    def _audit_count(self, depth: int, prefix_key: int | None) -> int:
        return sum(prefix_key in (None, audit.prefix_key) for audit in self._by_depth.get(depth, ()))

    def _refuted_depth(self, prefix_key: int | None) -> int:
        """Return the smallest depth whose audits exceed the bound in their mean; `layers` + 1 without one.

        One audit suffices, as reading too little only costs work.
        """
        estimates = self.estimates(prefix_key).items()
        return next((depth for depth, estimate in estimates if estimate.mean > self.bound), self.layers + 1)

    def _is_exhausted(self, depth: int, prefix_key: int) -> bool:
        """Whether `PATIENCE` audits at a depth have neither proven nor refuted it, so that no more are made."""
        is_general = self.estimates()[depth].count >= PREFIXES
        return self._audit_count(depth, None if is_general else prefix_key) >= PATIENCE

    def _is_hopeless(self, depth: int) -> bool:
        """Whether audits at a depth have shown that predictions move too far, so that no more are made."""
        estimate = self.estimates()[depth]
        return estimate.low > self.bound or (estimate.mean > self.alarm and self._audit_count(depth, None) >= HOPELESS)

    def _drop_contradicted(self, alarm: Audit) -> None:
        """Drop audits at the depth of `alarm` and deeper, except of prefixes whose own audits prove its depth."""
        proven_prefixes = {
            audit.prefix_key
            for audit in self.audits
            if audit.prefix_key != alarm.prefix_key and self.proven_depth(audit.prefix_key) >= alarm.depth
        }
        for depth, audits in self._by_depth.items():
            if depth >= alarm.depth:
                remaining = [audit for audit in audits if audit.prefix_key in proven_prefixes]
                audits.clear()
                audits.extend(remaining)
        self._estimates.clear()


def _means_by_prefix(audits: Iterable[Audit]) -> list[float]:
    """Return the mean nats of each prefix, at most `MAX_NATS` an audit."""
    by_prefix = sorted(audits, key=attrgetter("prefix_key"))
    groups = [
        [min(audit.nats, MAX_NATS) for audit in group] for _, group in groupby(by_prefix, attrgetter("prefix_key"))
    ]
    return [math.fsum(group) / len(group) for group in groups]


@dataclass(slots=True)
class EarnedDepths:
    """The depths of one model by prefix ratio, as proven by its audits."""

    layers: int  # layers of the model
    bound: float = BOUND  # nats up to which predictions count as unmoved
    records: dict[tuple[str, int], Record] = field(default_factory=dict)  # by adapter and prefix ratio
    changed: Callable[[], None] | None = None  # called when the depth of a record has changed

    def record(self, adapter: str, prefix_length: int, canvas_length: int) -> Record:
        """Return the record of prefixes of this ratio, and make it if there is none. Lengths are in tokens."""
        return self._record(adapter, percent(prefix_length, canvas_length) // BUCKET * BUCKET)

    def _record(self, adapter: str, ratio: int) -> Record:
        """Return the record of a ratio, which is a multiple of `BUCKET`; make it if there is none."""
        record = self.records.get((adapter, ratio))
        if record is None:
            record = self.records[adapter, ratio] = Record(self.layers, self.bound)
            for next_ratio in (ratio - BUCKET, ratio + BUCKET):
                neighbour = self.records.get((adapter, next_ratio))
                if neighbour is not None:
                    record.neighbours.append(neighbour)
                    neighbour.neighbours.append(record)
        return record

    def add(self, record: Record, audits: Sequence[Audit]) -> bool:
        """Add `audits`, at least one and all of one prefix, to a record. Calls `changed` if a proven depth changes.

        Returns whether one of the audits revoked a depth, as `Record.add` does.
        """
        prefix_key = audits[0].prefix_key

        def proven_depths() -> list[int]:
            return [record.proven_depth(prefix_key), *(other.common for other in (record, *record.neighbours))]

        old_depths = proven_depths()
        revoked = record.add(audits)
        if self.changed is not None and old_depths != proven_depths():
            self.changed()
        return revoked

    @property
    def lookup(self) -> DepthLookup:
        """Depths by prefix ratio, for a prefix without audits and requests without an adapter.

        Each is at most the depth of any higher ratio, so that they increase.
        """
        depths = {ratio: record.common for (adapter, ratio), record in self.records.items() if not adapter}
        entries: dict[int, int] = {}
        depth = self.layers
        for ratio in sorted(depths, reverse=True):
            depth = min(depth, depths[ratio])
            entries[ratio] = depth
        return DepthLookup(entries)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `from_json` makes an equal object."""
        return {
            "layers": self.layers,
            "bound": self.bound,
            "records": [
                {
                    "adapter": adapter,
                    "ratio": ratio,
                    "audits": [[f"{audit.prefix_key:x}", audit.depth, round(audit.nats, 6)] for audit in record.audits],
                }
                for (adapter, ratio), record in sorted(self.records.items())
            ],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], layers: int, bound: float = BOUND) -> "EarnedDepths":
        """Read the result of `to_json` for a model of `layers` layers. Raises `TableError` if it is none."""
        depths = cls(layers, bound)
        try:
            if raw["layers"] != layers:
                raise ValueError(f"it is of a model of {raw['layers']} layers, and this one has {layers}")
            for fields in raw["records"]:
                ratio = fields["ratio"]
                if ratio not in range(0, 101, BUCKET):
                    raise ValueError(f"a prefix ratio of {ratio} %, which is no multiple of {BUCKET} up to 100")
                audits = []
                for prefix_key, depth, nats in fields["audits"]:
                    if depth not in range(1, layers + 1) or not nats >= 0:
                        raise ValueError(f"an audit at depth {depth} of {layers} by {nats} nats")
                    audits.append(Audit(int(prefix_key, 16), int(depth), float(nats)))
                depths._record(str(fields["adapter"]), int(ratio)).restore(audits)
            for record in depths.records.values():  # once all are read, as neighbours borrow from each other
                record.common = record.proven_depth(None)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError(f"no earned depths: {error}") from error
        return depths

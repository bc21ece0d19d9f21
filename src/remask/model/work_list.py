"""The attention of a stage as a list of units of work: rows that attend to slots, described by integers alone.

A canvas of its own, a prefix that several canvases read together, scattered pages and K/V cut into pieces are all
nothing but units. Rows of several units have several partial results, which are merged by their log-sum-exp. Whatever
computes attention (`remask.model.attention`) runs the same list.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]
T = TypeVar("T")

FIRST_ROW, ROWS, FIRST_SLOT, SLOTS, FIRST_OUTPUT = range(5)  # the columns of a unit


@dataclass(frozen=True, eq=False)
class WorkList:
    """U units over N rows, with P partial results.

    Every row stands in one unit at least, and sees a slot at least; so is every slot of a unit seen by one of its rows,
    as others may be unwritten. The units' partial results are numbered 0 .. P - 1,
    each once: the i-th row of a unit has the one numbered `first output + i`.
    """

    # int32 [U, 5]: first row, rows, first slot, slots, first output. `first slot` counts entries of `slots`.
    units: Ints
    slots: Ints  # int32 [S]: slots of the pool, each unit's in a row. Units may read the same entries.
    # int32 [P]: how many of its unit's slots, the first ones, the row of a partial result sees; None: all
    reach: Ints | None = None
    skip: Ints | None = None  # int32 [P]: how many of these, the first ones, it does not see; None: none
    _derived: dict[object, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[type["WorkList"], tuple[Ints, Ints, Ints | None, Ints | None]]:
        """Pickles the list without what was derived from it, which may be on a device."""
        return WorkList, (self.units, self.slots, self.reach, self.skip)

    @classmethod
    def of(cls, rows: int, slots: int, reach: Ints | None = None, skip: Ints | None = None) -> "WorkList":
        """One unit: `rows` rows that see the first `slots` slots of the pool, each its part of them or all."""
        return cls(np.array([[0, rows, 0, slots, 0]], dtype=np.int32), np.arange(slots, dtype=np.int32), reach, skip)

    @property
    def owners(self) -> Ints:
        """The row of each partial result, int32 [P]."""
        return self.once(_owners)

    @property
    def outputs(self) -> int:
        """The number of partial results, P."""
        return int(self.units[:, ROWS].sum())

    @property
    def limited(self) -> bool:
        """Whether rows may see a part of their units' slots."""
        return self.reach is not None or self.skip is not None

    @property
    def pairs(self) -> int:
        """Pairs of a row and a slot that the units span, those beyond a row's reach included."""
        return int((self.units[:, ROWS].astype(np.int64) * self.units[:, SLOTS]).sum())

    def once(self, make: Callable[..., T], *settings: Hashable) -> T:
        """The result of `make` for this list and `settings`, computed once: all layers of a stage share the list."""
        key = (make, *settings)
        if key not in self._derived:
            self._derived[key] = make(self, *settings)
        return cast(T, self._derived[key])

    def cut(self, rows: int, slots: int) -> "WorkList":
        """The same attention in units of at most `rows` rows and `slots` slots. Pieces that no row sees are dropped."""
        units = self.units.astype(np.int64)
        tall, wide = -(-units[:, ROWS] // rows), -(-units[:, SLOTS] // slots)
        pieces = tall * wide
        unit = np.repeat(np.arange(len(units)), pieces)
        number = np.arange(len(unit)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        row, slot = rows * (number // wide[unit]), slots * (number % wide[unit])
        left_rows, left_slots = units[unit, ROWS] - row, units[unit, SLOTS] - slot
        return self._pieces(unit, row, np.minimum(rows, left_rows), slot, np.minimum(slots, left_slots))

    def ungrouped(self, most: int, shortest: int) -> "WorkList":
        """The same attention with rows of several units as rows of one that has all their slots, where that is small.

        It then has at most `most` slots, in runs of fewer than `shortest` on average. A unit stays as it is unless all
        its rows can leave it, and so do units of rows with limits.
        """
        if self.limited or self.outputs == len(np.unique(self.owners)):
            return self
        units = self.units.astype(np.int64)
        first, last = units[:, FIRST_ROW], units[:, FIRST_ROW] + units[:, ROWS]
        edges = np.unique(np.concatenate([first, last]))
        inside = (first[:, None] <= edges[:-1]) & (edges[1:] <= last[:, None])  # [units, ranges of rows]
        slots = [self.slots[slot : slot + count] for slot, count in units[:, [FIRST_SLOT, SLOTS]].tolist()]
        whole: dict[int, Ints] = {}
        for place in np.flatnonzero((inside.sum(0) > 1) & (units[:, SLOTS] @ inside <= most)).tolist():
            together = np.concatenate([slots[unit] for unit in np.flatnonzero(inside[:, place])])
            runs = len(run_edges(together)) - 1
            if runs == 1 or len(together) < shortest * runs:
                whole[place] = together
        leaving = np.isin(np.arange(inside.shape[1]), list(whole))
        while (torn := (inside & leaving).any(1) & (inside & ~leaving).any(1)).any():
            leaving &= ~inside[torn].any(0)
        if not leaving.any():
            return self
        builder = WorkListBuilder()
        for unit in np.flatnonzero(~(inside & leaving).any(1)).tolist():
            builder.add(int(first[unit]), int(units[unit, ROWS]), builder.slots(slots[unit]), len(slots[unit]), None)
        for place in np.flatnonzero(leaving).tolist():
            row, rows, together = int(edges[place]), int(edges[place + 1] - edges[place]), whole[place]
            builder.add(row, rows, builder.slots(together), len(together), None)
        return builder.list()

    def cut_at_runs(self, shortest: int) -> "WorkList":
        """The same attention in units whose slots are consecutive, where these would have `shortest` slots on average.

        Units whose slots are more scattered stay as they are.
        """
        pieces: list[tuple[int, int, int]] = []  # unit, first of its slots, how many
        for number, unit in enumerate(self.units):
            edges = run_edges(self.slots[unit[FIRST_SLOT] : unit[FIRST_SLOT] + unit[SLOTS]])
            if unit[SLOTS] < shortest * (len(edges) - 1):
                edges = [0, int(unit[SLOTS])]
            pieces += [(number, start, stop - start) for start, stop in pairwise(edges)]
        if len(pieces) == len(self.units):
            return self
        unit, slot, count = np.array(pieces).T
        return self._pieces(unit, np.zeros_like(unit), self.units[unit, ROWS], slot, count)

    def _pieces(self, unit: Longs, row: Longs, rows: Longs | Ints, slot: Longs, slots: Longs) -> "WorkList":
        """The units numbered `unit` in pieces: `rows` rows from `row` on, that see `slots` slots from `slot` on.

        Pieces that no row sees are dropped.
        """
        whole = self.units[unit]
        cut = np.stack([whole[:, FIRST_ROW] + row, rows, whole[:, FIRST_SLOT] + slot, slots], axis=1)
        if not self.limited:
            return WorkList(_numbered(cut), self.slots)
        output = _ranges(whole[:, FIRST_OUTPUT] + row, cut[:, ROWS])
        piece = np.repeat(np.arange(len(cut)), cut[:, ROWS])
        counts = cut[piece, SLOTS]
        reach = counts if self.reach is None else np.clip(self.reach[output] - slot[piece], 0, counts)
        skip = np.zeros_like(reach) if self.skip is None else np.clip(self.skip[output] - slot[piece], 0, reach)
        seen = np.zeros(len(cut), dtype=np.bool_)
        np.logical_or.at(seen, piece, reach > skip)
        reach, skip = (limits[seen[piece]].astype(np.int32) for limits in (reach, skip))
        return WorkList(_numbered(cut[seen]), self.slots, reach, None if self.skip is None else skip)


class WorkListBuilder:
    """Collects units, and numbers their partial results."""

    def __init__(self) -> None:
        self._units: list[tuple[int, int, int, int]] = []
        self._slots: list[Longs | Ints] = []
        self._limits: tuple[list[Longs | None], list[Longs | None]] = [], []  # reach and skip
        self._length = 0

    def slots(self, slots: Longs | Ints) -> int:
        """Enter `slots` into the list of slots. Returns the number of the first entry, for `add`."""
        first = self._length
        self._slots.append(slots)
        self._length += len(slots)
        return first

    def add(
        self,
        first_row: int,
        rows: int,
        first_slot: int,
        slots: int,
        reach: Longs | None = None,
        skip: Longs | None = None,
    ) -> None:
        """Rows from `first_row` on see `slots` entries of the list from `first_slot` on.

        `reach` [rows] says how many of them each row sees, None: all; and `skip` [rows] how many of these it does not.
        """
        self._units.append((first_row, rows, first_slot, slots))
        for limits, limit in zip(self._limits, (reach, skip), strict=True):
            limits.append(limit)

    def list(self) -> WorkList:
        """The list of all units, in the order in which they were added."""
        units = _numbered(np.array(self._units, dtype=np.int32).reshape(-1, 4))
        slots = np.concatenate(self._slots, dtype=np.int32) if self._slots else np.empty(0, dtype=np.int32)
        reach, skip = (_limits(units, limits, usual) for limits, usual in zip(self._limits, (SLOTS, None), strict=True))
        return WorkList(units, slots, reach, skip)


def _limits(units: Ints, limits: Sequence[Longs | None], usual: int | None) -> Ints | None:
    """The limits of all units: where a unit has none they are its number in the column `usual`, or 0."""
    if all(limit is None for limit in limits):
        return None
    pairs = zip(units, limits, strict=True)
    parts = [np.full(u[ROWS], 0 if usual is None else u[usual]) if limit is None else limit for u, limit in pairs]
    return np.concatenate(parts, dtype=np.int32)


def run_edges(slots: Ints) -> Sequence[int]:
    """Where runs of consecutive `slots` begin, and their number at the end."""
    return [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]


def _numbered(units: NDArray[np.integer[Any]]) -> Ints:
    """`units` [U, 4] with the numbers of their first partial results."""
    first = np.cumsum(units[:, ROWS]) - units[:, ROWS]
    return np.concatenate([units, first[:, None]], axis=1, dtype=np.int32)


def _ranges(first: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]]) -> Longs:
    """first[0], first[0] + 1, ... `counts[0]` numbers, then those from first[1] on, and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    ranges: Longs = np.arange(counts.sum(), dtype=np.int64) + np.repeat(first - (ends - counts), counts)
    return ranges


def _owners(work: WorkList) -> Ints:
    return _ranges(work.units[:, FIRST_ROW], work.units[:, ROWS]).astype(np.int32)

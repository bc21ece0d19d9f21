"""The attention of a stage as a list of units of work: rows that attend to slots, described by integers alone.

A canvas of its own, a prefix that several canvases read together, scattered pages and K/V cut into parts are all
units. Rows in several units have several partial results, which are merged by their log-sum-exps. All implementations
of attention (`remask.model.attention`) run the same lists.
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

    Every row is in at least one unit and sees at least one slot. Every slot of a unit is seen by some row of the list,
    as other slots may be unwritten; a part made by `cut` may have slots that only rows of other parts see. Partial
    results are numbered 0 .. P - 1: the i-th row of a unit has the number `first output + i`.
    """

    # int32 [U, 5]: first row, rows, first slot, slots, first output. `first slot` is an index into `slots`.
    units: Ints
    slots: Ints  # int32 [S]: slots of the pool, those of a unit consecutively. Units may share entries.
    # int32 [P]: how many of its unit's slots, from the first on, the row of a partial result sees; None: all
    reach: Ints | None = None
    skip: Ints | None = None  # int32 [P]: how many of these, from the first on, the row does not see; None: 0
    _derived: dict[object, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[type["WorkList"], tuple[Ints, Ints, Ints | None, Ints | None]]:
        """Pickle the list without what was derived from it, which may be on a device."""
        return WorkList, (self.units, self.slots, self.reach, self.skip)

    @classmethod
    def of(cls, rows: int, slots: int, reach: Ints | None = None, skip: Ints | None = None) -> "WorkList":
        """One unit: `rows` rows that see the first `slots` slots of the pool, within `reach` and `skip` [rows]."""
        return cls(np.array([[0, rows, 0, slots, 0]], dtype=np.int32), np.arange(slots, dtype=np.int32), reach, skip)

    @property
    def owners(self) -> Ints:
        """The row of each partial result, int32 [P]."""
        return self.derive(_owners)

    @property
    def output_count(self) -> int:
        """The number of partial results, P."""
        return int(self.units[:, ROWS].sum())

    @property
    def limited(self) -> bool:
        """Whether some rows may see only a part of their units' slots."""
        return self.reach is not None or self.skip is not None

    @property
    def pair_count(self) -> int:
        """Number of pairs of a row and a slot of its unit, including slots that the row does not see."""
        return int((self.units[:, ROWS].astype(np.int64) * self.units[:, SLOTS]).sum())

    def derive(self, make: Callable[..., T], *settings: Hashable) -> T:
        """`make(self, *settings)`, computed once and stored, as all layers of a stage share the list."""
        key = (make, *settings)
        if key not in self._derived:
            self._derived[key] = make(self, *settings)
        return cast(T, self._derived[key])

    def cut(self, max_rows: int, max_slots: int) -> "WorkList":
        """The same attention in units of at most this many rows and slots. Drops parts that no row sees."""
        units = self.units.astype(np.int64)
        row_parts, slot_parts = -(-units[:, ROWS] // max_rows), -(-units[:, SLOTS] // max_slots)
        parts = row_parts * slot_parts
        unit = np.repeat(np.arange(len(units)), parts)
        part = np.arange(len(unit)) - np.repeat(np.cumsum(parts) - parts, parts)  # number within its unit
        row_offsets, slot_offsets = max_rows * (part // slot_parts[unit]), max_slots * (part % slot_parts[unit])
        rows = np.minimum(max_rows, units[unit, ROWS] - row_offsets)
        slots = np.minimum(max_slots, units[unit, SLOTS] - slot_offsets)
        return self._parts(unit, first_row=row_offsets, rows=rows, first_slot=slot_offsets, slots=slots)

    def ungroup(self, max_slots: int, min_run: int) -> "WorkList":
        """The same attention, with small new units for rows that were in several units.

        A new unit has all slots of its rows, at most `max_slots`, in one run or in runs of fewer than `min_run` on
        average. A unit is unchanged unless all of its rows move to new units. A list with limits is returned unchanged.
        """
        if self.limited or self.output_count == len(np.unique(self.owners)):
            return self
        units = self.units.astype(np.int64)
        first_rows, end_rows = units[:, FIRST_ROW], units[:, FIRST_ROW] + units[:, ROWS]
        edges = np.unique(np.concatenate([first_rows, end_rows]))
        inside = (first_rows[:, None] <= edges[:-1]) & (edges[1:] <= end_rows[:, None])  # [units, ranges of rows]
        slots = [self.slots[slot : slot + count] for slot, count in units[:, [FIRST_SLOT, SLOTS]].tolist()]
        all_slots: dict[int, Ints] = {}  # of ranges of rows that may move
        for index in np.flatnonzero((inside.sum(0) > 1) & (units[:, SLOTS] @ inside <= max_slots)).tolist():
            range_slots = np.concatenate([slots[unit] for unit in np.flatnonzero(inside[:, index])])
            runs = len(run_edges(range_slots)) - 1
            if runs == 1 or len(range_slots) < min_run * runs:
                all_slots[index] = range_slots
        moves = np.isin(np.arange(inside.shape[1]), list(all_slots))
        # A range stays if another one of its unit does, which may split further units.
        while (is_split := (inside & moves).any(1) & (inside & ~moves).any(1)).any():
            moves &= ~inside[is_split].any(0)
        if not moves.any():
            return self
        builder = WorkListBuilder()
        for unit in np.flatnonzero(~(inside & moves).any(1)).tolist():
            builder.add(int(first_rows[unit]), int(units[unit, ROWS]), builder.add_slots(slots[unit]), len(slots[unit]))
        for index in np.flatnonzero(moves).tolist():
            row, rows, range_slots = int(edges[index]), int(edges[index + 1] - edges[index]), all_slots[index]
            builder.add(row, rows, builder.add_slots(range_slots), len(range_slots))
        return builder.build()

    def cut_at_runs(self, min_run: int) -> "WorkList":
        """The same attention in units of consecutive slots. Units whose runs average below `min_run` are unchanged."""
        parts: list[tuple[int, int, int]] = []  # index of the unit, first of its slots, number of slots
        for index, unit in enumerate(self.units):
            edges = run_edges(self.slots[unit[FIRST_SLOT] : unit[FIRST_SLOT] + unit[SLOTS]])
            if unit[SLOTS] < min_run * (len(edges) - 1):
                edges = [0, int(unit[SLOTS])]
            parts += [(index, start, stop - start) for start, stop in pairwise(edges)]
        if len(parts) == len(self.units):
            return self
        unit, slot, count = np.array(parts).T
        rows = self.units[unit, ROWS]
        return self._parts(unit, first_row=np.zeros_like(unit), rows=rows, first_slot=slot, slots=count)

    def _parts(self, unit: Longs, first_row: Longs, rows: Longs | Ints, first_slot: Longs, slots: Longs) -> "WorkList":
        """A list of parts of units: `rows` and `slots` of `unit` from the first on. Drops parts that no row sees."""
        full = self.units[unit]
        parts = np.stack([full[:, FIRST_ROW] + first_row, rows, full[:, FIRST_SLOT] + first_slot, slots], axis=1)
        if not self.limited:
            return WorkList(_with_outputs(parts), self.slots)
        output = _ranges(full[:, FIRST_OUTPUT] + first_row, parts[:, ROWS])
        part = np.repeat(np.arange(len(parts)), parts[:, ROWS])
        counts = parts[part, SLOTS]
        reach = counts if self.reach is None else np.clip(self.reach[output] - first_slot[part], 0, counts)
        skip = np.zeros_like(reach) if self.skip is None else np.clip(self.skip[output] - first_slot[part], 0, reach)
        is_visible = np.zeros(len(parts), dtype=np.bool_)
        np.logical_or.at(is_visible, part, reach > skip)
        reach, skip = (limits[is_visible[part]].astype(np.int32) for limits in (reach, skip))
        return WorkList(_with_outputs(parts[is_visible]), self.slots, reach, None if self.skip is None else skip)


class WorkListBuilder:
    """Collects units, and numbers their partial results."""

    def __init__(self) -> None:
        self._units: list[tuple[int, int, int, int]] = []
        self._slots: list[Longs | Ints] = []
        self._limits: tuple[list[Longs | None], list[Longs | None]] = [], []  # reach and skip
        self._length = 0

    def add_slots(self, slots: Longs | Ints) -> int:
        """Append `slots` to the list of slots. Returns the index of the first one, for `add`."""
        start = self._length
        self._slots.append(slots)
        self._length += len(slots)
        return start

    def add(
        self,
        first_row: int,
        rows: int,
        first_slot: int,
        slots: int,
        reach: Longs | None = None,
        skip: Longs | None = None,
    ) -> None:
        """Add a unit: `rows` rows from `first_row` on, and `slots` entries of the list of slots from `first_slot` on.

        `reach` and `skip` [rows] are those of `WorkList`.
        """
        self._units.append((first_row, rows, first_slot, slots))
        for limits, limit in zip(self._limits, (reach, skip), strict=True):
            limits.append(limit)

    def build(self) -> WorkList:
        """The list of all units, in the order in which they were added."""
        units = _with_outputs(np.array(self._units, dtype=np.int32).reshape(-1, 4))
        slots = np.concatenate(self._slots, dtype=np.int32) if self._slots else np.empty(0, dtype=np.int32)
        reach_limits, skip_limits = self._limits
        reach = _limits(units, reach_limits, units[:, SLOTS])
        skip = _limits(units, skip_limits, np.zeros_like(units[:, SLOTS]))
        return WorkList(units, slots, reach, skip)


def _limits(units: Ints, limits: Sequence[Longs | None], defaults: Ints) -> Ints | None:
    """The limits of all partial results, int32 [P], by default those in `defaults` [U]; None if no unit has limits."""
    if all(limit is None for limit in limits):
        return None
    parts = []
    for unit, limit, default in zip(units, limits, defaults, strict=True):
        parts.append(np.full(unit[ROWS], default) if limit is None else limit)
    return np.concatenate(parts, dtype=np.int32)


def run_edges(slots: Ints) -> Sequence[int]:
    """The indices at which runs of consecutive `slots` begin, and the number of slots at the end."""
    return [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]


def _with_outputs(units: NDArray[np.integer[Any]]) -> Ints:
    """`units` [U, 4] with the number of their first partial result as a fifth column."""
    first_outputs = np.cumsum(units[:, ROWS]) - units[:, ROWS]
    return np.concatenate([units, first_outputs[:, None]], axis=1, dtype=np.int32)


def _ranges(starts: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]]) -> Longs:
    """`counts[0]` numbers from `starts[0]` on, then `counts[1]` numbers from `starts[1]` on, and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    ranges: Longs = np.arange(counts.sum(), dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return ranges


def _owners(work: WorkList) -> Ints:
    return _ranges(work.units[:, FIRST_ROW], work.units[:, ROWS]).astype(np.int32)

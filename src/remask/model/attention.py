"""Attention over K/V slots. A work list says which slots a row sees; there is no mask of the whole batch."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from remask.model.work_list import Ints, WorkList

Sink: TypeAlias = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of rows to the slots that `work` names. It neither changes nor keeps its inputs."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """Returns [N, heads * Dh] from `q` [N, heads, Dh] and one layer's `k` and `v` [slots, kv_heads, Dh].

        `sink` is a key and a value, [kv_heads, Dh] each. Every row attends to it and to its slots.
        """
        ...


@dataclass(frozen=True, slots=True)
class ListSize:
    """The size of a work list, on which its launches depend. A list fits in any larger size.

    Attributes:
        rows: of the queries.
        units: programs.
        slots: entries of the list of slots.
        outputs: partial results.
        merged: whether they are merged: a row has several of them, or one and a sink.
    """

    rows: int
    units: int
    slots: int
    outputs: int
    merged: bool

    def rounded_up(self, rows: int) -> "ListSize":
        """The same for `rows` rows, with all else a power of two, so that few sizes serve many lists."""
        units, slots, outputs = (1 << (number - 1).bit_length() for number in (self.units, self.slots, self.outputs))
        return ListSize(rows, units, slots, outputs, self.merged)

    @property
    def lengths(self) -> list[int]:
        """Of the arrays of integers that describe a list of this size.

        They are units [5 units], slots [slots], reach [outputs], the numbers of partial results in the order of their
        rows [outputs], and where each row's begin there [rows + 1]; these two are 0 unless `merged`.
        """
        return [5 * self.units, self.slots, self.outputs, self.outputs, self.rows + 1]


@runtime_checkable
class SizedAttention(Attention, Protocol):
    """Attention that launches the same for all lists of one size, so that a device graph can hold it.

    `heads` are those of queries, and `groups` those of K and V.
    """

    def size(self, work: WorkList, heads: int, groups: int, *, sink: bool = False) -> ListSize:
        """The size of `work`, for rows with a `sink` or without one."""
        ...

    def numbers(self, work: WorkList, heads: int, groups: int, size: ListSize) -> Ints:
        """`work` as it is read on the device, int32: arrays of `size.lengths`, one after the other."""
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, size: ListSize, sink: Sink | None = None) -> Tensor:
        """As a call, of the list that stands in `numbers`. Rows of `q` [size.rows, ...] in no unit get any result.

        Raises `ValueError` where there is a sink of which `size` was not told.
        """
        ...

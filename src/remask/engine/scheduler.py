"""Which running requests take part in the next step."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Round-robin over running items under a row-layer budget.

    An item that does not fit waits. It comes first in the next round, so nothing starves. The first item in line is
    always taken, because an item larger than the budget would never run otherwise.

    Items of a step have at most `max_rows` rows in any layer between them, in the same way: these have room on the
    device.

    At most `max_refreshes` items of a step refresh. Items that wait run whole steps later, so their later refreshes
    fall on other steps. Waiting does not change what they compute.
    """

    def __init__(self, budget: int | None, max_refreshes: int | None = None, max_rows: int | None = None) -> None:
        self.budget, self.max_refreshes, self.max_rows = budget, max_refreshes, max_rows
        self._line: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        return iter(self._line)

    def add(self, item: T) -> None:
        """Append an item to the line."""
        self._line.append(item)

    def remove(self, item: T) -> None:
        """Remove an item from the line."""
        self._line.remove(item)

    def next(
        self,
        ready: Callable[[T], bool],
        cost: Callable[[T, int | None], int],
        refreshes: Callable[[T], bool],
        rows: Callable[[T], int] = lambda _: 0,
    ) -> list[T]:
        """The items of the next step, which go to the end of the line. Items that are not `ready` keep their place.

        `cost` gets the row-layers that are left (None: no budget), so that an item may offer a piece that fits. `rows`
        are most of an item in any layer.
        """
        taken: list[T] = []
        spent = refreshing = wide = 0
        for item in self._line:
            if not ready(item):
                continue
            heavy = self.max_refreshes is not None and refreshes(item)
            if heavy and refreshing == self.max_refreshes:
                continue
            width = 0 if self.max_rows is None else rows(item)
            if taken and self.max_rows is not None and wide + width > self.max_rows:
                continue
            left = None if self.budget is None else self.budget - spent
            price = cost(item, left)
            if taken and left is not None and price > left:
                continue
            taken.append(item)
            spent += price
            wide += width
            refreshing += heavy
        if len(taken) < len(self._line):
            going = {id(item) for item in taken}
            self._line = deque([*(item for item in self._line if id(item) not in going), *taken])
        return taken

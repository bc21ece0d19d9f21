"""Which running requests take part in the next step."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Round-robin over running items under a row-layer budget.

    An item that does not fit waits, and its step does not move; it comes first in the next round, so nothing starves.
    The first in line is always taken, or an item larger than the budget would never run.

    At most `max_refreshes` of the items of a step refresh. Those that wait run whole steps later, so their refreshes
    fall on other steps from then on, and what they compute stays as it is.
    """

    def __init__(self, budget: int | None, max_refreshes: int | None = None) -> None:
        self.budget, self.max_refreshes = budget, max_refreshes
        self._line: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        return iter(self._line)

    def add(self, item: T) -> None:
        """Last in line."""
        self._line.append(item)

    def remove(self, item: T) -> None:
        """Out of the line."""
        self._line.remove(item)

    def next(
        self, ready: Callable[[T], bool], cost: Callable[[T, int | None], int], refreshes: Callable[[T], bool]
    ) -> list[T]:
        """The items of the next step, which go to the end of the line. Items that are not `ready` keep their place.

        `cost` is told how many row-layers are left (None: no budget), so that an item may offer what fits.
        """
        taken: list[T] = []
        spent = refreshing = 0
        for item in self._line:
            if not ready(item):
                continue
            heavy = self.max_refreshes is not None and refreshes(item)
            if heavy and refreshing == self.max_refreshes:
                continue
            left = None if self.budget is None else self.budget - spent
            price = cost(item, left)
            if taken and left is not None and price > left:
                continue
            taken.append(item)
            spent += price
            refreshing += heavy
        for item in taken:
            self._line.remove(item)
            self._line.append(item)
        return taken

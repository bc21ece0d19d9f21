"""Which running requests take part in the next step."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Round-robin over running items under a row-layer budget.

    An item that does not fit waits, and its step does not move; it comes first in the next round, so nothing starves.
    The first in line is always taken, or an item larger than the budget would never run.
    """

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
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

    def next(self, ready: Callable[[T], bool], cost: Callable[[T], int]) -> list[T]:
        """The items of the next step, which go to the end of the line. Items that are not `ready` keep their place."""
        taken: list[T] = []
        spent = 0
        for item in self._line:
            if not ready(item):
                continue
            price = cost(item)
            if taken and self.budget is not None and spent + price > self.budget:
                continue
            taken.append(item)
            spent += price
        for item in taken:
            self._line.remove(item)
            self._line.append(item)
        return taken

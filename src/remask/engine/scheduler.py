"""Chooses the running members that take part in the next step."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from remask.engine.request import Owner

T = TypeVar("T")

NOBODY = Owner()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step; None is no limit.

    Attributes:
        budget: row-layers.
        max_refreshes: items that refresh.
        canvases: canvases.
        share: row-layers of one client's items, while items of other clients are ready too.
        rows: rows in any layer, by the memory of the device.
    """

    budget: int | None = None
    max_refreshes: int | None = None
    canvases: int | None = None
    share: int | None = None
    rows: int | None = None


class Scheduler(Generic[T]):
    """Round-robin over running items, within limits.

    An item that does not fit waits, and comes first in the next round, so none starves. The first item in line is
    always taken: an item larger than the budget would never run otherwise.

    If not all items fit, clients take turns, and so do the bodies of a client: the first item of each client comes
    before the second item of any. An item that waits runs some steps later, and so do its refreshes. Waiting does not
    change its results.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._line: deque[T] = deque()
        self._facts: dict[T, tuple[Owner, int]] = {}  # owner and number of canvases of each item
        self._owners: Counter[Owner] = Counter()
        self._clients: Counter[str] = Counter()
        self._canvases = 0
        self._round = 0  # number of rounds in which not all took part
        self._served: dict[Owner | str, int] = {}  # the last such round in which a body or client took part

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        return iter(self._line)

    @property
    def items(self) -> tuple[T, ...]:
        """All items, in line."""
        return tuple(self._line)

    def add(self, item: T, owner: Owner = NOBODY, canvases: int = 1) -> None:
        """Append an item of `owner` to the line."""
        self._line.append(item)
        self._facts[item] = owner, canvases
        self._owners[owner] += 1
        self._clients[owner.client] += 1
        self._canvases += canvases

    def remove(self, item: T) -> None:
        """Remove an item from the line."""
        self._line.remove(item)
        owner, canvases = self._facts.pop(item)
        self._canvases -= canvases
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
            self._served.pop(owner, None)
        self._clients[owner.client] -= 1
        if not self._clients[owner.client]:
            del self._clients[owner.client]
            self._served.pop(owner.client, None)

    def next(
        self,
        ready: Callable[[T], bool],
        cost: Callable[[T, int | None], int],
        refreshes: Callable[[T], bool],
        rows: Callable[[T], int] = lambda _: 0,
    ) -> list[T]:
        """The items of the next step, which go to the end of the line. Items that are not `ready` keep their place.

        `cost` gets the row-layers that are left (None: no budget), so that an item may offer a piece that fits. `rows`
        is the largest number of rows of an item in any layer.
        """
        taken, refused = self._within(self._line, ready, cost, refreshes, rows)
        if refused and len(self._owners) > 1:
            taken, _ = self._within(self._in_turns(ready), ready, cost, refreshes, rows)
            self._round += 1
            for item in taken:
                owner = self._facts[item][0]
                self._served[owner] = self._served[owner.client] = self._round
        if len(taken) < len(self._line):
            going = {id(item) for item in taken}
            self._line = deque([*(item for item in self._line if id(item) not in going), *taken])
        return taken

    def _within(
        self,
        line: Iterable[T],
        ready: Callable[[T], bool],
        cost: Callable[[T, int | None], int],
        refreshes: Callable[[T], bool],
        rows: Callable[[T], int],
    ) -> tuple[list[T], bool]:
        """The items of `line` that are ready and fit, in its order, and whether an item that was ready did not fit."""
        limits, taken, refused = self.limits, list[T](), False
        most = None if limits.canvases is None or self._canvases <= limits.canvases else limits.canvases
        share = limits.share if len(self._clients) > 1 and self._several(ready) else None
        spent = refreshing = canvases = wide = 0
        by_client: Counter[str] = Counter()
        for item in line:
            if not ready(item):
                continue
            heavy = limits.max_refreshes is not None and refreshes(item)
            left = None if limits.budget is None else limits.budget - spent
            width = 0 if limits.rows is None else rows(item)
            full = most is not None and canvases + self._facts[item][1] > most
            full = full or (limits.rows is not None and wide + width > limits.rows)
            if (heavy and refreshing == limits.max_refreshes) or (taken and full):
                refused = True
                continue
            price = cost(item, left)
            client = "" if share is None else self._facts[item][0].client
            beyond = left is not None and price > left
            if (taken and beyond) or (share is not None and by_client[client] and by_client[client] + price > share):
                refused = True
                continue
            taken.append(item)
            spent += price
            wide += width
            refreshing += heavy
            if most is not None:
                canvases += self._facts[item][1]
            if share is not None:
                by_client[client] += price
        return taken, refused

    def _several(self, ready: Callable[[T], bool]) -> bool:
        """Whether items of more than one client can take part."""
        clients = (self._facts[item][0].client for item in self._line if ready(item))
        first = next(clients, None)
        return any(client != first for client in clients)

    def _in_turns(self, ready: Callable[[T], bool]) -> list[T]:
        """The line with the first item of each client before the second item of any, and the same for its bodies.

        Among equals, the one that took part longest ago comes first.
        """
        of_body: Counter[Owner] = Counter()
        by_client: dict[str, list[tuple[int, int, int, T]]] = {}
        for place, item in enumerate(self._line):
            if ready(item):
                owner = self._facts[item][0]
                rank = of_body[owner], self._served.get(owner, 0), place, item
                by_client.setdefault(owner.client, []).append(rank)
                of_body[owner] += 1
        ranked = [
            (turn, self._served.get(client, 0), place, item)
            for client, items in by_client.items()
            for turn, (*_, place, item) in enumerate(sorted(items, key=lambda each: each[:3]))
        ]
        return [item for *_, item in sorted(ranked, key=lambda each: each[:3])]

"""The queue of waiting requests. Clients that run the fewest canvases come first."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from remask.engine.request import Owner, PendingRequest
from remask.request.terms import PRIORITY_STEP_S

K = TypeVar("K")
Key: TypeAlias = tuple[int, int, float]

NONE_SKIPPED: Mapping[Owner, int] = MappingProxyType({})
MAX_BODIES_PER_SLOT = 4  # running bodies of one client for each canvas of a step, so that each takes part often enough


class WaitingQueue:
    """The requests that wait, and the number of canvases that their clients and bodies run.

    Next is the client that runs the fewest canvases, and of its bodies the one that runs the fewest; among equals, the
    one whose request arrived first. Requests of one body begin in the order of `queue_time`. `priority` comes before
    all of this, among clients and among the bodies of a client. The priority of a client or body that runs nothing
    improves by one for each `PRIORITY_STEP_S` seconds of waiting, so none waits for ever.
    """

    def __init__(self) -> None:
        self.count = 0  # requests that wait
        self._bodies: dict[Owner, list[PendingRequest]] = {}  # waiting requests in the order of `queue_time`
        self._canvases_of_body: Counter[Owner] = Counter()  # running ones
        self._canvases_of_client: Counter[str] = Counter()  # running ones
        self._waiting: Counter[str] = Counter()  # requests by client
        self._first: PendingRequest | None = None  # cached result of `first`; None after a change

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PendingRequest]:
        return (pending for line in list(self._bodies.values()) for pending in list(line))

    def add(self, pending: PendingRequest) -> None:
        """Queue a request."""
        owner = pending.request.owner
        insort(self._bodies.setdefault(owner, []), pending, key=lambda other: other.queue_time)
        self._waiting[owner.client] += 1
        self.count += 1
        self._first = None

    def remove(self, pending: PendingRequest) -> None:
        """Remove a request. Raises `ValueError` if it does not wait."""
        owner = pending.request.owner
        line = self._bodies.get(owner, [])
        line.remove(pending)
        if not line:
            del self._bodies[owner]
        _add_to(self._waiting, owner.client, -1)
        self.count -= 1
        self._first = None

    def add_running(self, pending: PendingRequest) -> None:
        """Count the canvases of a request that has begun."""
        self._count_running(pending.request.owner, pending.canvas_count)

    def remove_running(self, pending: PendingRequest) -> None:
        """Stop counting the canvases of a request that has ended."""
        self._count_running(pending.request.owner, -pending.canvas_count)

    def _count_running(self, owner: Owner, canvas_count: int) -> None:
        _add_to(self._canvases_of_body, owner, canvas_count)
        _add_to(self._canvases_of_client, owner.client, canvas_count)
        self._first = None

    def clear_running(self) -> None:
        """Count no running canvases, as nothing runs any more."""
        self._canvases_of_body.clear()
        self._canvases_of_client.clear()
        self._first = None

    def first(self, now: float, skipped: Mapping[Owner, int] = NONE_SKIPPED) -> PendingRequest | None:
        """The request whose turn it is at the time `now`, on the clock of `arrived`; None if none waits.

        `skipped` is the number of leading requests of each body to leave out. If it is empty, the result is cached
        until a request arrives, begins or ends.
        """
        if self._first is not None and not skipped:
            return self._first
        best: dict[str, tuple[Key, PendingRequest]] = {}  # of each client
        for owner, line in self._bodies.items():
            index = skipped.get(owner, 0)
            if index >= len(line):
                continue
            pending = line[index]
            key = _sort_key(pending, self._canvases_of_body[owner], now)
            if owner.client not in best or key < best[owner.client][0]:
                best[owner.client] = key, pending
        candidates = [pending for _, pending in best.values()]
        canvases = self._canvases_of_client
        first = min(
            candidates, key=lambda other: _sort_key(other, canvases[other.request.owner.client], now), default=None
        )
        if not skipped:
            self._first = first
        return first

    @property
    def has_several_clients(self) -> bool:
        """Whether requests of more than one client wait or run."""
        return len(self._clients) > 1

    @property
    def _clients(self) -> Set[str]:
        return self._waiting.keys() | self._canvases_of_client.keys()

    def may_exceed(self, pending: PendingRequest, running_canvases: int, limit: int) -> bool:
        """Whether a request may begin beside `running_canvases` canvases although they then exceed `limit`.

        If its client runs nothing, it may while fewer than 2 * `limit` clients run something, so that nobody waits for
        the answers of others to end. If all requests are of one client, perhaps a proxy, this holds for its bodies, and
        for `MAX_BODIES_PER_SLOT` * `limit` of them. A client or body that runs something may have an equal part of
        `limit`, while all canvases are at most 2 * `limit`. All take turns in steps then.
        """
        owner = pending.request.owner
        if self.has_several_clients:
            running = self._canvases_of_client[owner.client]
            parties = len(self._clients)
            is_crowded = len(self._canvases_of_client) >= 2 * limit
        else:
            running = self._canvases_of_body[owner]
            parties = len(self._bodies.keys() | self._canvases_of_body.keys())
            is_crowded = len(self._canvases_of_body) >= MAX_BODIES_PER_SLOT * limit
        if parties <= 1:
            return False
        if not running:
            return not is_crowded
        count = pending.canvas_count
        return running_canvases + count <= 2 * limit and running + count <= limit // parties


def _sort_key(pending: PendingRequest, canvas_count: int, now: float) -> Key:
    """Sorts requests of clients, or bodies, that run `canvas_count` canvases; the smallest is next."""
    bonus = 0 if canvas_count else max(0, int((now - pending.arrived) / PRIORITY_STEP_S))
    return pending.request.priority - bonus, canvas_count, pending.queue_time


def _add_to(counter: Counter[K], key: K, count: int) -> None:
    """Add `count`, which may be negative, and drop a key whose count is 0."""
    counter[key] += count
    if not counter[key]:
        del counter[key]

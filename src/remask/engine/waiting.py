"""The queue of waiting requests. Next is a request of the client that holds the fewest canvases."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from remask.engine.request import Owner, PendingRequest
from remask.request.terms import PRIORITY_STEP_S

K = TypeVar("K")
Key: TypeAlias = tuple[int, int, float]

NOTHING: Mapping[Owner, int] = MappingProxyType({})
CROWD = 4  # bodies of one client that run, for each canvas of a step: who runs has every fifth step or more


class WaitingQueue:
    """The requests that wait, and how many canvases their owners hold.

    Next is the client that holds the fewest canvases, and of its bodies the one that holds the fewest; among equals,
    the one whose request arrived first. Requests of one body begin in the order of their turns. `priority` comes before
    all of this, among clients and among the bodies of a client. The priority of a client or body that holds nothing
    improves by one for each `PRIORITY_STEP_S` seconds of waiting, so none waits for ever.
    """

    def __init__(self) -> None:
        self._bodies: dict[Owner, list[PendingRequest]] = {}  # of each that has some, in the order of their turns
        self._held: Counter[Owner] = Counter()
        self._held_by_client: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # by client
        self.count = 0  # requests that wait
        self._first: PendingRequest | None = None  # the next one; kept until something changes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PendingRequest]:
        return (pending for line in list(self._bodies.values()) for pending in list(line))

    def add(self, pending: PendingRequest) -> None:
        """Queue a request."""
        owner = pending.request.owner
        insort(self._bodies.setdefault(owner, []), pending, key=lambda other: other.turn)
        self._waiting[owner.client] += 1
        self.count += 1
        self._first = None

    def remove(self, pending: PendingRequest) -> None:
        """Raises `ValueError` where the request does not wait."""
        owner = pending.request.owner
        line = self._bodies.get(owner, [])
        line.remove(pending)
        if not line:
            del self._bodies[owner]
        _add(self._waiting, owner.client, -1)
        self.count -= 1
        self._first = None

    def hold(self, pending: PendingRequest) -> None:
        """Note that a request has begun."""
        self._hold(pending.request.owner, pending.canvases)

    def let_go(self, pending: PendingRequest) -> None:
        """Note that a running request has ended."""
        self._hold(pending.request.owner, -pending.canvases)

    def _hold(self, owner: Owner, canvases: int) -> None:
        _add(self._held, owner, canvases)
        _add(self._held_by_client, owner.client, canvases)
        self._first = None

    def nobody_holds(self) -> None:
        """Note that nothing runs any more."""
        self._held.clear()
        self._held_by_client.clear()
        self._first = None

    def first(self, now: float, passed: Mapping[Owner, int] = NOTHING) -> PendingRequest | None:
        """The request whose turn it is at the time `now`, on the clock of `arrived`.

        The first `passed` requests of each body are skipped. If none is, the answer is kept until a request arrives,
        begins or ends.
        """
        if self._first is None or passed:
            best: dict[str, tuple[Key, PendingRequest]] = {}
            for owner, line in self._bodies.items():
                at = passed.get(owner, 0)
                if at >= len(line):
                    continue
                head = line[at]
                key = _key(head, self._held[owner], now)
                if owner.client not in best or key < best[owner.client][0]:
                    best[owner.client] = key, head
            heads = [(_key(head, self._held_by_client[client], now), head) for client, (_, head) in best.items()]
            first = min(heads, key=lambda entry: entry[0])[1] if heads else None
            if passed:
                return first
            self._first = first
        return self._first

    @property
    def several(self) -> bool:
        """Whether requests of more than one client wait or run."""
        return len(self._clients) > 1

    @property
    def _clients(self) -> Set[str]:
        return self._waiting.keys() | self._held_by_client.keys()

    def beyond(self, pending: PendingRequest, canvases: int, most: int) -> bool:
        """Whether a request may begin beside `canvases` although these are `most`, or would be more with it.

        It may where its client holds none, and fewer than twice `most` clients hold some; so nobody waits until the
        answers of others end. Where one client is alone, or many are taken for one behind a proxy, the same goes for
        its bodies, and `CROWD` times `most`. Who holds some may have its equal part of `most`, up to twice `most`
        canvases. All take turns in steps then.
        """
        owner, more = pending.request.owner, pending.canvases
        if self.several:
            share, parts = self._held_by_client[owner.client], len(self._clients)
            crowded = len(self._held_by_client) >= 2 * most
        else:
            share, parts = self._held[owner], len(self._bodies.keys() | self._held.keys())
            crowded = len(self._held) >= CROWD * most
        if not share:
            return parts > 1 and not crowded
        return parts > 1 and canvases + more <= 2 * most and share + more <= most // parts


def _key(head: PendingRequest, canvases: int, now: float) -> Key:
    waited = 0 if canvases else max(0, int((now - head.arrived) / PRIORITY_STEP_S))
    return head.request.priority - waited, canvases, head.turn


def _add(counter: Counter[K], key: K, count: int) -> None:
    counter[key] += count
    if not counter[key]:
        del counter[key]

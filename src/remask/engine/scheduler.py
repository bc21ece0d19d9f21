"""Chooses the running members that take part in the next step."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remask.engine.config import EngineConfig
from remask.engine.member import Member, Turn
from remask.engine.request import Owner


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

    @classmethod
    def of(cls, config: EngineConfig, share: int, rows: int | None) -> "StepLimits":
        """Those of `config`, with the `share` of a client and as many `rows` as memory allows."""
        return cls(config.max_row_layers, config.max_refreshes, config.max_num_seqs, share, rows)


class Scheduler:
    """Round-robin over running members, within limits.

    A member that does not fit waits, and comes first in the next round, so none starves. The first in line is always
    taken: one whose turn is larger than the budget would never run otherwise.

    If not all fit, clients take turns, and so do the bodies of a client: the first member of each client comes before
    the second of any. A member that waits runs some steps later, and so do its refreshes. Waiting does not change its
    results.

    Attributes:
        limits: those of a step.
        line: the members, in the order in which they are taken.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.line: deque[Member] = deque()
        self._owners: Counter[Owner] = Counter()
        self._clients: Counter[str] = Counter()
        self._canvases = 0
        self._round = 0  # number of rounds in which not all took part
        self._served: dict[Owner | str, int] = {}  # the last such round in which a body or client took part

    def add(self, member: Member) -> None:
        """Append a member to the line."""
        self.line.append(member)
        self._owners[member.owner] += 1
        self._clients[member.owner.client] += 1
        self._canvases += len(member.canvases)

    def remove(self, member: Member) -> None:
        """Remove a member from the line."""
        self.line.remove(member)
        owner = member.owner
        self._canvases -= len(member.canvases)
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
            self._served.pop(owner, None)
        self._clients[owner.client] -= 1
        if not self._clients[owner.client]:
            del self._clients[owner.client]
            self._served.pop(owner.client, None)

    def next(self, turns: Sequence[Turn]) -> list[Turn]:
        """Those of `turns` that are taken in the next step; their members go to the end of the line.

        `turns` are of members that can run, in the order of the line. The others keep their places.
        """
        taken, refused = self._within(turns)
        if refused and len(self._owners) > 1:
            taken, _ = self._within(self._fairly(turns))
            self._round += 1
            for turn in taken:
                owner = turn.member.owner
                self._served[owner] = self._served[owner.client] = self._round
        if len(taken) < len(self.line):
            going = {id(turn.member) for turn in taken}
            staying = (member for member in self.line if id(member) not in going)
            self.line = deque([*staying, *(turn.member for turn in taken)])
        return taken

    def _within(self, turns: Iterable[Turn]) -> tuple[list[Turn], bool]:
        """Those of `turns` that fit, in their order, and whether one did not fit."""
        limits, taken, refused = self.limits, list[Turn](), False
        most = None if limits.canvases is None or self._canvases <= limits.canvases else limits.canvases
        several = len(self._clients) > 1 and len({turn.member.owner.client for turn in turns}) > 1
        share = limits.share if several else None
        spent = refreshing = canvases = wide = 0
        by_client: Counter[str] = Counter()
        for turn in turns:
            member, tally = turn.member, turn.tally
            # A refresh is heavy if it costs more than the cheapest pass of its request so far, or is the first pass.
            # If every pass refreshes, as with one step a block, none is put off.
            heavy = limits.max_refreshes is not None and tally.refreshes and tally.cost > (member.cheapest or 0)
            full = most is not None and canvases + len(member.canvases) > most
            full = full or (limits.rows is not None and wide + tally.rows > limits.rows)
            if (heavy and refreshing == limits.max_refreshes) or (taken and full):
                refused = True
                continue
            rows, client = tally.rows, member.owner.client
            left = None if limits.budget is None else limits.budget - spent
            if left is not None:
                member.fit(turn, left)
            price = turn.tally.cost
            beyond = left is not None and price > left
            if (taken and beyond) or (share is not None and by_client[client] and by_client[client] + price > share):
                refused = True
                continue
            taken.append(turn)
            spent += price
            wide += rows
            refreshing += heavy
            canvases += len(member.canvases)
            if share is not None:
                by_client[client] += price
        return taken, refused

    def _fairly(self, turns: Iterable[Turn]) -> list[Turn]:
        """The turns with the first one of each client before the second of any, and the same for its bodies.

        Among equals, the one that took part longest ago comes first.
        """
        of_body: Counter[Owner] = Counter()
        by_client: dict[str, list[tuple[int, int, int, Turn]]] = {}
        for place, turn in enumerate(turns):
            owner = turn.member.owner
            by_client.setdefault(owner.client, []).append((of_body[owner], self._served.get(owner, 0), place, turn))
            of_body[owner] += 1
        ranked = [
            (number, self._served.get(client, 0), place, turn)
            for client, waiting in by_client.items()
            for number, (*_, place, turn) in enumerate(sorted(waiting, key=lambda entry: entry[:3]))
        ]
        return [turn for *_, turn in sorted(ranked, key=lambda entry: entry[:3])]

"""What takes part in passes: requests, and passes over shared prefixes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from remask.engine.canvas_state import CanvasState
from remask.engine.planned import Tally
from remask.engine.prefix_pass import Loop, PrefixPass
from remask.engine.request import Owner
from remask.engine.runner import Items
from remask.engine.running import RunningRequest, Scores
from remask.plan.plan import Plan


class Member(Protocol):
    """What takes part in passes until it is done.

    In each step the engine asks the members that are `ready` to `prepare` their next passes, and `offer`s the budget
    to one after the other. Those that fit `enter` the pass. Each is told that its pass `ran`, or that it `failed`.
    """

    @property
    def owner(self) -> Owner:
        """Whose turn it takes."""
        ...

    @property
    def canvases(self) -> int:
        """How many canvases it has."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can run: everything that it reads is there."""
        ...

    @property
    def tally(self) -> Tally:
        """What its next pass counts as, once that is prepared."""
        ...

    def prepare(self, loop: Loop) -> bool:
        """Plan the next pass; False where that failed, and it has ended."""
        ...

    def offer(self, row_layers: int | None) -> int:
        """The cost of its next pass, which may be cut to `row_layers` (None: no limit) if it can be."""
        ...

    def enter(self, loop: Loop, batch: "Batch") -> None:
        """Join the batch of this step, with what has to be done before the pass; where that fails, end instead."""
        ...

    def join(self, batch: "Batch") -> None:
        """Stand among the members of its kind in `batch`."""
        ...

    def items(self) -> Sequence[tuple[CanvasState, Plan]]:
        """What the pass computes of it: its canvases with their plans."""
        ...

    def ran(self, loop: Loop, scores: Scores) -> None:
        """Go on: the pass has run, and `scores` were read of what it predicted."""
        ...

    def failed(self, loop: Loop, error: Exception) -> None:
        """End, with everything that cannot go on without it: its pass cannot run."""
        ...


@dataclass(slots=True)
class Batch:
    """What takes part in one pass."""

    requests: list[RunningRequest] = field(default_factory=list)
    passes: list[PrefixPass] = field(default_factory=list)

    @classmethod
    def of(cls, members: Iterable[Member]) -> "Batch":
        """A batch of `members`, in their order."""
        batch = cls()
        for member in members:
            member.join(batch)
        return batch

    @property
    def members(self) -> list[Member]:
        """Prefix-only passes, then requests."""
        return [*self.passes, *self.requests]

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests' names."""
        return tuple(running.request.id for running in self.requests)

    def enter(self, items: Items) -> None:
        """Tell the requests with which plans their pass runs; `items` are in the order of `members`."""
        left = iter(items[len(self.passes) :])
        for running in self.requests:
            running.revised([next(left) for _ in running.items()])

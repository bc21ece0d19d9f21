"""Members of passes: requests, and prefix-only passes."""

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
    """Takes part in passes until it is done.

    In each step the engine calls `prepare` on the members that are `ready`, and `offer`s the budget to one after the
    other. Those that fit `enter` the pass. Then `ran` or `failed` is called on each.
    """

    @property
    def owner(self) -> Owner:
        """The client and body that it belongs to, for fair turns."""
        ...

    @property
    def canvases(self) -> int:
        """Number of its canvases."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it can run: all K/V that it reads are computed."""
        ...

    @property
    def tally(self) -> Tally:
        """The cost of its next pass, once that is prepared."""
        ...

    def prepare(self, loop: Loop) -> bool:
        """Plan the next pass. False where that failed; the member has then ended."""
        ...

    def offer(self, row_layers: int | None) -> int:
        """The cost of its next pass. A pass that can be cut is cut to `row_layers` (None: no limit)."""
        ...

    def enter(self, loop: Loop, batch: "Batch") -> None:
        """Join the batch of this step, after what must be done before the pass. Where that fails, end instead."""
        ...

    def join(self, batch: "Batch") -> None:
        """Join `batch` as it is."""
        ...

    def items(self) -> Sequence[tuple[CanvasState, Plan]]:
        """Its canvases with their plans of the next pass."""
        ...

    def ran(self, loop: Loop, scores: Scores) -> None:
        """Its pass has run; `scores` are its predictions."""
        ...

    def failed(self, loop: Loop, error: Exception) -> None:
        """Its pass cannot run: end, and end whatever depends on it."""
        ...


@dataclass(slots=True)
class Batch:
    """The members of one pass."""

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
        """Prefix-only passes first, then requests."""
        return [*self.passes, *self.requests]

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests' ids."""
        return tuple(running.request.id for running in self.requests)

    def enter(self, items: Items) -> None:
        """Give the requests the plans that their pass runs with; `items` are in the order of `members`."""
        left = iter(items[len(self.passes) :])
        for running in self.requests:
            running.revised([next(left) for _ in running.items()])

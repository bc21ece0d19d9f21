"""The pass that computes a shared prefix for all requests that lease it.

It runs in pieces of some layers, so that a long prefix does not hold up what runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from remask.engine.canvas_state import CanvasState, Kept, prefix_canvas
from remask.engine.planned import Tally
from remask.engine.request import Owner
from remask.engine.running import RequestLoop, Scores
from remask.engine.stats import EngineStats
from remask.model.stage import Save, Stage, StepBatch
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.store.entry import PrefixEntry
from remask.store.prefix import Lease, PrefixStore


class Loop(RequestLoop, Protocol):
    """The part of the engine's loop that members of passes call."""

    @property
    def stats(self) -> EngineStats:
        """The engine's counters."""
        ...

    def leave(self, work: "PrefixPass") -> None:
        """Remove it from the running members."""
        ...

    def fail_readers(self, entry: PrefixEntry, error: Exception) -> None:
        """End the requests that lease `entry`, whose pass failed."""
        ...


class PassList(Protocol):
    """A batch, as far as prefix-only passes join it."""

    passes: list["PrefixPass"]


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixPass:
    """The prefix-only pass of an entry of `store`, which runs some layers at a time: a `Member` of passes.

    The hidden states that leave the last layer of a piece are kept in the entry, like every boundary state. The next
    piece restarts from them, so the pieces compute the same as one pass. `done` layers have run, and `offered` more may
    run in this step. `whole` has one span for each layer. `owner` is that of the request which caused it.
    """

    entry: PrefixEntry
    branch: CanvasState
    whole: Plan
    owner: Owner
    store: PrefixStore
    done: int = 0
    offered: int = 0
    canvases: int = 1
    ready: bool = True

    @classmethod
    def of(cls, lease: Lease, store: PrefixStore, layers: int, owner: Owner) -> "PrefixPass | None":
        """The pass over the new entry of `lease`, on a model of `layers`; None where the entry was stored already."""
        if lease.hit or lease.entry.ready:
            return None
        branch, whole = prefix_canvas(lease.entry, layers)
        branch.restored = (Kept(0, lease.entry.states),)
        return cls(entry=lease.entry, branch=branch, whole=whole, owner=owner, store=store)

    @property
    def rows(self) -> int:
        """Positions of its canvas."""
        return len(self.branch.canvas)

    @property
    def tally(self) -> Tally:
        """See `Member`: all rows in each layer of the next piece."""
        return Tally(self.offered * self.rows, self.rows)

    @property
    def piece(self) -> range:
        """The layers of the next piece."""
        return range(self.done, self.done + self.offered)

    def offer(self, row_layers: int | None) -> int:
        """Cut the next piece to `row_layers` (None: no limit), but never to less than a layer. Returns its cost."""
        self.offered = self.whole.layers - self.done
        if row_layers is not None:
            self.offered = min(self.offered, max(1, row_layers // self.rows))
        return self.offered * self.rows

    def prepare(self, loop: Loop) -> bool:  # noqa: ARG002
        """See `Member`: there is nothing to plan."""
        return True

    def enter(self, loop: Loop, batch: PassList) -> None:  # noqa: ARG002
        """See `Member`."""
        batch.passes.append(self)

    def join(self, batch: PassList) -> None:
        """See `Member`."""
        batch.passes.append(self)

    def items(self) -> Sequence[tuple[CanvasState, Plan]]:
        """See `Member`."""
        return ((self.branch, self.plan),)

    @property
    def plan(self) -> Plan:
        """The next piece: the whole pass, without live rows outside the piece's layers."""
        start, stop, layers = self.done, self.done + self.offered, self.whole.layers
        nothing = np.zeros(self.rows, dtype=np.bool_)
        # `whole` has one span a layer. The states that the first span would keep are kept: the rows restart from them.
        first, *others = self.whole.spans[start:stop]
        spans = [Span(range(start), nothing), replace(first, save=None), *others, Span(range(stop, layers), nothing)]
        return self.whole.over(span for span in spans if len(span.layers))

    def ran(self, loop: Loop, scores: Scores) -> None:  # noqa: ARG002
        """See `Member`: once all layers have run, the prefix can be read. It predicts nothing, so `scores` is empty."""
        loop.stats.prefix_row_layers += self.offered * self.rows
        self.done += self.offered
        self.offered = 0
        if self.done == self.whole.layers:
            self.store.publish(self.entry)
            loop.stats.prefix_passes += 1
            loop.leave(self)

    def failed(self, loop: Loop, error: Exception) -> None:
        """See `Member`: requests that lease the prefix end too."""
        loop.leave(self)
        loop.fail_readers(self.entry, error)
        self.store.withdraw(self.entry)


def keep_leaving_states(batch: StepBatch, passes: Sequence[PrefixPass]) -> StepBatch:
    """`batch` that also keeps the hidden states leaving the pieces of `passes`, without stages that have no rows.

    `passes` are the first canvases that were packed, in order. Changes neither argument.
    """
    stages: list[Stage] = []
    for stage in batch.stages:
        if len(stage.positions):
            stages.append(stage)
        saves = _leaving(stage.layers, passes)
        if saves:
            end = stage.layers.stop
            # A stage without layers has the rows of the stage before, and only keeps states.
            stages.append(replace(stage, layers=range(end, end), carry=None, restore=(), save=saves))
    return replace(batch, stages=tuple(stages))


def _leaving(layers: range, passes: Sequence[PrefixPass]) -> tuple[Save, ...]:
    """What to save where pieces end with the last of `layers`."""
    saves, at = [], 0
    for work in passes:
        if layers.start not in work.piece:
            continue
        rows = slice(at, at + work.rows)
        at = rows.stop
        if layers.stop == work.piece.stop < work.whole.layers:
            saves.append(Save(rows, work.entry.states[layers.stop - 1], slice(None)))
    return tuple(saves)

"""Passes beside those of requests, in pieces of some layers, so that a long prompt does not hold up what runs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from remask.core.plan import Plan
from remask.core.spans import Span
from remask.engine.canvas_state import CanvasState, Kept
from remask.engine.pending import PendingRequest
from remask.models.stage import Save, Stage, StepBatch
from remask.store.entry import PrefixEntry
from remask.store.pages import PageRange
from remask.store.prefix import Lease


@dataclass(slots=True, eq=False, kw_only=True)
class SidePass(ABC):
    """A pass over a whole canvas beside those of requests, which runs some layers at a time.

    The hidden states that leave the last layer of a piece are kept like every boundary state. The next piece restarts
    from them, so the pieces compute what one pass would. `done` layers have run, and `offered` more may run in this
    step. `whole` has a span a layer.
    """

    entry: PrefixEntry
    branch: CanvasState
    whole: Plan
    done: int = 0
    offered: int = 0

    def __post_init__(self) -> None:
        states = self.branch.states
        self.branch.restored = () if states is None else (Kept(0, states),)

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether its next piece can run."""

    @property
    def rows(self) -> int:
        """Positions of its canvas."""
        return len(self.branch.canvas)

    @property
    def piece(self) -> range:
        """The layers of the next piece."""
        return range(self.done, self.done + self.offered)

    @property
    def finished(self) -> bool:
        """Whether all layers have run."""
        return self.done == self.whole.layers

    def offer(self, row_layers: int | None) -> int:
        """Cut the next piece to `row_layers` (None: no limit), but never to less than a layer. Returns its cost."""
        self.offered = self.whole.layers - self.done
        if row_layers is not None:
            self.offered = min(self.offered, max(1, row_layers // self.rows))
        return self.offered * self.rows

    @property
    def plan(self) -> Plan:
        """The next piece: the whole pass, without live rows outside the piece's layers."""
        start, stop, layers = self.done, self.done + self.offered, self.whole.layers
        nothing = np.zeros(self.rows, dtype=np.bool_)
        # The whole has a span a layer. What the first one would keep is kept already: the rows restart from it.
        first, *others = self.whole.spans[start:stop]
        spans = [Span(range(start), nothing), replace(first, save=None), *others, Span(range(stop, layers), nothing)]
        return self.whole.over(span for span in spans if len(span.layers))

    def advance(self) -> None:
        """Note that the piece has run."""
        self.done += self.offered
        self.offered = 0


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixPass(SidePass):
    """The prefix-only pass of a store entry, whose hidden states are kept in the entry."""

    @property
    def ready(self) -> bool:
        """Always."""
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class AuditPass(SidePass):
    """A pass over the whole canvas of a request at its first step, without any cache, to measure what its prefix bears.

    Attributes:
        lease: keeps the entry that the prefix's K and V are compared with.
        extent: pages of the canvas, its own.
        ratio: the request's prefix ratio in percent.
        awaited_by: the request that begins when its depth is known; None where the request runs.
    """

    lease: Lease
    extent: PageRange
    ratio: int
    awaited_by: PendingRequest | None = None

    @property
    def ready(self) -> bool:
        """Whether the prefix-only pass is done: only then there is something to compare with."""
        return self.entry.ready


def keep_leaving_states(batch: StepBatch, passes: Sequence[SidePass]) -> StepBatch:
    """`batch` with the states kept that leave the pieces of `passes`, and without the stages that have no rows.

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


def _leaving(layers: range, passes: Sequence[SidePass]) -> tuple[Save, ...]:
    """The states to keep of rows that leave `layers`, where pieces end there."""
    saves, at = [], 0
    for work in passes:
        if layers.start not in work.piece:
            continue
        rows = slice(at, at + work.rows)
        at = rows.stop
        if layers.stop == work.piece.stop < work.whole.layers:
            assert work.branch.states is not None
            saves.append(Save(rows, work.branch.states[layers.stop - 1], slice(None)))
    return tuple(saves)

"""The pass that computes a shared prefix for all requests that lease it.

It runs in pieces of some layers, so that a long prefix does not hold up what runs.
"""

from dataclasses import replace

import numpy as np

from remask.engine.canvas_state import CanvasState, Move, prefix_canvas
from remask.engine.member import CanvasPlans, EngineStats, Member, Reads, Scores, Tally, Turn
from remask.engine.running import RunningRequest
from remask.plan.spans import Span
from remask.readers.base import Reader
from remask.request.result import Event
from remask.store.entries import PrefixEntry
from remask.store.prefix import Lease, PrefixStore

_NOWHERE = np.empty(0, dtype=np.int64)


class PrefixPass(Member):
    """The prefix-only pass of an entry of a store, which runs some layers at a time, so as not to hold up what runs.

    The hidden states that leave the last layer of a piece are kept in the entry, like every boundary state. The next
    piece restarts from them, so the pieces compute the same as one pass.

    Attributes:
        layers: those that have run.
        piece: those that run next.
    """

    place = 0, "", (0, 0)
    ready = True
    cheapest: int | None = None
    readers: tuple[Reader, ...] = ()
    foreseeable = False

    def __init__(self, entry: PrefixEntry, store: PrefixStore, layers: int, cause: RunningRequest) -> None:
        """The pass over `entry` on a model of `layers`, on behalf of the request `cause` and under its adapter."""
        self.entry, self.store, self.id, self.owner = entry, store, cause.id, cause.owner
        self.usage = cause.record.usage
        state, self._whole = prefix_canvas(entry, layers, cause.request.adapter)
        state.restored = entry.states
        self.canvases: tuple[CanvasState, ...] = (state,)
        self.turn: Turn | None = None
        self.done = self.ended = False
        self.layers, self.piece = range(0), range(layers)

    @classmethod
    def of(cls, lease: Lease, store: PrefixStore, layers: int, cause: RunningRequest) -> "PrefixPass | None":
        """The pass over the new entry of `lease`; None where the entry was stored already."""
        return None if lease.hit or lease.entry.ready else cls(lease.entry, store, layers, cause)

    @property
    def rows(self) -> int:
        """Positions of its canvas."""
        return len(self.canvases[0].canvas)

    def plan(self) -> Turn:
        self.piece = range(self.layers.stop, self._whole.layers)
        self.turn = Turn(self, (), self.tally(()), None, _NOWHERE)
        return self.turn

    def fit(self, turn: Turn, row_layers: int) -> None:
        most = max(1, row_layers // self.rows)  # never less than a layer
        self.piece = range(self.layers.stop, min(self._whole.layers, self.layers.stop + most))
        turn.tally = self.tally(())

    def begin(self, turn: Turn) -> Move | None:
        state, start, stop, layers = self.canvases[0], self.piece.start, self.piece.stop, self._whole.layers
        nothing = np.zeros(self.rows, dtype=np.bool_)
        # The whole pass, which has one span a layer, without live rows outside of the piece. What the first span would
        # keep is kept: the rows restart from it.
        first, *others = self._whole.spans[start:stop]
        spans = [Span(range(start), nothing), replace(first, save=None), *others, Span(range(stop, layers), nothing)]
        turn.items = ((state, self._whole.over(span for span in spans if len(span.layers))),)
        state.leaves = stop if stop < layers else None
        return None

    def tally(self, items: CanvasPlans) -> Tally:  # noqa: ARG002
        return Tally(len(self.piece) * self.rows, self.rows, forwards=0)

    def reads(self, turn: Turn) -> Reads:  # noqa: ARG002
        return ()

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:  # noqa: ARG002
        self.turn = None  # which refers to this pass: what it holds is free without the garbage collector
        stats.prefix_row_layers += turn.tally.cost
        self.usage.prefix_row_layers += turn.tally.cost
        self.layers = range(self.piece.stop)
        if self.layers.stop == self._whole.layers:
            self.store.publish(self.entry)
            stats.prefix_passes += 1
            self.done = True
        return []

"""The pass that computes a shared prefix for all requests that lease it."""

from dataclasses import replace

import numpy as np

from remask.engine.canvas_state import CanvasState, Move, prefix_canvas
from remask.engine.member import CanvasPlans, DeviceReads, EngineStats, Member, Scores, Tally, Turn
from remask.engine.running import RunningRequest
from remask.plan.spans import Span
from remask.readers.base import Reader
from remask.request.result import Event
from remask.store.entries import PrefixEntry
from remask.store.prefix import PrefixStore

_NO_POSITIONS = np.empty(0, dtype=np.int64)


class PrefixPass(Member):
    """The prefix-only pass of an entry of a store. It runs some layers at a time, so as not to delay running requests.

    The hidden states that leave the last layer of a chunk are kept in the entry, like every boundary state. The next
    chunk restarts from them, so the chunks compute the same as one pass.

    Attributes:
        layers: those that have run.
        chunk: those that run next.
    """

    sort_key = 0, "", (0, 0)
    ready = True
    min_cost: int | None = None
    opening_step: int | None = None
    readers: tuple[Reader, ...] = ()
    foreseeable = False

    def __init__(self, entry: PrefixEntry, store: PrefixStore, layers: int, running: RunningRequest) -> None:
        """The pass over `entry` on a model of `layers`, on behalf of `running` and under its adapter."""
        self.entry = entry
        self.store = store
        self.id = running.id
        self.owner = running.owner
        self.usage = running.record.usage
        state, self._full_plan = prefix_canvas(entry, layers, running.request.adapter)
        self.canvases: tuple[CanvasState, ...] = (state,)
        self.turn: Turn | None = None
        self.is_done = False
        self.ended = False
        self.layers = range(0)
        self.chunk = range(layers)

    @property
    def row_count(self) -> int:
        """Number of positions of its canvas."""
        return len(self.canvases[0].canvas)

    def plan(self) -> Turn:
        self.chunk = range(self.layers.stop, self._full_plan.layers)
        self.turn = Turn(self, items=(), tally=self.tally(()), decoder=None, predicted=_NO_POSITIONS)
        return self.turn

    def fit(self, turn: Turn, row_layers: int) -> None:
        count = max(1, row_layers // self.row_count)  # at least one layer
        self.chunk = range(self.layers.stop, min(self._full_plan.layers, self.layers.stop + count))
        turn.tally = self.tally(())

    def begin(self, turn: Turn) -> Move | None:
        """Set the turn's plan, whose rows are live in the chunk alone. It enters no ledger, and no K/V are copied."""
        state, layers = self.canvases[0], self._full_plan.layers
        start, stop = self.chunk.start, self.chunk.stop
        no_rows = np.zeros(self.row_count, dtype=np.bool_)
        # The full plan has one span a layer. The chunk's first span saves nothing, as its rows restart from the states
        # that the last chunk has saved.
        first, *others = self._full_plan.spans[start:stop]
        spans = [Span(range(start), no_rows), replace(first, save=None), *others, Span(range(stop, layers), no_rows)]
        turn.items = ((state, self._full_plan.over(span for span in spans if len(span.layers))),)
        state.stop_layer = stop if stop < layers else None
        return None

    def tally(self, items: CanvasPlans) -> Tally:  # noqa: ARG002
        return Tally(len(self.chunk) * self.row_count, self.row_count, forwards=0)

    def device_reads(self, turn: Turn) -> DeviceReads:  # noqa: ARG002
        return ()

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:  # noqa: ARG002
        self.turn = None  # breaks a reference cycle, so memory is freed without the garbage collector
        stats.prefix_row_layers += turn.tally.cost
        self.usage.prefix_row_layers += turn.tally.cost
        self.layers = range(self.chunk.stop)
        if self.layers.stop == self._full_plan.layers:
            self.store.publish(self.entry)
            stats.prefix_passes += 1
            self.is_done = True
        return []

"""The members of passes, their turns in a pass, and the engine's counters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.canvas_state import CanvasState, Move
from remask.engine.request import Owner
from remask.plan.plan import Plan
from remask.plan.spans import Mask, Positions
from remask.readers.base import Reader
from remask.request.result import Event
from remask.sampling.decoder import Decoder, Transfers
from remask.sampling.rows import DeviceRead


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    steps: int = 0
    step_seconds: float = 0.0  # within `step`
    step_cpu_seconds: float = 0.0  # CPU time of the calling thread within `step`, without helper threads
    row_layers: int = 0
    row_layers_saved: int = 0  # row-layers of canvases in passes that were not computed
    prefix_passes: int = 0
    prefix_row_layers: int = 0
    refreshes: int = 0  # passes that filled or renewed the cache of their policy
    prefix_refreshes: int = 0  # passes in which rows of a leased prefix were computed anew
    peak_memory_bytes: int = 0  # largest size of K/V pages in use and hidden states, as sampled before writing
    audits: int = 0  # requests whose predictions were compared with exact ones
    failed_audits: int = 0
    audit_row_layers: int = 0
    recoveries: int = 0  # restarts with empty memory
    queued_passes: int = 0  # passes that were queued before the previous one was read
    waited_passes: int = 0  # with `overlap`, passes that were read before the next one could be planned
    discarded_passes: int = 0  # speculative steps of requests that were not confirmed


CanvasPlans: TypeAlias = tuple[tuple[CanvasState, Plan], ...]

DeviceReads: TypeAlias = tuple[tuple[Reader, DeviceRead], ...]
"""The readers of a request with their device parts, for one pass."""
ReaderNumbers: TypeAlias = tuple[Reader, NDArray[np.float32]]
"""A reader with its numbers, float32 [width, predicted]."""


class Scores(NamedTuple):
    """Tokens, confidences and readers' numbers of the predicted positions of one request."""

    tokens: NDArray[np.int64]  # int64 [predicted]
    confidence: NDArray[np.float32]  # float32 [predicted]
    reader_numbers: tuple[ReaderNumbers, ...] = ()
    # The positions that the device has transferred, bool [predicted]; None if the host chooses them
    transfer: NDArray[np.bool_] | None = None

    def select(self, index: slice | Mask) -> "Scores":
        """The scores of some of the predicted positions, a slice or bool [predicted]."""
        transfer = None if self.transfer is None else self.transfer[index]
        reader_numbers = tuple((reader, numbers[:, index]) for reader, numbers in self.reader_numbers)
        return Scores(self.tokens[index], self.confidence[index], reader_numbers, transfer)


@dataclass(frozen=True, slots=True)
class Tally:
    """The cost of a turn."""

    cost: int  # row-layers that it computes
    max_rows: int  # the largest number of rows in any layer
    forwards: int = 1  # passes in `Usage.forwards`; 0 for a prefix pass
    row_layers_saved: int = 0  # row-layers of its canvases that it does not compute
    refreshes: bool = False  # it fills or renews the policy's cache, on any of its canvases
    refreshes_prefix: bool = False  # it computes rows of the leased prefix, above the boundary


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of a member in one pass, from its plan until its results are written."""

    member: "Member"
    items: CanvasPlans  # its canvases that take part, each with its plan
    tally: Tally
    decoder: Decoder | None  # at the step of the pass; None for a prefix pass, which has no results
    predicted: Positions  # the predicted positions, int64
    device_reads: DeviceReads = ()
    error: Exception | None = None  # why it could not run
    # Final hidden states of its predicted rows, [predicted, D], if an audit may compare them
    hidden: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """Its plan; for a guided request that of the conditional canvas."""
        return self.items[0][1]

    @property
    def transfers(self) -> Transfers | None:
        """The positions to transfer, or the rule by which the device ranks them; None if the host chooses them."""
        if not self.member.foreseeable or self.decoder is None:
            return None
        plan = self.plan
        if plan.fills:
            return plan.predicted[:0]
        transfers = self.decoder.transfers
        if transfers is None or plan.transfer is None:
            return transfers
        return plan.transfer.nonzero()[0]

    def revise(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """Replace its plans, which layer hooks and repeats after a failure may change."""
        self.items = tuple(items)
        self.tally = self.member.tally(self.items)


class Member(Protocol):
    """Takes part in passes until it is done: a request, or the pass over a shared prefix.

    In each step the engine calls `plan` of the members that are `ready`. Those that fit into the pass `begin` their
    turns, the pass runs, and each gets its results by `write`.
    """

    id: str  # of the request; for a prefix pass, of the request that caused it
    owner: Owner  # the client and body that it belongs to, for fair turns
    canvases: tuple[CanvasState, ...]
    # Order of the members in a pass: prefix passes come first, and members with the same adapter or prefix are adjacent
    sort_key: tuple[int, str, tuple[int, int]]
    turn: Turn | None  # its next turn, once that is planned
    readers: tuple[Reader, ...]
    # Whether the device may choose its positions, and its next pass may be planned before the last one is read
    foreseeable: bool
    ready: bool  # all K/V that it reads are computed
    is_done: bool  # it cannot be planned again until `Lifecycle.finish_member` has handled it
    ended: bool  # it has left the engine, and its memory is free
    min_cost: int | None  # row-layers of its cheapest pass so far; None before the first
    # Its first step that runs a pass, later than 0 if idle steps are skipped; None of a canvas that has grown
    opening_step: int | None

    def plan(self) -> Turn:
        """Its next turn, which is the same object until the turn is written or discarded."""
        ...

    def fit(self, turn: Turn, row_layers: int) -> None:
        """Cut the turn to `row_layers` if it can be cut. It may still cost more."""
        ...

    def begin(self, turn: Turn) -> Move | None:
        """Enter the plans of the turn into the ledgers. Raises `PlanError` on a plan that cannot run.

        Returns the stored K/V that must be copied before its first pass; None in later passes, or if none must.
        """
        ...

    def tally(self, items: CanvasPlans) -> Tally:
        """The cost of a turn over `items`."""
        ...

    def device_reads(self, turn: Turn) -> DeviceReads:
        """The device parts of its readers for the turn."""
        ...

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:
        """End the turn with its results `scores`, and add its cost to `stats`. Returns the events to report."""
        ...

"""What takes part in passes: a `Member`, and its `Turn` in one of them. What they are counted in."""

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
    peak_memory_bytes: int = 0  # most K/V pages in use and hidden states held, as sampled before writing
    audits: int = 0  # requests whose predictions were compared with exact ones
    failed_audits: int = 0
    audit_row_layers: int = 0
    recoveries: int = 0  # restarts with empty memory
    queued_passes: int = 0  # passes that were queued before the one before them was read
    waited_passes: int = 0  # with `overlap`, passes that were read before the next one could be planned
    discarded_passes: int = 0  # speculative steps of requests that were not confirmed


CanvasPlans: TypeAlias = tuple[tuple[CanvasState, Plan], ...]

Reads: TypeAlias = tuple[tuple[Reader, DeviceRead], ...]
"""The readers of a request with their device parts, for one pass."""
Share: TypeAlias = tuple[Reader, NDArray[np.float32]]  # a reader with its numbers, [width, predicted]


class Scores(NamedTuple):
    """Tokens, confidences and readers' numbers of the predicted positions of one request."""

    tokens: NDArray[np.int64]  # int64 [predicted]
    confidence: NDArray[np.float32]  # float32 [predicted]
    shares: tuple[Share, ...] = ()  # the numbers of its readers
    # The positions that the device has transferred, bool [predicted]; None: the host chooses
    chosen: NDArray[np.bool_] | None = None

    def of(self, some: slice | Mask) -> "Scores":
        """Those of `some` of the positions."""
        chosen = None if self.chosen is None else self.chosen[some]
        shares = tuple((reader, numbers[:, some]) for reader, numbers in self.shares)
        return Scores(self.tokens[some], self.confidence[some], shares, chosen)


@dataclass(frozen=True, slots=True)
class Tally:
    """What a turn costs."""

    cost: int  # row-layers that it computes
    rows: int  # the largest number of rows in any layer
    forwards: int = 1  # passes in `Usage.forwards`; 0 of what counts as no pass of a request
    saved: int = 0  # row-layers of its canvases that it does not compute
    refreshes: bool = False  # it fills or renews the policy's cache, on any of its canvases
    refreshes_prefix: bool = False  # it computes rows of the leased prefix, above the boundary


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of a member in one pass, from its plan until what was read is written."""

    member: "Member"  # whose turn it is
    items: CanvasPlans  # its canvases that take part, each with its plan
    tally: Tally  # what it costs
    decoder: Decoder | None  # the decoder, at the step of the pass; None of a prefix pass, of which nothing is read
    predicted: Positions  # the positions whose rows are read, int64
    reads: Reads = ()  # the device parts of its readers
    error: Exception | None = None  # why it could not run
    # Final hidden states of its predicted rows, [predicted, D], where an audit compares them
    hidden: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """Of a guided request the conditional canvas' plan."""
        return self.items[0][1]

    @property
    def transfers(self) -> Transfers | None:
        """The positions that it transfers, or how they are ranked; None where the host must choose."""
        if not self.member.foreseeable or self.decoder is None:
            return None
        plan = self.plan
        if plan.fills:
            return plan.predicted[:0]
        known = self.decoder.transfers
        return known if known is None or plan.transfer is None else plan.transfer.nonzero()[0]

    def revise(self, items: Sequence[tuple[CanvasState, Plan]]) -> None:
        """Replace its plans: layer hooks and repeats after a failure may change them."""
        self.items = tuple(items)
        self.tally = self.member.tally(self.items)


class Member(Protocol):
    """Takes part in passes until it is done: a request, or the pass over a shared prefix.

    In each step the engine asks the members that are `ready` to `plan`. Those that fit `begin` their turns, the pass
    runs, and each is given what was read of it to `write`.
    """

    id: str  # of the request, or of the one that caused a prefix pass
    owner: Owner  # the client and body that it belongs to, for fair turns
    canvases: tuple[CanvasState, ...]
    # Members of a pass stand in this order: prefix passes, then neighbours that share an adapter or a prefix
    place: tuple[int, str, tuple[int, int]]
    turn: Turn | None  # its next turn, once that is planned
    readers: tuple[Reader, ...]
    # The device may choose its positions, and its next pass may be planned before the last one is read
    foreseeable: bool
    ready: bool  # all K/V that it reads are computed
    done: bool  # nothing is left to plan before the engine has taken note of what was written
    ended: bool  # it has left the engine, and its memory is free
    cheapest: int | None  # row-layers of its cheapest pass so far; None before the first

    def plan(self) -> Turn:
        """Its next turn. It is planned once, however many steps it waits."""
        ...

    def fit(self, turn: Turn, row_layers: int) -> None:
        """Cut the turn to `row_layers` where it can be cut. It may still cost more."""
        ...

    def begin(self, turn: Turn) -> Move | None:
        """Enter the plans of the turn into the ledgers. Raises `PlanError` on a plan that cannot run.

        Returns the stored K/V that must be copied before the pass, once; None: none.
        """
        ...

    def tally(self, items: CanvasPlans) -> Tally:
        """What a turn over `items` costs."""
        ...

    def reads(self, turn: Turn) -> Reads:
        """The device parts of its readers for the turn."""
        ...

    def write(self, turn: Turn, scores: Scores, stats: EngineStats) -> list[Event]:
        """End the turn with what was read of it, and count it in `stats`. Returns what there is to report."""
        ...

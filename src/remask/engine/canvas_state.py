"""One canvas on the device: its K/V slots per layer, its ledger and its step clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import PlanError
from remask.model.runs import runs
from remask.model.stage import Run
from remask.plan.canvas import Canvas
from remask.plan.ledger import Ledger
from remask.plan.pass_cost import ExecutedPlan
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Positions, Span, SpanMemo
from remask.store.entry import PrefixEntry
from remask.store.pages import PageRange
from remask.store.prefix import Lease

_NOWHERE: Positions = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The K/V slots of a canvas in a range of layers: a shared part that is read in place, then its own slots."""

    layers: range
    slots: NDArray[np.int64]  # [T]
    common: tuple[Run, ...]  # slots of the shared part at the front; empty without one
    own: NDArray[np.int64]  # slots of the positions after it


@dataclass(frozen=True, slots=True)
class Kept:
    """Hidden states of consecutive positions of a canvas.

    Attributes:
        start: the first of the positions.
        states: [layers - 1, positions, D]; index l holds the states that leave layer l.
    """

    start: int
    states: Tensor

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.states.shape[1]


@dataclass(frozen=True, slots=True)
class Move:
    """K/V of a stored part that a canvas needs at other positions than where it was computed.

    Attributes:
        source: slots of the store, [positions].
        target: slots of the canvas, [positions].
        layers: K/V of layers 0 .. layers - 1 are copied.
        by: the distance that the part moves, in positions.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    layers: int
    by: int


@dataclass(slots=True)
class CanvasState:
    """A canvas with its memory on the device. A guided request has two, every other request has one.

    `Span.save` puts hidden states into `states`, [layers - 1, T, D]; index l holds the states that leave layer l. Rows
    restart from `restored`, which stand in ascending order.
    """

    canvas: Canvas
    ledger: Ledger
    tables: tuple[SlotTable, ...]
    lease: Lease | None = None  # of the shared part at its front
    restored: tuple[Kept, ...] = ()
    states: Tensor | None = None
    shift: int = 0
    outputs: bool = False  # attention and FFN outputs are cached too
    prefix: PrefixHit | None = None  # positions that it reads from the store
    chain: int = 0  # hash of the last exact page that it shares
    hook_state: Any = None  # kept between passes by the policy's layer hook
    hook_output: Any = None  # what the hook reports to the policy
    memo: SpanMemo = field(default_factory=SpanMemo)  # spans of its recent plans
    _unsent: list[Positions] | None = None  # changed since they were sent; None: never sent
    sharing: tuple[int, int] = field(init=False)  # equal for branches that read the same shared prefix in place

    def __post_init__(self) -> None:
        self.sharing = (-1 if self.lease is None else self.lease.entry.key), self.chain

    def slots(self, layer: int) -> NDArray[np.int64]:
        """Its K/V slots in `layer`, [T]."""
        return self.table(layer).slots

    def table(self, layer: int) -> SlotTable:
        """The table that holds its slots in `layer`."""
        return next(table for table in self.tables if layer in table.layers)

    @property
    def places(self) -> NDArray[np.int64]:
        """Places of its tokens in the device token buffer, [T]."""
        return self.table(0).slots

    def changed(self, positions: Positions) -> None:
        """Note that the host has changed tokens or noisy flags."""
        if self._unsent is not None and len(positions):
            self._unsent.append(positions)

    def unsent(self) -> Positions:
        """The positions that differ in the device token buffer."""
        if self._unsent is None:
            return np.arange(len(self.canvas))
        return np.unique(np.concatenate(self._unsent)) if self._unsent else _NOWHERE

    def sent(self) -> None:
        """Note that the device token buffer is up to date."""
        self._unsent = []

    @property
    def extra_bytes(self) -> int:
        """Bytes that it holds in addition to its pages."""
        return 0 if self.states is None else self.states.nbytes

    def passed(self, plan: Plan, separately: bool) -> ExecutedPlan:
        """Its part in the pass of `plan`, the last plan in its ledger, as input to the cost of the pass.

        With `separately` every canvas is attended to by itself, and reads all of a shared prefix.
        """
        prefix = None if separately else self.prefix
        return ExecutedPlan(plan, prefix, self.sharing, self.outputs)

    def admit(self, plan: Plan) -> None:
        """Enter `plan` into the ledger as the next pass. Raises `PlanError`, and enters nothing, on a bad plan."""
        if plan.again:  # it predicts a subset of what the last plan did
            self.ledger.enter(plan)
            return
        plan.check(len(self.canvas))
        predicted = plan.predicted
        if np.count_nonzero(self.canvas.noisy[predicted]) < len(predicted):
            raise PlanError("positions are predicted that are already final")
        if self.states is None and plan.spans.saves:
            raise PlanError("hidden states cannot be kept of a canvas that has no room for them")
        hook = plan.hook
        if self.states is None and hook is not None and hook.revives:
            raise PlanError("the plan's hook may make all rows live, on a canvas that keeps no inputs to its layers")
        if not self.outputs and (plan.spans.adds_outputs or (hook is not None and hook.adds_outputs)):
            raise PlanError("rows add cached outputs on a canvas that keeps none")
        rows = predicting_rows(predicted, self.shift)
        if not plan.spans[-1].live(rows):
            (at, *_) = np.flatnonzero(~plan.spans[-1].rows[rows])
            shifted = f", as a row of this model predicts the position {self.shift} further on" if self.shift else ""
            raise PlanError(
                f"row {rows[at]} should predict position {predicted[at]}{shifted}, but is not live in the last layer; "
                "compute it there, or leave the position out of `predict`"
            )
        self.ledger.enter(plan)


def predicting_rows(predicted: Positions, shift: int) -> Positions:
    """The rows whose logits belong to the positions `predicted`, in their order: position p is read at p - shift."""
    return np.maximum(predicted - shift, 0) if shift else predicted


def leased_tables(lease: Lease, own: Sequence[PageRange]) -> tuple[SlotTable, ...]:
    """Tables of a canvas that leases its prefix; `own`: pages of the rest in the leased layers, then of all above."""
    shared, rest = lease.entry.extent.slots(), own[0].slots()
    shallow = SlotTable(range(lease.layers), np.concatenate([shared, rest]), tuple(runs(shared)), rest)
    return (shallow, *(plain_table(extent) for extent in own[1:]))


def shared_table(pages: Sequence[PageRange], own: PageRange) -> SlotTable:
    """The table of a canvas that begins with shared pages, in all layers; `own` holds the rest."""
    shared, rest = np.concatenate([page.slots() for page in pages]), own.slots()
    return SlotTable(own.layers, np.concatenate([shared, rest]), tuple(runs(shared)), rest)


def plain_table(extent: PageRange) -> SlotTable:
    """The table of an extent that holds a whole canvas."""
    slots = extent.slots()
    return SlotTable(extent.layers, slots, (), slots)


def prefix_canvas(entry: PrefixEntry, layers: int) -> tuple[CanvasState, Plan]:
    """The prefix-only pass of a store entry: its canvas is the prefix alone, and every layer's output is kept."""
    canvas = Canvas(entry.tokens, (), 0)
    rows = np.ones(len(canvas), dtype=np.bool_)
    spans = tuple(Span(range(i, i + 1), rows, save=rows if i else None) for i in range(layers))
    branch = CanvasState(canvas, Ledger(layers, len(canvas), None), (plain_table(entry.extent),), states=entry.states)
    return branch, Plan(spans=spans, predict=np.zeros(len(canvas), dtype=np.bool_))


def new_states(layers: int, hidden: int, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    """Room for the hidden states leaving all layers but the last, [layers - 1, tokens, hidden]."""
    return torch.empty((layers - 1, tokens, hidden), dtype=dtype, device=device)

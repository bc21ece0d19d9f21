"""One canvas on the device: K/V slots per layer, ledger, saved hidden states. The device buffer of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import PlanError
from remask.model.stage import Index, Run, runs
from remask.plan.canvas import Canvas, Ledger
from remask.plan.pass_cost import ExecutedPlan
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Positions, Span, SpanMemo
from remask.sampling.choice import Candidates, RowChoice
from remask.store.entries import PrefixEntry
from remask.store.pages import Extent
from remask.store.prefix import Lease

_NO_POSITIONS: Positions = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The K/V slots of a canvas in a range of layers: those of a shared prefix, which is read in place, then others."""

    layers: range
    slots: NDArray[np.int64]  # [T]
    prefix_runs: tuple[Run, ...]  # slots of the shared prefix; empty without one
    private_slots: NDArray[np.int64]  # slots of the positions after it


@dataclass(frozen=True, slots=True)
class Move:
    """Stored K/V to be copied to a canvas."""

    source: NDArray[np.int64]  # slots of the store, [positions]
    target: NDArray[np.int64]  # slots of the canvas, [positions]
    layers: int  # K/V of layers 0 .. layers - 1 are copied


@dataclass(slots=True)
class CanvasState:
    """A canvas with its memory on the device. A guided request has two, every other request has one.

    `Span.save` writes hidden states to `states`, [layers - 1, T, D]; index l holds the states that leave layer l. Rows
    restart from `restore_states`, which has the same layout and may hold leading positions alone.
    """

    canvas: Canvas
    ledger: Ledger
    tables: tuple[SlotTable, ...]
    lease: Lease | None = None  # of the prefix that it reads in place
    restore_states: Tensor | None = None
    states: Tensor | None = None
    shift: int = 0  # row p - shift predicts position p
    routing_block: int = 1  # rows of a block whose experts are chosen together, so that a pass computes all or none
    adapter: str | None = None  # that its rows are computed with
    keeps_outputs: bool = False  # attention and FFN outputs are cached too
    conditioned: bool = False  # self-conditioning: denoised rows take in their last prediction
    stop_layer: int | None = None  # the pass ends before this layer, where the next one restarts
    prefix: PrefixHit | None = None  # positions that it reads from the store
    page_key: int = 0  # of the last exact page that it shares; 0 without one
    hook_state: Any = None  # kept between passes by the policy's layer hook
    hook_output: Any = None  # what the hook reports to the policy
    memo: SpanMemo = field(default_factory=SpanMemo)  # spans of its recent plans
    unsent: list[Positions] | None = None  # positions that the host has changed since it sent them; None: never sent
    sharing_key: tuple[int, int] = field(init=False)  # equal for canvases that read the same shared prefix in place
    buffer_slots: NDArray[np.int64] = field(init=False)  # of its tokens in `TokenBuffer`, [T]: its K/V slots in layer 0

    def __post_init__(self) -> None:
        prefix_key = -1 if self.lease is None else self.lease.entry.key
        self.sharing_key = prefix_key, self.page_key
        self.buffer_slots = self.table(0).slots

    def slots(self, layer: int) -> NDArray[np.int64]:
        """Its K/V slots in `layer`, [T]."""
        return self.table(layer).slots

    def table(self, layer: int) -> SlotTable:
        """The table that holds its slots in `layer`."""
        return next(table for table in self.tables if layer in table.layers)

    def unsent_positions(self) -> Positions:
        """The positions whose tokens in the device token buffer are out of date."""
        if self.unsent is None:
            return np.arange(len(self.canvas))
        return np.unique(np.concatenate(self.unsent)) if self.unsent else _NO_POSITIONS

    def mark_sent(self) -> None:
        """Note that the device token buffer is up to date."""
        self.unsent = []

    @property
    def extra_bytes(self) -> int:
        """Bytes that it takes in addition to its pages."""
        return 0 if self.states is None else self.states.nbytes

    def executed_plan(self, plan: Plan, separate: bool) -> ExecutedPlan:
        """`plan`, which ran last, for `pass_cost`. If `separate`, a shared prefix is read by each canvas for itself."""
        prefix = None if separate else self.prefix
        noisy_count = int(self.canvas.noisy[plan.spans[0].positions].sum())
        return ExecutedPlan(plan, prefix, self.sharing_key, self.keeps_outputs, noisy_count)

    def enter(self, plan: Plan) -> None:
        """Enter `plan` into the ledger as the next pass. Raises `PlanError`, and enters nothing, on a bad plan."""
        plan.check(len(self.canvas))
        if self.routing_block > 1:
            self._check_routing_blocks(plan)
        predicted = plan.predicted
        if np.count_nonzero(self.canvas.noisy[predicted]) < len(predicted):
            raise PlanError("positions are predicted that are already final")
        if self.states is None and plan.spans.saves:
            raise PlanError("hidden states cannot be kept of a canvas that has no room for them")
        hook = plan.hook
        if self.states is None and hook is not None and hook.revives:
            raise PlanError("the plan's hook may make all rows live, on a canvas that keeps no inputs to its layers")
        if not self.keeps_outputs and (plan.spans.adds_outputs or (hook is not None and hook.adds_outputs)):
            raise PlanError("rows add cached outputs on a canvas that keeps none")
        rows = predicting_rows(predicted, self.shift)
        if not plan.spans[-1].live(rows):
            (index, *_) = np.flatnonzero(~plan.spans[-1].rows[rows])
            shifted = f", as a row of this model predicts the position {self.shift} further on" if self.shift else ""
            raise PlanError(
                f"row {rows[index]} should predict position {predicted[index]}{shifted}, but is not live in the last "
                "layer; compute it there, or leave the position out of `predict`"
            )
        self.ledger.enter(plan)

    def _check_routing_blocks(self, plan: Plan) -> None:
        """Raise `PlanError` if some rows of a routing block are computed and others are not."""
        for span in plan.spans:
            if span.pick is None and not len(span.rows) % self.routing_block:
                blocks = span.computed.reshape(-1, self.routing_block)
                if (blocks.all(axis=1) == blocks.any(axis=1)).all():
                    continue
            raise PlanError(
                f"rows of this model choose experts in blocks of {self.routing_block}, so a pass computes all rows of "
                "such a block or none of them"
            )


def predicting_rows(predicted: Positions, shift: int) -> Positions:
    """The rows that predict the positions `predicted`, in their order: row p - shift predicts position p."""
    return np.maximum(predicted - shift, 0) if shift else predicted


def leased_tables(lease: Lease, extents: Sequence[Extent]) -> tuple[SlotTable, ...]:
    """The tables of a canvas that leases its prefix.

    The first of `extents` holds the other positions in the leased layers. The others hold all positions in the layers
    above.
    """
    return (shared_table([lease.extent], extents[0]), *(plain_table(extent) for extent in extents[1:]))


def shared_table(pages: Sequence[Extent], extent: Extent) -> SlotTable:
    """The table of a canvas that begins with shared pages; `extent` holds the other positions."""
    shared, private = np.concatenate([page.slots() for page in pages]), extent.slots()
    slots = np.concatenate([shared, private])
    return SlotTable(extent.layers, slots, prefix_runs=tuple(runs(shared)), private_slots=private)


def plain_table(extent: Extent) -> SlotTable:
    """The table of an extent that holds a whole canvas."""
    slots = extent.slots()
    return SlotTable(extent.layers, slots, prefix_runs=(), private_slots=slots)


def prefix_canvas(entry: PrefixEntry, layers: int, adapter: str | None = None) -> tuple[CanvasState, Plan]:
    """The canvas and plan of the prefix-only pass of a store entry, which saves the output of every layer but the last.

    Its canvas is the prefix alone, and it predicts nothing.
    """
    canvas = Canvas(entry.tokens, (), 0)
    rows = np.ones(len(canvas), dtype=np.bool_)
    spans = tuple(Span(range(layer, layer + 1), rows, save=rows if layer else None) for layer in range(layers))
    state = CanvasState(
        canvas,
        Ledger(layers, len(canvas), None),
        (plain_table(entry.extent),),
        restore_states=entry.states,
        states=entry.states,
        adapter=adapter,
    )
    return state, Plan(spans=spans, predict=np.zeros(len(canvas), dtype=np.bool_))


def allocate_states(layers: int, hidden: int, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
    """An uninitialized tensor for the hidden states leaving all layers but the last, [layers - 1, length, hidden]."""
    return torch.empty((layers - 1, length, hidden), dtype=dtype, device=device)


class TokenBuffer:
    """Tokens and noisy flags on the device, addressed like K/V slots of the first layer, so prefixes are shared too.

    Changes of the host are sent with the next pass. Tokens that the device chooses are written here at once, and the
    host reads them later.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # 2 * token + 1 if it is noisy; -2 before there is a token. Nobody reads the extra last value.
        self.values = torch.full((slots + 1,), -2, dtype=torch.int64, device=device)

    def pending_changes(self, states: Sequence[CanvasState]) -> tuple[Index, Index]:
        """Unsent changes of `states`: buffer slots and their new values, int64 [n] each."""
        slots = [np.empty(0, dtype=np.int64)]
        values = [np.empty(0, dtype=np.int64)]
        for state in states:
            positions = state.unsent_positions()
            if len(positions):
                slots.append(state.buffer_slots[positions])
                values.append(2 * state.canvas.tokens[positions] + state.canvas.noisy[positions])
        return np.concatenate(slots), np.concatenate(values)

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Write values, int64 [n], to `slots`, int64 [n]. A repeated slot must have the same value each time."""
        if len(slots):
            self.values.index_copy_(0, slots, values)

    def tokens(self, slots: Tensor) -> Tensor:
        """The tokens in `slots`, int64 [n]."""
        return self.values[slots] >> 1

    @torch.inference_mode()
    def transfer(self, scores: Tensor, requests: Sequence[Candidates], *, kernels: bool = False) -> Tensor:
        """Choose the predicted positions that are transferred, and write their tokens to the buffer.

        Transferred positions become final, unless a rule may change them again; then the host decides when they are
        final. `kernels` says whether a Triton kernel chooses. `scores` [2 + n, R] are those of `runner.score_rows`.
        Returns them with one more row, which is 1 where a position was chosen and 0 elsewhere.
        """
        if not scores.shape[1] or all(request.choice is None for request in requests):
            return torch.cat((scores, torch.zeros_like(scores[:1])))
        choice = RowChoice.of(requests, len(self.values) - 1, scores.device)
        if kernels:
            from remask.sampling import kernels_triton

            if choice.max_rows <= kernels_triton.MAX_ROWS:
                return kernels_triton.transfer(choice, scores, self.values)
        return choice.transfer(scores, self.values)

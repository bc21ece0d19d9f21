"""One canvas on the device: K/V slots per layer, ledger, kept hidden states. The buffer of all tokens there."""

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
from remask.store.pages import PageRange
from remask.store.prefix import Lease

_NOWHERE: Positions = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The K/V slots of a canvas in a range of layers: a shared prefix that is read in place, then its own slots."""

    layers: range
    slots: NDArray[np.int64]  # [T]
    common: tuple[Run, ...]  # slots of the shared prefix; empty without one
    own: NDArray[np.int64]  # slots of the positions after it


@dataclass(frozen=True, slots=True)
class Move:
    """Stored K/V that a canvas needs a copy of."""

    source: NDArray[np.int64]  # slots of the store, [positions]
    target: NDArray[np.int64]  # slots of the canvas, [positions]
    layers: int  # K/V of layers 0 .. layers - 1 are copied


@dataclass(slots=True)
class CanvasState:
    """A canvas with its memory on the device. A guided request has two, every other request has one.

    `Span.save` puts hidden states into `states`, [layers - 1, T, D]; index l holds the states that leave layer l. Rows
    restart from `restored`, which has the same form and may hold leading positions alone.
    """

    canvas: Canvas
    ledger: Ledger
    tables: tuple[SlotTable, ...]
    lease: Lease | None = None  # of the prefix that it reads in place
    restored: Tensor | None = None
    states: Tensor | None = None
    shift: int = 0
    routing: int = 1  # of its rows passes compute whole blocks of so many, whose experts are chosen together
    adapter: str | None = None  # that its rows are computed with
    outputs: bool = False  # attention and FFN outputs are cached too
    conditioned: bool = False  # rows that are denoised take in what the last pass predicted of them
    leaves: int | None = None  # the pass ends after this many layers: the next one restarts from what leaves them
    prefix: PrefixHit | None = None  # positions that it reads from the store
    chain: int = 0  # hash of the last exact page that it shares
    hook_state: Any = None  # kept between passes by the policy's layer hook
    hook_output: Any = None  # what the hook reports to the policy
    memo: SpanMemo = field(default_factory=SpanMemo)  # spans of its recent plans
    unsent: list[Positions] | None = None  # changed by the host since they were sent; None: never sent
    sharing: tuple[int, int] = field(init=False)  # equal for canvases that read the same shared prefix in place
    places: NDArray[np.int64] = field(init=False)  # of its tokens in the device token buffer, [T]: slots of layer 0

    def __post_init__(self) -> None:
        self.sharing = (-1 if self.lease is None else self.lease.entry.key), self.chain
        self.places = self.table(0).slots

    def slots(self, layer: int) -> NDArray[np.int64]:
        """Its K/V slots in `layer`, [T]."""
        return self.table(layer).slots

    def table(self, layer: int) -> SlotTable:
        """The table that holds its slots in `layer`."""
        return next(table for table in self.tables if layer in table.layers)

    def outdated(self) -> Positions:
        """The positions that differ in the device token buffer."""
        if self.unsent is None:
            return np.arange(len(self.canvas))
        return np.unique(np.concatenate(self.unsent)) if self.unsent else _NOWHERE

    def sent(self) -> None:
        """Note that the device token buffer is up to date."""
        self.unsent = []

    @property
    def extra_bytes(self) -> int:
        """Bytes that it holds in addition to its pages."""
        return 0 if self.states is None else self.states.nbytes

    def passed(self, plan: Plan, separately: bool) -> ExecutedPlan:
        """Its part in the cost of the pass of `plan`, its last; `separately`: it reads a shared prefix alone."""
        prefix = None if separately else self.prefix
        noisy = int(self.canvas.noisy[plan.spans[0].positions].sum())
        return ExecutedPlan(plan, prefix, self.sharing, self.outputs, noisy)

    def enter(self, plan: Plan) -> None:
        """Enter `plan` into the ledger as the next pass. Raises `PlanError`, and enters nothing, on a bad plan."""
        plan.check(len(self.canvas))
        if self.routing > 1:
            self._check_whole_blocks(plan)
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

    def _check_whole_blocks(self, plan: Plan) -> None:
        """Raise `PlanError` where some rows of a routing block are computed and others are not."""
        for span in plan.spans:
            whole = span.pick is None and not len(span.rows) % self.routing
            if whole:
                blocks = span.computed.reshape(-1, self.routing)
                whole = bool((blocks.all(axis=1) == blocks.any(axis=1)).all())
            if not whole:
                raise PlanError(
                    f"rows of this model choose experts in blocks of {self.routing}, so a pass computes all rows of "
                    "such a block or none of them"
                )


def predicting_rows(predicted: Positions, shift: int) -> Positions:
    """The rows whose logits belong to the positions `predicted`, in their order: position p is read at p - shift."""
    return np.maximum(predicted - shift, 0) if shift else predicted


def leased_tables(lease: Lease, extents: Sequence[PageRange]) -> tuple[SlotTable, ...]:
    """Tables of a canvas that leases its prefix; `extents`: the rest in the leased layers, then all in those above."""
    shared, rest = lease.entry.extent.slots(), extents[0].slots()
    shallow = SlotTable(range(lease.layers), np.concatenate([shared, rest]), tuple(runs(shared)), rest)
    return (shallow, *(plain_table(extent) for extent in extents[1:]))


def shared_table(pages: Sequence[PageRange], extent: PageRange) -> SlotTable:
    """The table of a canvas that begins with shared pages, in all layers; `extent` holds the rest."""
    shared, rest = np.concatenate([page.slots() for page in pages]), extent.slots()
    return SlotTable(extent.layers, np.concatenate([shared, rest]), tuple(runs(shared)), rest)


def plain_table(extent: PageRange) -> SlotTable:
    """The table of an extent that holds a whole canvas."""
    slots = extent.slots()
    return SlotTable(extent.layers, slots, (), slots)


def prefix_canvas(entry: PrefixEntry, layers: int, adapter: str | None = None) -> tuple[CanvasState, Plan]:
    """The prefix-only pass of a store entry: its canvas is the prefix alone, and every layer's output is kept."""
    canvas = Canvas(entry.tokens, (), 0)
    rows = np.ones(len(canvas), dtype=np.bool_)
    spans = tuple(Span(range(i, i + 1), rows, save=rows if i else None) for i in range(layers))
    tables, ledger = (plain_table(entry.extent),), Ledger(layers, len(canvas), None)
    state = CanvasState(canvas, ledger, tables, states=entry.states, adapter=adapter)
    return state, Plan(spans=spans, predict=np.zeros(len(canvas), dtype=np.bool_))


def new_states(layers: int, hidden: int, dtype: torch.dtype, device: torch.device, tokens: int) -> Tensor:
    """Room for the hidden states leaving all layers but the last, [layers - 1, tokens, hidden]."""
    return torch.empty((layers - 1, tokens, hidden), dtype=dtype, device=device)


class TokenBuffer:
    """Tokens and noisy flags, addressed like K/V slots of the first layer, so shared prefixes are shared here too.

    Changes of the host are sent with the next pass. Tokens that the device chooses are written here at once, and the
    host reads them later.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # Twice the token, plus 1 where it is noisy. -2 is no token. Nobody reads the last one.
        self.values = torch.full((slots + 1,), -2, dtype=torch.int64, device=device)

    def outgoing(self, states: Sequence[CanvasState]) -> tuple[Index, Index]:
        """Unsent changes of `states`: places in the buffer and their values, int64 [n] each."""
        changed = [(state, state.outdated()) for state in states]
        changed = [(state, positions) for state, positions in changed if len(positions)]
        if not changed:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        places = np.concatenate([state.places[positions] for state, positions in changed])
        canvases = [(state.canvas, positions) for state, positions in changed]
        return places, np.concatenate([2 * canvas.tokens[at] + canvas.noisy[at] for canvas, at in canvases])

    def write(self, places: Tensor, values: Tensor) -> None:
        """A place that is listed twice has the same value twice. Both are int64 [n]."""
        if len(places):
            self.values.index_copy_(0, places, values)

    def tokens(self, places: Tensor) -> Tensor:
        """The tokens at `places`, int64 [n]."""
        return self.values[places] >> 1

    @torch.inference_mode()
    def transfer(self, scores: Tensor, requests: Sequence[Candidates], *, kernels: bool = False) -> Tensor:
        """Choose the predicted positions that are transferred, and write their tokens to the buffer.

        They are final then, unless a rule may change them again; the host then decides when they are final. With
        `kernels` a Triton kernel does it. `scores` [2 + n, R] are those of `runner.score_rows`. Returns them with one
        more row, which is 1 where a position was chosen.
        """
        if not scores.shape[1] or all(request.chosen is None for request in requests):
            return torch.cat((scores, torch.zeros_like(scores[:1])))
        choice = RowChoice.of(requests, len(self.values) - 1, scores.device)
        if kernels:
            from remask.sampling import kernels_triton

            if choice.max_rows <= kernels_triton.MAX_ROWS:
                return kernels_triton.transfer(choice, scores, self.values)
        return choice.transfer(scores, self.values)

"""Plans: what a denoising step computes, as data.

A policy is a pure function from a `View` to a `Plan`, and one transformer executes any plan. Views and plans hold host
arrays only, so planning never waits for the device. What follows from a plan alone is computed once and kept with it,
so nobody may write to its arrays.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.errors import PlanError
from remask.plan.hooks import LayerHook
from remask.plan.spans import Mask, Positions, Span, SpanMemo, Spans, rows_of

Reach: TypeAlias = NDArray[np.int64]  # [T], non-decreasing: how many leading positions each row attends to

NEVER = np.iinfo(np.int32).max  # `View.settled` of a noisy position: later than any step


@dataclass(eq=False, init=False, slots=True)  # not frozen, as one is made for each step of each request
class Plan:
    """One step of one canvas: spans that cover the layers in order, and the positions to predict.

    Attributes:
        spans: runs of layers, with the rows that are live in them.
        predict: positions whose logits are computed.
        transfer: positions that are transferred, whatever their confidence. None leaves the choice to the sampler. An
            empty mask makes a fill pass, which only writes caches and does not end the step.
        sees: row p attends to the positions below sees[p], which never decreases. None: every row attends to all
            positions. The engine fills it in from the `View`.
        refreshes: the pass fills or renews caches, in addition to what the policy computes in every pass.
        hook: what the policy does on the device between layers; None without a hook.
        predicted: the positions of `predict`.
        again: the plan repeats the one before.
        fills: it is a fill pass.
    """

    spans: Spans
    predict: Mask
    transfer: Mask | None = None
    sees: Reach | None = None
    refreshes: bool = False
    hook: LayerHook | None = None
    predicted: Positions = field(init=False, repr=False)
    again: bool = field(init=False, repr=False)
    fills: bool = field(init=False, repr=False)

    def __init__(
        self,
        spans: Iterable[Span],
        predict: Mask,
        transfer: Mask | None = None,
        sees: Reach | None = None,
        refreshes: bool = False,
        hook: LayerHook | None = None,
        *,
        predicted: Positions | None = None,
        again: bool = False,
    ) -> None:
        """Raises `PlanError` unless `spans` cover the layers in order; see `Spans`."""
        self.spans = spans if isinstance(spans, Spans) else Spans(spans)
        self.predict = predict
        self.transfer = transfer
        self.sees = sees
        self.refreshes = refreshes
        self.hook = hook
        self.predicted = predict.nonzero()[0] if predicted is None else predicted
        self.again = again
        self.fills = transfer is not None and not transfer.any()

    def check(self, length: int) -> None:
        """Raise `PlanError` unless all arrays have `length` positions, and transfers, saves and hook fit the spans."""
        spans = self.spans
        arrays: list[NDArray[Any]] = [self.predict]
        arrays += [array for array in (self.transfer, self.sees) if array is not None]
        if self.hook is not None:
            arrays += self.hook.masks
        for shape in (*spans.shapes, *[array.shape for array in arrays]):
            if shape != (length,):
                raise PlanError(f"an array of shape {shape} for a canvas of {length} positions")
        if self.transfer is not None and (self.transfer & ~self.predict).any():
            raise PlanError("positions are transferred that are not predicted")
        if spans[0].save is not None:
            raise PlanError("tokens enter the first layer, so no hidden states are kept there")
        if self.hook is not None:
            self.hook.check(spans)

    @property
    def layers(self) -> int:
        """Number of layers covered."""
        return self.spans.layers

    @property
    def cost(self) -> int:
        """Row-layers that the plan computes."""
        return self.spans.cost

    @property
    def widest(self) -> int:
        """Largest number of live rows in any layer, also after the hook has changed the plan."""
        return self.spans.widest if self.hook is None or not self.hook.revives else len(self.spans[0].rows)

    @property
    def may_change(self) -> bool:
        """Whether its rows may change while it runs, because the device picks rows or the hook changes them."""
        return self.spans.picks or (self.hook is not None and self.hook.changes(self.spans))

    def reach(self, span: Span) -> int:
        """How many leading positions the computed rows of `span` attend to, taken together."""
        if self.sees is None:
            return len(span.rows)
        return 0 if span.last < 0 else int(self.sees[span.last])

    def repeated(self, block: range, noisy: Mask) -> "Plan":
        """The plan of a later step of `block`. Only the predicted positions differ: those of it that are noisy then."""
        in_block = noisy[block.start : block.stop]
        predict = np.zeros(len(noisy), dtype=np.bool_)
        predict[block.start : block.stop] = in_block
        predicted = _positions(block)[in_block]
        return Plan(
            self.spans, predict, self.transfer, self.sees, self.refreshes, self.hook, predicted=predicted, again=True
        )

    def predicting(self, predict: Mask) -> "Plan":
        """The plan with the positions to predict replaced by `predict`."""
        return Plan(self.spans, predict, self.transfer, self.sees, self.refreshes, self.hook, again=self.again)

    def over(self, spans: Iterable[Span], *, refreshes: bool = False) -> "Plan":
        """The plan with its spans replaced by `spans`, which refresh if it does or `refreshes` is True.

        Raises `PlanError` as the constructor does.
        """
        refreshes = refreshes or self.refreshes
        return Plan(
            spans,
            self.predict,
            self.transfer,
            self.sees,
            refreshes,
            self.hook,
            predicted=self.predicted,
            again=self.again,
        )

    def cut(self, layer: int) -> "Plan":
        """The plan with a span boundary before `layer` (0 <= layer <= layers). Nothing else changes."""
        return self.over(self.spans.cut(layer))

    def refreshed(self, layer: int) -> "Plan":
        """The plan with all rows live from `layer` >= 1 on. Rows that become live restart from saved states."""

        def refresh(span: Span) -> Span:
            if span.layers.start < layer:
                return span
            rows = np.ones_like(span.rows)
            if self.sees is not None:
                rows[self.sees[-1] :] = False
            return Span(span.layers, rows, save=rows)

        return self.over(self.spans.cut(layer).map(refresh), refreshes=True)

    def below(self, sees: Reach, memo: "SpanMemo") -> "Plan":
        """The plan without the positions that no row attends to by `sees`, which becomes its own.

        Equal spans are reused from the canvas' `memo`.
        """
        stop = int(sees[-1])
        lead = np.arange(len(self.predict)) < stop
        spans = memo.get((stop, self.spans), lambda: self.spans.map(lambda span: span.below(stop)))
        transfer = None if self.transfer is None else self.transfer & lead
        hook = None if self.hook is None else self.hook.below(lead)
        return Plan(spans, self.predict & lead, transfer, sees, self.refreshes, hook)

    def with_choice(self, layer: int, rows: Mask) -> "Plan":
        """The plan with the pick of `layer` replaced by its result: `rows` are computed, and the other ones held."""

        def resolve_pick(span: Span) -> Span:
            if span.layers != range(layer, layer + 1) or span.pick is None:
                return span
            held = span.pick.candidates & ~rows
            return replace(span, pick=None, held=held if span.held is None else span.held | held)

        return self.over(self.spans.cut(layer).cut(layer + 1).map(resolve_pick))

    def holding(self, layer: int, rows: Mask) -> "Plan":
        """The plan in which `rows` of the span that begins at `layer` are held."""

        def hold_rows(span: Span) -> Span:
            if span.layers.start != layer:
                return span
            return replace(span, held=rows if span.held is None else span.held | rows)

        return self.over(self.spans.map(hold_rows))


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The stored K/V of a prefix, which a request reads."""

    length: int  # number of positions
    boundary: int  # their rows may restart at this layer, from the hidden states that leave the layer before it
    # K/V are read from the store in layers 0 .. layers - 1. At least `boundary`, which is also the default.
    layers: int = 0
    copied: bool = False  # the request has its own copy of the K/V, and may overwrite it

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", max(self.layers, self.boundary))

    @property
    def lead(self) -> int:
        """Number of positions whose K/V are read in place."""
        return 0 if self.copied else self.length

    def rows(self, canvas_length: int) -> Mask:
        """A fresh mask of its positions on a canvas of this length."""
        return rows_of(range(self.length), canvas_length)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a step that the decoder knows before its passes."""

    # Positions that the step transfers, in order, int64. None if the sampler chooses them after the pass.
    order: NDArray[np.int64] | None = None
    # In a correction after its first step, the blocks whose tokens the last step changed. Otherwise None.
    touched: Mask | None = None
    # The block that begins with this step, if `View.block` includes completed blocks that may be revised now.
    # Otherwise None.
    fresh: range | None = None


@dataclass(slots=True)  # not frozen, as one is made for each step of each request
class LastPass:
    """Results of the last pass that predicted tokens; empty before the first one."""

    # Positions that it predicted, ascending, int64 [N]
    positions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # The token that it predicted for each position, int64 [N]
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # The confidence of each prediction, on the scale of the request's `remasking`, float32 [N]
    confidences: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    # The policy's measure (`Traits.measure`) of the row that predicted each position, float32 [N]; None without one
    measured: NDArray[np.float32] | None = None


@dataclass(slots=True)  # not frozen: one is made for each pass of each request, and a frozen one takes twice as long
class View:
    """All that a policy may use of a request: ints and host arrays, never tensors. Policies must not write to it."""

    layers: int  # number of layers of the model
    step: int  # denoising steps of this request so far
    block_step: int  # the same within the current block
    block: range  # positions denoised together now
    prompt: int  # positions 0 .. prompt - 1 were given
    noisy: Mask  # positions that are not final yet
    settled: NDArray[np.int32]  # step at whose end a position became final; -1 for what was given, NEVER if noisy
    prefix: PrefixHit | None  # what the request reads from the store; None if nothing
    pass_index: int = 0  # passes since this step began: 1 after a fill pass
    shift: int = 0  # of the model family: row p - shift predicts position p
    sees: Reach | None = None  # row p attends to positions below sees[p]; None: to all
    opens: bool = False  # the step gives the block its first token and no other
    committed: int | None = None  # leading rows whose K/V are final, if K/V do not become final by whole blocks
    response: int | None = None  # the response ends before this position; None: at the end of the canvas
    stop: int | None = None  # the first settled stop token: the response ends there at the latest; None without one
    seed: int = 0  # of the request. Random choices of a policy may depend on it and on the step alone
    steps: int | None = None  # scheduled steps of the whole response; None without a schedule
    decoding: StepFacts = field(default_factory=StepFacts)  # what the decoder knows before the pass
    last_pass: LastPass = field(default_factory=LastPass)  # results of the last pass
    hook_output: Any = None  # what the policy's layer hook reported of earlier passes; None before the first
    memo: SpanMemo = field(default_factory=SpanMemo)  # of the canvas; see `spans`

    def spans(self, key: Hashable, make: Callable[[], Iterable[Span]]) -> Spans:
        """The spans that `make` returns, or returned before for this canvas under an equal `key`.

        `key` must hold everything that the spans depend on, except what never changes on a canvas: the settings of its
        policy, and the fields `layers`, `prompt`, `prefix`, `shift` and `response`.
        """
        return self.memo.get(key, make)

    def over(self, start: int, stop: int) -> Spans:
        """All layers over the rows from `start` up to `stop`, as one span."""
        return self.memo.get((start, stop), lambda: _over(self.layers, self.length, start, stop))

    def over_rows(self, rows: Mask) -> Spans:
        """All layers over `rows`, as one span."""
        return self.memo.get(rows.tobytes(), lambda: [Span(range(self.layers), rows)])

    def rows(self, start: int, stop: int) -> Mask:
        """A fresh mask of the positions from `start` up to `stop`."""
        return rows_of(range(start, stop), self.length)

    @property
    def length(self) -> int:
        """Canvas length T."""
        return len(self.noisy)

    @property
    def everything(self) -> Mask:
        """A fresh mask of all positions."""
        return np.ones(self.length, dtype=np.bool_)

    @property
    def horizon(self) -> int:
        """How many leading positions the current block's rows attend to. Later positions have no effect on them."""
        # No row sees more than a later one, as `sees` never decreases.
        return self.length if self.sees is None else int(self.sees[self.block.stop - 1])

    @property
    def first(self) -> Mask:
        """A fresh mask of the current block's first position."""
        return self.rows(self.block.start, self.block.start + 1)

    @property
    def led(self) -> bool:
        """Whether the row before the block predicts an open position of it."""
        return self.shift > 0 and bool(self.noisy[self.block.start])

    def block_start(self, position: int) -> int:
        """The first position of the block of `position`, on a block-causal model."""
        assert self.sees is not None
        return int(np.searchsorted(self.sees, self.sees[position]))

    @property
    def candidates(self) -> Mask:
        """The noisy positions of the current block."""
        mask = np.zeros(self.length, dtype=np.bool_)
        mask[self.block.start : self.block.stop] = self.noisy[self.block.start : self.block.stop]
        return mask


@lru_cache(maxsize=64)
def _positions(block: range) -> Positions:
    return np.arange(block.start, block.stop)


@lru_cache(maxsize=64)
def _over(layers: int, length: int, start: int, stop: int) -> Spans:
    """`View.over`: canvases of one length share the spans."""
    rows = rows_of(range(start, stop), length)
    rows.setflags(write=False)
    return Spans([Span(range(layers), rows)])

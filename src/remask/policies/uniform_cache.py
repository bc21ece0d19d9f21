"""`uniform-cache`: a full pass when a block starts, then passes over the block that may skip unchanged rows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

from remask.checks.fields import declare
from remask.checks.values import Choice, Real, Whole
from remask.errors import PlanError
from remask.plan import HookCost, LayerHook, Mask, Plan, Span, Spans, View
from remask.plan.cost import OperationCost, Widths
from remask.policies.base import ALWAYS, Kept, Schedule, Traits
from remask.policies.block import Blockwise


@dataclass(frozen=True, slots=True)
class Drift(LayerHook):
    """Holds the rows of `candidates` whose value vectors are close to those in the cache, in every layer but the first.

    V is projected for all rows of `candidates` before a layer runs. Rows at a cosine distance of at most `threshold`
    from their cached V join `Span.held`. Their cached K and V are kept, so small changes add up until they exceed the
    threshold. Until a layer is compared all rows count as computed, so the cost of a plan is an upper bound.

    Attributes:
        candidates: rows that are compared, bool [T].
        threshold: cosine distance up to which a row is held.
        compared: number of leading layers that have been compared; their spans have the held rows.
    """

    candidates: Mask
    threshold: float
    compared: int = 1

    on_device = "remask.policies.on_device:HoldStillRows"
    adds_outputs = True

    def changes(self, spans: Spans) -> bool:
        return any(map(self.compares, spans))

    @property
    def masks(self) -> tuple[Mask, ...]:
        return (self.candidates,)

    def compares(self, span: Span) -> bool:
        """Whether rows of `span` are still to be compared."""
        return span.layers.start >= self.compared

    def check(self, spans: Spans) -> None:
        if self.threshold < 0:
            raise PlanError(f"drift: the threshold must be >= 0, got {self.threshold}")
        for span in filter(self.compares, spans):
            if len(span.layers) > 1 or span.pick is not None:
                cause = f"{len(span.layers)} layers" if span.pick is None else "a pick"
                raise PlanError(f"drift: each compared layer must have a span of its own without a pick, got {cause}")
            if (self.candidates & ~span.written).any():
                raise PlanError(f"drift: all compared rows must be computed and write their K and V in {span.layers}")

    def adding(self, span: Span) -> Mask | None:
        return self.candidates if self.compares(span) else None

    def hold(self, plan: Plan, layer: int, rows: Mask) -> Plan:
        """Return `plan`, whose hook this is, after `layer` has been compared: `rows` are held in it."""
        return replace(plan.holding(layer, rows), hook=replace(self, compared=layer + 1))

    def below(self, lead: Mask) -> Self:
        return replace(self, candidates=self.candidates & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """V is projected and compared, and not written."""
        layers = spans.layers - 1
        rows = int(self.candidates.sum())
        cost = OperationCost(
            flops=layers * 2 * rows * widths.hidden * widths.keys,
            kv_read=layers * widths.itemsize * rows * widths.keys,
            activations=layers * widths.itemsize * rows * widths.hidden,
        )
        return HookCost(selection=cost, compares=frozenset((layer, "value") for layer in range(1, spans.layers)))


@dataclass(frozen=True, slots=True)
class UniformCache(Blockwise):
    """`uniform-cache`: computes all rows in the first step of a block, and then the block, whose tokens may all change.

    Every `refresh_next`-th step of a block, counted from 1, computes the next block of the response too; 0 never does.
    A step of a correction computes the blocks that the last step changed, or all rows if it changed none. With
    `border="neighbours"` the first step of a later block computes the block and as many rows before it.

    With `drift` (thesis, section 6.6.4) every layer of these passes but the first computes only rows whose V is at a
    larger cosine distance from the cached V; the others add their cached outputs. Full passes and corrections compare
    nothing.
    """

    refresh_next: int = declare(4, Whole(0), "Steps from one computation of the next block to the next; 0: never.")
    border: Literal["full", "neighbours"] = declare(
        "full", Choice(("full", "neighbours")), "What the first step of a later block computes."
    )
    drift: float | None = declare(None, Real(0, 2), "Cosine distance up to which a row counts as standing still.")

    @property
    def traits(self) -> Traits:
        keeps: frozenset[Kept] = frozenset() if self.drift is None else frozenset({"outputs"})
        return Traits(("uniform",), Schedule("within_block", blockwise=True), keeps, by_clock=not keeps)

    def plan(self, view: View) -> Plan:
        """As in every block-wise policy, except at borders where not all rows are computed."""
        new_block = view.block if view.decoding.fresh is None else view.decoding.fresh
        # All rows are computed in the first step of the request and of a correction, whose scope follows the prompt.
        if self.border == "full" or view.block_step > 0 or view.step == 0 or new_block.start == view.prompt:
            return Blockwise.plan(self, view)
        spans = view.over(max(0, new_block.start - len(new_block)), new_block.stop)
        return Plan(spans, view.candidates & spans[0].rows, refreshes=True)

    def _cached_plan(self, view: View) -> Plan:
        """In a correction the blocks that the last step changed; else the block, at intervals with the next block."""
        touched = view.decoding.touched
        if touched is not None:  # in a correction
            is_full = not touched.any()
            spans = view.over(0, view.length) if is_full else view.over_rows(touched)
            return Plan(spans, view.candidates & spans[0].rows, refreshes=is_full)
        hook = None
        computes_next = self._may_compute_next(view) and (view.block_step + 1) % self.refresh_next == 0
        stop = view.block.stop + (len(view.block) if computes_next else 0)
        if self.drift is None:
            spans = view.over(view.block.start, stop)
        else:
            spans = view.spans(("drift", view.block.start, stop), partial(self._single_layer_spans, view, stop))
            hook = Drift(spans[0].rows, self.drift)
        return Plan(spans, view.candidates, refreshes=computes_next, hook=hook)

    def _single_layer_spans(self, view: View, stop: int) -> list[Span]:
        rows = view.rows(view.block.start, stop)
        return [Span(range(layer, layer + 1), rows) for layer in range(view.layers)]

    def _may_compute_next(self, view: View) -> bool:
        end = view.length if view.response is None else view.response
        return self.refresh_next > 0 and view.block.stop < end

    def repeats(self, view: View) -> int:
        """Up to the step that computes the next block too. In a correction never, as rows depend on changed tokens."""
        if view.block_step == 0 or view.decoding.touched is not None:
            return 0
        if not self._may_compute_next(view):
            return ALWAYS
        steps_left = -(view.block_step + 1) % self.refresh_next  # until the next block is computed; 0: in this step
        return max(0, steps_left - 1)

"""Drift: rows that have hardly moved are not computed (thesis on Uniform-Cache, section 6.6.4)."""

from dataclasses import dataclass, replace
from typing import Self

from remask.errors import PlanError
from remask.plan import HookCost, LayerHook, Mask, Plan, Span, Spans
from remask.plan.cost import OperationCost, Widths


@dataclass(frozen=True, slots=True)
class Drift(LayerHook):
    """Holds the rows of `among` whose value vectors are near those in the cache, in every layer but the first.

    V is projected for all rows of `among` when the layer's turn comes. Rows at a cosine distance of at most `threshold`
    from their V in the cache join `Span.held`: their K and V are kept, so small moves add up until they
    count. Until then all rows count as computed, so the cost of a plan is an upper bound.

    Attributes:
        done: the layers below this one have been compared; the `held` of their spans has the rows.
    """

    among: Mask
    threshold: float
    done: int = 1

    on_device = "remask.policies.on_device.drift:HoldStillRows"
    adds_outputs = True

    def changes(self, spans: Spans) -> bool:
        """See `LayerHook`: until all layers have been compared."""
        return any(map(self.compares, spans))

    @property
    def masks(self) -> tuple[Mask, ...]:
        """See `LayerHook`."""
        return (self.among,)

    def compares(self, span: Span) -> bool:
        """Whether rows of `span` are still to be compared."""
        return span.layers.start >= self.done

    def check(self, spans: Spans) -> None:
        """See `LayerHook`."""
        if self.threshold < 0:
            raise PlanError(f"drift has a threshold from 0, got {self.threshold}")
        for span in filter(self.compares, spans):
            if len(span.layers) > 1 or span.pick is not None:
                raise PlanError("drift is compared layer by layer, in spans of one layer each, where nothing is picked")
            if (self.among & ~span.written).any():
                raise PlanError("drift is compared of rows that are computed and write their K and V")

    def adding(self, span: Span) -> Mask | None:
        """See `LayerHook`."""
        return self.among if self.compares(span) else None

    def hold(self, plan: Plan, layer: int, rows: Mask) -> Plan:
        """`plan`, whose hook this is, in which `layer` has been compared and `rows` of it are held."""
        return replace(plan.holding(layer, rows), hook=replace(self, done=layer + 1))

    def below(self, lead: Mask) -> Self:
        """See `LayerHook`."""
        return replace(self, among=self.among & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """See `LayerHook`: V is projected and compared, and not written."""
        w, layers, among = widths, spans.layers - 1, int(self.among.sum())
        cost = OperationCost(
            flops=layers * 2 * among * w.hidden * w.keys,
            kv_read=layers * w.item * among * w.keys,
            activations=layers * w.item * among * w.hidden,
        )
        return HookCost(selection=cost, compares=frozenset((layer, "value") for layer in range(1, spans.layers)))

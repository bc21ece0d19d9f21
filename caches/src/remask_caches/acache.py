"""`acache`: reads a stored prefix, and recomputes those of its rows that masks attend to most."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import numpy as np

from remask.checks.fields import check, declare
from remask.checks.values import OrNull, Real, Whole
from remask.errors import ConfigError, PlanError
from remask.plan import HookCost, LayerHook, Mask, OperationCost, Plan, PrefixHit, Span, Spans, View, Widths
from remask.policies import Around, CachePolicy, Dense, Traits


@dataclass(frozen=True, slots=True)
class Weigh(LayerHook):
    """Sums the attention that rows give to positions, and reports it after the pass as `View.hook_output`.

    This is how ACache (arXiv 2608.26140) finds its anchors.

    Attributes:
        rows: rows whose attention is summed, [T]; the plan keeps their inputs to all layers.
        among: positions over which each row's attention is normalised, in each head and layer, [T].
    """

    rows: Mask
    among: Mask

    on_device = "remask_caches.acache_on_device:AttentionScores"
    layered = False
    releases_inputs = True

    @property
    def masks(self) -> tuple[Mask, ...]:
        return self.rows, self.among

    def check(self, spans: Spans) -> None:
        if not (self.rows.any() and self.among.any()):
            raise PlanError("attention is summed over no row, or to no position")
        saved_rows = [span.save for span in spans[1:]]
        if len(spans) != spans.layers or any(saved is None or (self.rows & ~saved).any() for saved in saved_rows):
            raise PlanError("attention is summed over rows whose inputs are not kept in every layer")

    def below(self, lead: Mask) -> Self:
        return replace(self, rows=self.rows & lead, among=self.among & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """The cost of projecting the rows' queries again, and of their scores with `among`, in all layers."""
        layers, keys = spans.layers, int(self.among.sum())
        rows = layers * int(self.rows.sum())
        cost = OperationCost(
            flops=2 * rows * widths.queries * (widths.hidden + keys),
            kv_read=layers * widths.itemsize * keys * widths.keys,
            activations=widths.itemsize * rows * (widths.hidden + widths.queries),
        )
        return HookCost(watch=cost, looks=layers)


@dataclass(frozen=True, slots=True)
class ACache(Around):
    """ACache (arXiv 2608.26140) over any inner policy: the stored prefix is read in all layers, except for its anchors.

    The first pass of a request computes everything behind the prefix, predicts nothing, and reports how much the
    masks attend to each position of the prefix. The positions with the most attention are the anchors, in all layers.
    The first pass of each block recomputes their rows, whose K/V replace the stored ones, and with `anchor_interval`
    so does every pass at a multiple of that many steps after it.

    Attributes:
        inner: the policy for everything but the prefix.
    """

    inner: CachePolicy = field(default_factory=Dense)
    ratio: float = declare(
        0.2,
        Real(0, 1),
        "Share of the prefix' positions that are anchors, rounded up. 0 is `reuse`; at 1 no attention is needed.",
    )
    anchor_interval: int | None = declare(
        None,
        OrNull(Whole(1)),
        "Steps of a block from one computation of the anchors to the next; None: once a block. The authors' variant "
        "with dKV-Cache takes 8.",
        unset=None,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.inner.boundary(1000, 1001, 1):  # a prefix of nearly the whole canvas, as depths grow with its share
            raise ConfigError("acache cannot wrap a policy that reads a stored prefix too; name one of them")
        if names := ", ".join(sorted(self.inner.traits.keeps)):
            raise ConfigError(
                f"acache cannot wrap a policy that keeps {names} of rows, as anchors come and go; use none, a "
                "block cache, dkv-decode or entropy-cache within it"
            )

    @property
    def traits(self) -> Traits:
        """Those of the inner policy, but inputs are kept for the first pass, and no block's first pass is left out."""
        inner = self.inner.traits
        schedule = replace(inner.schedule, idle_passes="all")
        return replace(
            inner,
            kinds=("masked",),
            schedule=schedule,
            keeps=frozenset({"inputs"}),
            copies=True,
            by_clock=False,
            exact=False,
        )

    def boundary(self, prefix_length: int, canvas_length: int, layers: int) -> int:  # noqa: ARG002
        """All layers."""
        return layers

    def anchors(self, view: View, hit: PrefixHit) -> Mask:
        """The positions of the stored prefix whose rows are recomputed, bool [T]; ties go to the first positions."""
        rows, count = hit.rows(view.length), math.ceil(self.ratio * hit.length)
        if view.hook_output is None:
            return rows if count == hit.length else view.rows(0, 0)
        stored = rows.nonzero()[0]
        rows[:] = False
        rows[stored[np.argsort(-view.hook_output[stored], kind="stable")[:count]]] = True
        return rows

    def repeats(self, view: View) -> int:
        """Repeats of the inner policy, as far as the next computation of the anchors."""
        repeats, interval = self.inner.repeats(view), self.anchor_interval
        if view.prefix is None:
            return repeats
        if self._due(view):
            return 0
        return repeats if interval is None else min(repeats, interval - 1 - view.block_step % interval)

    def _due(self, view: View) -> bool:
        """Whether the anchors are computed in this step."""
        return view.block_step == 0 or (
            self.anchor_interval is not None and view.block_step % self.anchor_interval == 0
        )

    def plan(self, view: View) -> Plan:
        """First a pass that finds the anchors, then the inner plan without the prefix, but with the anchors if due."""
        hit = view.prefix
        if hit is None:
            return self.inner.plan(view)
        needs_attention = 0 < math.ceil(self.ratio * hit.length) < hit.length
        if needs_attention and view.hook_output is None:
            return self._attention_plan(view, hit)
        if needs_attention and view.step == 0:
            view = replace(view, pass_index=view.pass_index - 1)
        plan = self.inner.plan(view)
        refreshes = self.ratio > 0 and self._due(view) and view.pass_index == 0
        spans = view.spans((plan.spans, refreshes), partial(self._without_prefix, view, hit, plan.spans, refreshes))
        return plan.over(spans, refreshes=refreshes)

    def _attention_plan(self, view: View, hit: PrefixHit) -> Plan:
        """The pass that finds the anchors: it computes what follows the prefix, and predicts nothing."""
        stored = hit.rows(view.length)
        spans = [Span(range(i, i + 1), ~stored, save=~stored if i else None) for i in range(view.layers)]
        nothing = view.rows(0, 0)
        return Plan(spans, nothing, transfer=nothing, refreshes=True, hook=Weigh(view.noisy.copy(), stored))

    def _without_prefix(self, view: View, hit: PrefixHit, spans: Spans, refreshes: bool) -> Spans:
        """`spans` without the rows of the stored prefix, but with its anchors if `refreshes`."""
        stored = hit.rows(view.length)
        anchors = self.anchors(view, hit) if refreshes else view.rows(0, 0)
        return spans.map(lambda span: replace(span, rows=span.rows & ~stored | anchors))

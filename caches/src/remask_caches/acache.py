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
    """Reports attention once a pass has run (ACache, arXiv 2608.26140): `View.hook_output`.

    Attributes:
        rows: whose attention; the plan keeps their inputs to all layers.
        among: positions among which the attention of each row and head in each layer adds up to one.
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
            raise PlanError("attention is told of no row, or to no position")
        kept = [span.save for span in spans[1:]]
        if len(spans) != spans.layers or any(s is None or (self.rows & ~s).any() for s in kept):
            raise PlanError("attention is told of rows whose inputs are not kept in every layer")

    def below(self, lead: Mask) -> Self:
        return replace(self, rows=self.rows & lead, among=self.among & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """Queries are projected again from the inputs of the rows."""
        w, layers = widths, spans.layers
        rows, among = layers * int(self.rows.sum()), int(self.among.sum())
        cost = OperationCost(
            flops=2 * rows * w.queries * (w.hidden + among),
            kv_read=layers * w.itemsize * among * w.keys,
            activations=w.itemsize * rows * (w.hidden + w.queries),
        )
        return HookCost(watch=cost, looks=layers)


@dataclass(frozen=True, slots=True)
class ACache(Around):
    """ACache (arXiv 2608.26140) over any inner policy: the stored prefix is read in all layers, except for its anchors.

    The first pass of a request computes everything behind the prefix, predicts nothing, and reports how much the
    masks attend to each position of the prefix. The positions with the most attention are the anchors, in all layers.
    The first pass of each block recomputes the rows of the anchors, and their K/V replace the stored ones. With
    `anchor_interval`, every pass that many steps after it does so too.

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
        if self.inner.boundary(1, 2, 1):
            raise ConfigError("acache cannot wrap a policy that reads a stored prefix too; name one of them")
        if kept := ", ".join(sorted(self.inner.traits.keeps)):
            raise ConfigError(
                f"acache cannot wrap a policy that keeps {kept} of rows, as anchors come and go; use none, a "
                "block cache, dkv-decode or entropy-cache within it"
            )

    @property
    def traits(self) -> Traits:
        """Those of the inner policy, with inputs kept for the first pass. A block's first pass is never left out."""
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
        """The anchors: positions of the stored prefix whose rows are recomputed, [T]. Of equal ones the first."""
        rows, count = hit.rows(view.length), math.ceil(self.ratio * hit.length)
        if view.hook_output is None:
            return rows if count == hit.length else view.rows(0, 0)
        stored = rows.nonzero()[0]
        rows[:] = False
        rows[stored[np.argsort(-view.hook_output[stored], kind="stable")[:count]]] = True
        return rows

    def repeats(self, view: View) -> int:
        """As the inner policy, from one computation of the anchors to the next."""
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
        """First a pass that finds the anchors; then the inner plan without the prefix, with the anchors where due."""
        hit = view.prefix
        if hit is None:
            return self.inner.plan(view)
        asks = 0 < math.ceil(self.ratio * hit.length) < hit.length
        if asks and view.hook_output is None:
            return self._asking(view, hit)
        if asks and view.step == 0:
            view = replace(view, pass_index=view.pass_index - 1)
        plan = self.inner.plan(view)
        anew = self.ratio > 0 and self._due(view) and view.pass_index == 0
        spans = view.spans((plan.spans, anew), partial(self._placed, view, hit, plan.spans, anew))
        return plan.over(spans, refreshes=anew)

    def _asking(self, view: View, hit: PrefixHit) -> Plan:
        stored = hit.rows(view.length)
        spans = [Span(range(i, i + 1), ~stored, save=~stored if i else None) for i in range(view.layers)]
        nothing = view.rows(0, 0)
        return Plan(spans, nothing, transfer=nothing, refreshes=True, hook=Weigh(view.noisy.copy(), stored))

    def _placed(self, view: View, hit: PrefixHit, spans: Spans, anew: bool) -> Spans:
        stored = hit.rows(view.length)
        more = self.anchors(view, hit) if anew else view.rows(0, 0)
        return spans.map(lambda span: replace(span, rows=span.rows & ~stored | more))

"""`elastic-cache`: a sliding window, and a refresh of deep layers when attention has drifted."""

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args

import numpy as np

from remask.checks.fields import check, declare
from remask.checks.values import Choice, Flag, Real, Whole
from remask.errors import ConfigError, PlanError
from remask.plan import HookCost, LayerHook, Mask, OperationCost, Plan, Span, Spans, View, Widths
from remask.policies import CachePolicy, RequestFacts, Schedule, Traits

Similarity: TypeAlias = Literal["heads", "keys"]  # the axis along which attention is compared; see `Watch`


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(LayerHook):
    """Watches attention while a pass runs (Elastic-Cache, arXiv 2510.14973).

    After every layer but the last, the attention of the `tracked` rows is compared with that of the last pass. Where
    their mean cosine similarity is below `threshold`, the layers above are refreshed.

    Attributes:
        window: rows whose attention, summed over heads, decides what a layer tracks from now on, [T].
        among: positions that may be tracked, [T].
        threshold: cosine similarity, 0 to 1.
        tracked: rows that are compared, [T]. Where all are False, no layer is refreshed.
        track_num: how many positions a layer tracks.
        similarity: "heads": across the heads at each key, then the mean over keys and tokens. "keys": along the keys,
            of the mean over heads, then the mean over tokens.
        refreshed: first layer that was refreshed, from which on nothing is compared; None if none was.
    """

    window: Mask
    among: Mask
    threshold: float
    tracked: Mask
    track_num: int = 1
    similarity: Similarity = "heads"
    refreshed: int | None = None

    on_device = "remask_caches.elastic_on_device:WatchAttention"
    revives = True

    def changes(self, spans: Spans) -> bool:  # noqa: ARG002
        return True

    @property
    def masks(self) -> tuple[Mask, ...]:
        return self.window, self.among, self.tracked

    def check(self, spans: Spans) -> None:
        if len(spans) != spans.layers:
            raise PlanError("attention is watched layer by layer, so the plan needs a span for each layer")
        if not (self.window.any() and self.among.any()):
            raise PlanError("attention is watched of no row, or to no position")

    def refresh(self, plan: Plan, at: int) -> Plan:
        """`plan`, whose hook this is, with all rows computed from layer `at` on."""
        return replace(plan.refreshed(at), hook=replace(self, refreshed=at))

    def below(self, lead: Mask) -> Self:
        return replace(self, window=self.window & lead, among=self.among & lead, tracked=self.tracked & lead)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """The cost of queries and scores: the window's after each layer, and the tracked rows' twice where compared.

        Queries are projected again from the inputs of the rows; weighted sums of values are not computed.
        """
        layers, compared_layers, keys = spans.layers, 0, len(self.among)
        if self.tracked.any():  # all layers but the last, or up to the one below those refreshed
            compared_layers = layers - 1 if self.refreshed is None else self.refreshed
        rows = layers * int(self.window.sum()) + 2 * compared_layers * int(self.tracked.sum())
        cost = OperationCost(
            flops=2 * rows * widths.queries * (widths.hidden + keys),
            kv_read=(layers + compared_layers) * widths.itemsize * keys * widths.keys,
            activations=widths.itemsize * rows * (widths.hidden + widths.queries),
        )
        return HookCost(watch=cost, looks=layers + compared_layers)


@dataclass(frozen=True, slots=True)
class ElasticCache(CachePolicy):
    """Elastic-Cache (arXiv 2510.14973): computes a window of noisy rows, and refreshes when attention drifts.

    The first pass is full. Later passes compute the first noisy rows, the tracked ones, and those that the last step
    decoded. Where the attention of the tracked tokens has drifted in a layer, the same pass computes all rows above
    that layer, from their kept inputs. Positions after a settled stop token are not decoded.
    """

    window: int = declare(
        16, Whole(1), "beta, noisy positions in reach of a step, from the left; only these can be transferred."
    )
    threshold: float = declare(
        0.9, Real(0, 1), "gamma, the cosine similarity below which a refresh is due, from 0 (never) to 1 (any change)."
    )
    track_num: int = declare(1, Whole(1), "Tokens that each layer tracks. Every layer compares those of all layers.")
    block_caching: bool = declare(
        True, Flag(), "Whether noisy positions beyond the window are cached; without it all of them are computed."
    )
    similarity: Similarity = declare("heads", Choice(get_args(Similarity)), "What is compared; see `Watch`.")
    queries: Literal["window", "masks"] = declare(
        "window",
        Choice(("window", "masks")),
        "Whose attention decides what is tracked: that of the window, or without block caching of all `masks`.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.queries == "masks" and self.block_caching:
            raise ConfigError(
                "queries='masks' lets all masks decide what is tracked, and block_caching computes only those of the "
                "window; use block_caching=false, or queries='window'"
            )

    traits = Traits(schedule=Schedule("within_block"), keeps=frozenset({"inputs"}))

    def check(self, facts: RequestFacts) -> None:
        """Raise `ConfigError` on a window beyond the response, and on a decoding order that could leave the window."""
        response = facts.response
        if self.window > response:
            raise ConfigError(
                f"window={self.window} exceeds the response's {response} positions; use a window from 1 to {response}, "
                "or a longer response"
            )
        if facts.ordered and self.window < response:
            raise ConfigError(
                f"elastic-cache transfers within a window of {self.window} positions, and an order drawn beforehand "
                f"does not keep to it; use window={response}, or a remasking other than 'random' and 'order'"
            )

    def plan(self, view: View) -> Plan:
        """The same rows in all layers. Each layer is a span, because a refresh may begin at any of them."""
        masked = view.noisy.copy()
        if view.stop is not None:
            masked[view.stop :] = False
        window, tracked = view.rows(0, 0), view.rows(0, 0)
        window[np.flatnonzero(masked)[: self.window]] = True
        if view.step:
            tracked[view.hook_output] = True
        computed = window if self.block_caching else masked
        rows = self._rows(view, computed) | tracked
        spans = [Span(range(i, i + 1), rows, save=rows if i else None) for i in range(view.layers)]
        watch = Watch(
            window=window if self.queries == "window" else computed,
            among=~masked,
            threshold=self.threshold,
            tracked=tracked,
            track_num=self.track_num,
            similarity=self.similarity,
        )
        return Plan(tuple(spans), window & view.candidates, refreshes=view.step == 0, hook=watch)

    @staticmethod
    def _rows(view: View, computed: Mask) -> Mask:
        """`computed`, the rows that predict it, and those decoded by the last step; all rows in the first step."""
        if view.step == 0:
            return view.everything
        # The rows that the last step decoded still have the K/V of masks.
        rows: Mask = computed | (view.settled == view.step - 1)
        rows[np.flatnonzero(computed) - view.shift] = True
        return rows

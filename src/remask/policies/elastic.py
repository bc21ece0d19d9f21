"""`elastic-cache`: a sliding window, and a refresh of deep layers when attention has drifted."""

from dataclasses import dataclass

import numpy as np

from remask.core.checks import real, whole
from remask.core.plan import Mask, Plan, Span, View, Watch
from remask.errors import ConfigError
from remask.policies.base import CachePolicy, RequestFacts, Schedule, Traits


@dataclass(frozen=True, slots=True)
class ElasticCache(CachePolicy):
    """Elastic-Cache (arXiv 2510.14973): computes a window of noisy rows, and refreshes when attention drifts.

    The first pass is full. Later passes compute the first noisy positions, the tracked tokens, and the rows that the
    last step decoded. Where the attention of a layer's tracked token has drifted, the same pass computes all rows above
    that layer, from the hidden states that they had. The layers below keep their caches.

    Attributes:
        window: beta, noisy positions computed in a step, from the left; only these can be transferred.
        threshold: gamma, the cosine similarity below which a refresh is due, from 0 (never) to 1 (at any change).
    """

    window: int = 16
    threshold: float = 0.9

    def __post_init__(self) -> None:
        whole("window", self.window, low=1)
        real("threshold", self.threshold, low=0, high=1)

    @property
    def traits(self) -> Traits:
        """Attention is watched."""
        return Traits(schedule=Schedule("within_block"), keeps=frozenset({"attention"}))

    def check(self, facts: RequestFacts) -> None:
        """Refuses a window beyond the response, and a decoding order that could leave the window."""
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
        window = np.zeros(view.length, dtype=np.bool_)
        window[np.flatnonzero(view.noisy)[: self.window]] = True
        rows = self._rows(view, window)
        spans = [Span(range(i, i + 1), rows, save=rows if i else None) for i in range(view.layers)]
        watch = Watch(window, ~view.noisy, self.threshold)
        return Plan(tuple(spans), window & view.candidates, watch=watch, refreshes=view.step == 0)

    def _rows(self, view: View, window: Mask) -> Mask:
        if view.step == 0:
            return view.everything
        assert view.last_pass.tracked is not None
        # The rows that the last step decoded still have the K/V of masks.
        rows: Mask = window | (view.settled == view.step - 1)
        rows[np.flatnonzero(window) - view.shift] = True
        rows[view.last_pass.tracked] = True
        return rows

"""`reuse`: what autoregressive engines do with a shared prefix. The known-bad baseline (BiCache section 3)."""

from dataclasses import dataclass

import numpy as np

from remask.core.plan import Plan, Span, View
from remask.policies.base import CachePolicy
from remask.policies.dense import Dense


@dataclass(frozen=True, slots=True)
class Reuse(CachePolicy):
    """The shared prefix is read from the store in all layers, in every step, and never computed again.

    Exact for causal attention; for bidirectional attention the prefix's K/V lack the influence of all that follows.
    """

    @property
    def without_prefix(self) -> CachePolicy:
        """Nothing to reuse: everything is computed."""
        return Dense()

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """All layers."""
        return layers

    def plan(self, view: View) -> Plan:
        """Everything but the prefix, in all layers."""
        if view.prefix is None:
            return self.without_prefix.plan(view)
        rows = np.arange(view.length) >= view.prefix.length
        return Plan(spans=(Span(range(view.layers), rows),), predict=view.candidates)

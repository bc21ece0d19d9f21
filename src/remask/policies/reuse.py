"""`reuse`: what autoregressive engines do with a shared prefix. The known-bad baseline (BiCache section 3)."""

from dataclasses import dataclass

import numpy as np

from remask.core.plan import Plan, Span, View
from remask.policies.base import Circumstances, IdlePasses
from remask.policies.dense import Dense


@dataclass(frozen=True, slots=True)
class Reuse:
    """The shared prefix is read from the store in all layers, in every step, and never computed again.

    Exact for causal attention; for bidirectional attention the prefix's K/V lack the influence of all that follows.
    """

    @property
    def idle_passes(self) -> IdlePasses:
        """A pass that transfers nothing is run and counted, as in the authors' engine."""
        return "all"

    @property
    def blockwise(self) -> bool:
        """Threshold decoding of Dream works on a budget."""
        return False

    @property
    def needs_outputs(self) -> bool:
        """K and V alone."""
        return False

    @property
    def own_clocks(self) -> bool:
        """A guided pair is one forward."""
        return False

    def guides(self, step: int) -> bool:  # noqa: ARG002
        """Both canvases run in every pass."""
        return True

    @property
    def without_prefix(self) -> Dense:
        """Nothing to reuse: everything is computed."""
        return Dense()

    def check(self, circumstances: Circumstances) -> None:
        """Fits everything."""

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """All layers."""
        return layers

    def plan(self, view: View) -> Plan:
        """Everything but the prefix, in all layers."""
        if view.prefix is None:
            return self.without_prefix.plan(view)
        rows = np.arange(view.length) >= view.prefix.length
        return Plan(spans=(Span(range(view.layers), rows),), predict=view.candidates)

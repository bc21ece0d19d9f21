"""`none`: no caching. Everything is computed in every step; the reference for all others."""

from dataclasses import dataclass

import numpy as np

from remask.core.plan import Plan, Span, View
from remask.policies.base import CachePolicy, Schedule, Traits


@dataclass(frozen=True, slots=True)
class Dense(CachePolicy):
    """Computes every row in every layer and step. With block-causal attention, every row up to the current block's."""

    @property
    def traits(self) -> Traits:
        """Nothing is kept between passes, so one that transfers nothing can be skipped."""
        return Traits(kinds=("masked", "uniform", "block_causal"), schedule=Schedule("skipped"))

    def plan(self, view: View) -> Plan:
        """One span of all layers over all rows that can have an effect."""
        layers, at = range(view.layers), np.arange(view.length)
        if view.opens:
            return Plan((Span(layers, at < view.block.start),), predict=view.first, commit=view.first)
        return Plan((Span(layers, at < view.horizon),), predict=view.candidates)

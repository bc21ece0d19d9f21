"""`none`: no caching. Everything is computed in every step; the reference for all others."""

from dataclasses import dataclass

from remask.core.plan import Plan, Span, View
from remask.policies.base import IdlePasses, WithinRequest


@dataclass(frozen=True, slots=True)
class Dense(WithinRequest):
    """Every row in every layer, every step."""

    @property
    def idle_passes(self) -> IdlePasses:
        """Nothing is kept between passes, so one that transfers nothing can be skipped."""
        return "skipped"

    def plan(self, view: View) -> Plan:
        """One span of all layers over all rows."""
        return Plan(spans=(Span(range(view.layers), view.everything),), predict=view.candidates)

"""`none`: no caching. Everything is computed in every step; the reference for all others."""

from dataclasses import dataclass

from remask.core.plan import Plan, Span, View


@dataclass(frozen=True, slots=True)
class Dense:
    """Every row in every layer, every step."""

    @property
    def idle_passes(self) -> bool:
        """Nothing is kept between passes, so a pass that transfers nothing can be skipped."""
        return False

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """Reads nothing from the store."""
        return 0

    def plan(self, view: View) -> Plan:
        """One span of all layers over all rows."""
        return Plan(spans=(Span(range(view.layers), view.everything),), predict=view.candidates)

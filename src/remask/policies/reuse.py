"""`reuse`: shared prefixes as autoregressive engines reuse them. The known-bad baseline (BiCache section 3)."""

from dataclasses import dataclass

from remask.plan import Plan, View
from remask.policies.base import ALWAYS, CachePolicy, Traits
from remask.policies.dense import Dense


@dataclass(frozen=True, slots=True)
class Reuse(CachePolicy):
    """Reads the shared prefix from the store in all layers and steps, and never computes it again.

    This is exact for causal attention. For bidirectional attention, the K/V of the prefix lack the influence of the
    tokens after it.
    """

    @property
    def traits(self) -> Traits:
        """The rows are the same in all steps."""
        return Traits(by_clock=True)

    @property
    def without_prefix(self) -> CachePolicy:
        """`none`, because there is nothing to reuse."""
        return Dense()

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """All layers."""
        return layers

    def repeats(self, view: View) -> int:  # noqa: ARG002
        """The same rows in all steps."""
        return ALWAYS

    def draft_rows(self, canvas: int, response: int, block: int) -> int:  # noqa: ARG002
        """At most all; what is stored is read."""
        return canvas

    def plan(self, view: View) -> Plan:
        """Everything but what is stored, in all layers."""
        if view.prefix is None:
            return self.without_prefix.plan(view)
        return Plan(view.over_rows(~view.prefix.rows(view.length)), predict=view.candidates)

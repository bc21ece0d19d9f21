"""`none`: no caching. Everything is computed in every step; the reference for all others."""

from dataclasses import dataclass

from remask.plan import Plan, View
from remask.policies.base import ALWAYS, CachePolicy, Schedule, Traits


@dataclass(frozen=True, slots=True)
class Dense(CachePolicy):
    """Computes every row in every layer and step. With block-causal attention, every row up to the current block's."""

    @property
    def traits(self) -> Traits:
        """Nothing is kept between passes, so one that transfers nothing can be skipped."""
        return Traits(kinds=("masked", "uniform", "block_causal"), schedule=Schedule("skipped"), by_clock=True)

    def repeats(self, view: View) -> int:
        """The same rows until the block is done, once it has its first token."""
        return 0 if view.opens else ALWAYS

    def draft_rows(self, canvas: int, response: int, block: int) -> int:  # noqa: ARG002
        """All of them: every row depends on every token."""
        return canvas

    def plan(self, view: View) -> Plan:
        """One span of all layers over all rows that can have an effect."""
        if view.opens:
            return Plan(view.over(0, view.block.start), predict=view.first, commit=view.first)
        return Plan(view.over(0, view.horizon), predict=view.candidates)

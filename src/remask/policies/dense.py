"""`none` computes everything in every step; `reuse` never computes a shared prefix again."""

from dataclasses import dataclass

from remask.checks import KINDS
from remask.plan import Plan, View
from remask.policies.base import ALWAYS, CachePolicy, Schedule, Traits


@dataclass(frozen=True, slots=True)
class Dense(CachePolicy):
    """Computes every row in every layer and step. With block-causal attention, every row up to the current block's."""

    # Nothing is kept between passes, so one that transfers nothing can be skipped.
    traits = Traits(kinds=KINDS, schedule=Schedule("skipped"), exact=True, by_clock=True)

    def repeats(self, view: View) -> int:
        """The rows stay the same until the block is done, once it has its first token."""
        return 0 if view.opens else ALWAYS

    def plan(self, view: View) -> Plan:
        if view.committed is not None:
            return Plan(view.over(0, view.block.stop - view.shift), predict=view.candidates)
        if view.opens:
            return Plan(view.over(0, view.block.start), predict=view.first, transfer=view.first)
        return Plan(view.over(0, view.horizon), predict=view.candidates)


@dataclass(frozen=True, slots=True)
class Reuse(CachePolicy):
    """Reads the shared prefix from the store in all layers and steps, and never computes it again.

    This is exact for causal attention. For bidirectional attention the K/V of the prefix do not depend on the tokens
    after it, as they should.
    """

    traits = Traits(by_clock=True)

    @property
    def without_prefix(self) -> CachePolicy:
        return Dense()

    def boundary(self, prefix_length: int, canvas_length: int, layers: int) -> int:  # noqa: ARG002
        return layers

    def repeats(self, view: View) -> int:  # noqa: ARG002
        return ALWAYS

    def plan(self, view: View) -> Plan:
        if view.prefix is None:
            return self.without_prefix.plan(view)
        return Plan(view.over_rows(~view.prefix.rows(view.length)), predict=view.candidates)

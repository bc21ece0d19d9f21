"""`block-prefix` and `block-dual` (Fast-dLLM): a full pass renews the cache when a block starts."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from remask.checks.fields import declare
from remask.checks.values import Choice
from remask.errors import ConfigError
from remask.plan import Plan, View
from remask.policies.base import ALWAYS, CachePolicy, IdlePasses, RequestFacts, Schedule, Traits


class Blockwise(CachePolicy):
    """Computes all rows in the first step of a block, and then only some of them (Fast-dLLM section 3.2).

    If a row predicts the position after it (Dream), the block's first token is predicted by the row before the block,
    which cached passes leave out. So the first pass transfers that token alone, whatever its confidence, unless it is
    fixed.
    """

    __slots__ = ()

    def repeats(self, view: View) -> int:
        return ALWAYS if view.block_step > 0 else 0

    def plan(self, view: View) -> Plan:
        if view.block_step > 0:
            return self._cached_plan(view)
        rows = view.over(0, view.length)
        if view.shift and view.noisy[view.block.start]:
            first = view.first
            return Plan(rows, first, first, refreshes=True)
        return Plan(rows, view.candidates, refreshes=True)

    @abstractmethod
    def _cached_plan(self, view: View) -> Plan:
        """A pass that reads from the cache."""


@dataclass(frozen=True, slots=True)
class BlockPrefix(Blockwise):
    """Caches the rows before the block, and computes the block and all rows after it in every pass.

    On uniform models this is exact under structured attention: clean rows do not attend to noise, so their K/V change
    only when a block is done.
    """

    traits = Traits(("masked", "uniform"), Schedule("within_block", blockwise=True), by_clock=True)

    def _cached_plan(self, view: View) -> Plan:
        return Plan(view.over(view.block.start, view.length), view.candidates)


@dataclass(frozen=True, slots=True)
class BlockDual(Blockwise):
    """Caches the rows before and after the block, and computes the block alone.

    With `fill_pass="separate"` the full pass only writes caches, and a pass over the block follows in the same step
    (the BiCache authors' engine); with "transfer" the full pass transfers tokens (Fast-dLLM).
    """

    fill_pass: Literal["transfer", "separate"] = declare(
        "transfer", Choice(("transfer", "separate")), "What the full pass of a block does beside writing caches."
    )

    @property
    def traits(self) -> Traits:
        """The BiCache authors' engine runs the whole schedule; Fast-dLLM stops when the block is complete."""
        idle: IdlePasses = "all" if self.fill_pass == "separate" else "within_block"
        return Traits(schedule=Schedule(idle, blockwise=True), by_clock=True)

    def check(self, facts: RequestFacts) -> None:
        """Raise `ConfigError` on a separate fill pass if the row before the block predicts its first position."""
        if self.fill_pass == "separate" and facts.shift:
            raise ConfigError(
                "fill_pass='separate' leaves no row to predict a block's first token on a model whose rows predict the "
                "next position (Dream); use fill_pass='transfer'"
            )

    def repeats(self, view: View) -> int:
        """The cached pass of a block's first step repeats too."""
        return ALWAYS if view.pass_index > 0 else Blockwise.repeats(self, view)

    def plan(self, view: View) -> Plan:
        if self.fill_pass == "transfer" or view.block_step > 0:
            return Blockwise.plan(self, view)
        if view.pass_index == 0:
            nothing = view.rows(0, 0)
            return Plan(view.over(0, view.length), nothing, transfer=nothing, refreshes=True)
        return self._cached_plan(view)

    def _cached_plan(self, view: View) -> Plan:
        return Plan(view.over(view.block.start, view.block.stop), view.candidates)

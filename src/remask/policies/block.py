"""`block-prefix`, `block-dual` (Fast-dLLM) and `uniform-cache`: a full pass renews the cache when a block starts."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np

from remask.core.checks import one_of, whole
from remask.core.kinds import ModelKind
from remask.core.plan import Mask, Plan, Span, View
from remask.errors import ConfigError
from remask.policies.base import CachePolicy, RequestFacts, Schedule, Traits

FILL_PASSES = ("transfer", "separate")


@dataclass(frozen=True, slots=True)
class Blockwise(CachePolicy):
    """Computes all rows in the first step of a block, and then only the rows of `_rows` (Fast-dLLM section 3.2).

    Where a row predicts the position after it (Dream), cached passes lack the row before the block. So the first pass
    commits the first token of the block, whatever its confidence, and nothing else.
    """

    @property
    def traits(self) -> Traits:
        """A complete block runs no further pass, and thresholds are compared within the block."""
        return Traits(kinds=self._kinds(), schedule=Schedule("within_block", blockwise=True))

    def plan(self, view: View) -> Plan:
        """A full pass, or one over the rows that are not cached."""
        layers = range(view.layers)
        if view.block_step > 0:
            rows = self._rows(view)
            return Plan((Span(layers, rows),), predict=view.candidates & rows, refreshes=self._renews(view))
        first = _positions(view, range(view.block.start, view.block.start + 1))
        commit = first if view.shift else None
        predict = view.candidates if commit is None else first
        return Plan((Span(layers, view.everything),), predict, commit, refreshes=True)

    def _renews(self, view: View) -> bool:  # noqa: ARG002
        """Whether a cached pass computes rows that it reads from the cache at other times."""
        return False

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("masked",)

    @abstractmethod
    def _rows(self, view: View) -> Mask:
        """Rows of a cached pass."""


@dataclass(frozen=True, slots=True)
class BlockPrefix(Blockwise):
    """Caches the rows before the block, and computes the block and all rows after it in every pass.

    On uniform models this is exact: clean rows do not attend to noise, so their K/V change only when a block is done.
    """

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("masked", "uniform")

    def _rows(self, view: View) -> Mask:
        return _positions(view, range(view.block.start, view.length))


@dataclass(frozen=True, slots=True)
class BlockDual(Blockwise):
    """Caches the rows before and after the block, and computes the block alone.

    `fill_pass="separate"` makes the full pass write caches only, with a pass over the block following in the same step
    (the BiCache authors' engine); "transfer" lets the full pass transfer tokens (Fast-dLLM).
    """

    fill_pass: Literal["transfer", "separate"] = "transfer"

    def __post_init__(self) -> None:
        one_of("fill_pass", self.fill_pass, FILL_PASSES)

    @property
    def traits(self) -> Traits:
        """The BiCache authors' engine runs the whole schedule; Fast-dLLM stops when the block is complete."""
        return Traits(schedule=Schedule("all" if self.fill_pass == "separate" else "within_block", blockwise=True))

    def check(self, facts: RequestFacts) -> None:
        """Refuses a separate fill pass where the row before the block predicts its first position."""
        if self.fill_pass == "separate" and facts.shift:
            raise ConfigError(
                "fill_pass='separate' leaves no row to predict a block's first token on a model whose rows predict the "
                "next position (Dream); use fill_pass='transfer'"
            )

    def plan(self, view: View) -> Plan:
        """A fill pass first where it is separate; otherwise as in every block-wise policy."""
        if self.fill_pass == "transfer" or view.block_step > 0:
            return Blockwise.plan(self, view)
        if view.pass_index == 0:
            nothing = _positions(view, range(0))
            return Plan((Span(range(view.layers), view.everything),), nothing, commit=nothing, refreshes=True)
        return Plan((Span(range(view.layers), self._rows(view)),), predict=view.candidates)

    def _rows(self, view: View) -> Mask:
        return _positions(view, view.block)


@dataclass(frozen=True, slots=True)
class UniformCache(Blockwise):
    """`uniform-cache`: computes all rows in the first step of a block, and then the block, whose tokens may all change.

    Every `refresh_next`-th step of a block, counted from 1, computes the next block of the response too; 0 never does.
    A step of a correction computes the blocks that the last step changed, or all rows if it changed none.
    """

    refresh_next: int = 4

    def __post_init__(self) -> None:
        whole("refresh_next", self.refresh_next, low=0)

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("uniform",)

    def _rows(self, view: View) -> Mask:
        if view.decoding.touched is not None:
            return view.decoding.touched if view.decoding.touched.any() else view.everything
        more = len(view.block) if self._renews(view) else 0
        return _positions(view, range(view.block.start, view.block.stop + more))

    def _renews(self, view: View) -> bool:
        if view.decoding.touched is not None:
            return not view.decoding.touched.any()
        end = view.length if view.response is None else view.response
        due = self.refresh_next > 0 and (view.block_step + 1) % self.refresh_next == 0
        return due and view.block.stop < end


def _positions(view: View, positions: range) -> Mask:
    mask = np.zeros(view.length, dtype=np.bool_)
    mask[positions.start : positions.stop] = True
    return mask

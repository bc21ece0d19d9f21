"""`block-prefix`, `block-dual` (Fast-dLLM) and `uniform-cache`: a full pass renews the cache when a block starts."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Literal

from remask.checks.kinds import ModelKind
from remask.checks.values import one_of, real, whole
from remask.errors import ConfigError
from remask.plan import LayerHook, Mask, Plan, Span, Spans, View
from remask.policies.base import ALWAYS, CachePolicy, IdlePasses, Kept, RequestFacts, Schedule, Traits
from remask.policies.drift import Drift

FILL_PASSES = ("transfer", "separate")
BORDERS = ("full", "neighbours")


@dataclass(frozen=True, slots=True)
class Blockwise(CachePolicy):
    """Computes all rows in the first step of a block, and then only the rows of `_rows` (Fast-dLLM section 3.2).

    Where a row predicts the position after it (Dream), cached passes lack the row before the block. So the first pass
    commits the first token of the block, whatever its confidence, and nothing else; unless that token is given.
    """

    @property
    def traits(self) -> Traits:
        """A complete block runs no further pass, and thresholds are compared within the block."""
        keeps = self._keeps()
        return Traits(self._kinds(), Schedule("within_block", blockwise=True), keeps, by_clock=not keeps)

    def repeats(self, view: View) -> int:
        """A cached pass computes the same rows until its block is done."""
        return ALWAYS if view.block_step > 0 else 0

    def plan(self, view: View) -> Plan:
        """A full pass, or one over the rows that are not cached."""
        if view.block_step > 0:
            spans = self._spans(view)
            return Plan(spans, self._predict(view, spans), refreshes=self._renews(view), hook=self._hook(view, spans))
        commit = view.first if view.shift and view.noisy[view.block.start] else None
        predict = view.candidates if commit is None else commit
        return Plan(view.over(0, view.length), predict, commit, refreshes=True)

    def _predict(self, view: View, spans: Spans) -> Mask:  # noqa: ARG002
        """The positions that a cached pass predicts; it computes at least the rows of the block."""
        return view.candidates

    def _hook(self, view: View, spans: Spans) -> LayerHook | None:  # noqa: ARG002
        """The layer hook of a cached pass; None: none."""
        return None

    def _renews(self, view: View) -> bool:  # noqa: ARG002
        """Whether a cached pass computes rows that it reads from the cache at other times."""
        return False

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("masked",)

    def _keeps(self) -> frozenset[Kept]:
        return frozenset()

    @abstractmethod
    def _spans(self, view: View) -> Spans:
        """The span of a cached pass."""


@dataclass(frozen=True, slots=True)
class BlockPrefix(Blockwise):
    """Caches the rows before the block, and computes the block and all rows after it in every pass.

    On uniform models this is exact under structured attention: clean rows do not attend to noise, so their K/V change
    only when a block is done.
    """

    def draft_rows(self, canvas: int, response: int, block: int) -> int:  # noqa: ARG002
        """The block and all rows after it."""
        return response

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("masked", "uniform")

    def _spans(self, view: View) -> Spans:
        return view.over(view.block.start, view.length)


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
        idle: IdlePasses = "all" if self.fill_pass == "separate" else "within_block"
        return Traits(schedule=Schedule(idle, blockwise=True), by_clock=True)

    def check(self, facts: RequestFacts) -> None:
        """Refuses a separate fill pass where the row before the block predicts its first position."""
        if self.fill_pass == "separate" and facts.shift:
            raise ConfigError(
                "fill_pass='separate' leaves no row to predict a block's first token on a model whose rows predict the "
                "next position (Dream); use fill_pass='transfer'"
            )

    def repeats(self, view: View) -> int:
        """As in every block-wise policy; a cached pass may follow in the first step of a block."""
        return ALWAYS if view.pass_index > 0 else Blockwise.repeats(self, view)

    def draft_rows(self, canvas: int, response: int, block: int) -> int:  # noqa: ARG002
        """The block."""
        return block

    def plan(self, view: View) -> Plan:
        """A fill pass first where it is separate; otherwise as in every block-wise policy."""
        if self.fill_pass == "transfer" or view.block_step > 0:
            return Blockwise.plan(self, view)
        if view.pass_index == 0:
            nothing = view.rows(0, 0)
            return Plan(view.over(0, view.length), nothing, commit=nothing, refreshes=True)
        return Plan(self._spans(view), predict=view.candidates)

    def _spans(self, view: View) -> Spans:
        return view.over(view.block.start, view.block.stop)


@dataclass(frozen=True, slots=True)
class UniformCache(Blockwise):
    """`uniform-cache`: computes all rows in the first step of a block, and then the block, whose tokens may all change.

    Every `refresh_next`-th step of a block, counted from 1, computes the next block of the response too; 0 never does.
    A step of a correction computes the blocks that the last step changed, or all rows if it changed none. With
    `border="neighbours"` the first step of a later block computes the block and as many rows before it.

    With `drift` (thesis, section 6.6.4) every layer of these passes but the first computes only rows whose V is further
    than that from the V in the cache, by cosine distance; the others add their cached outputs. Full passes and
    corrections compare nothing.
    """

    refresh_next: int = 4
    border: Literal["full", "neighbours"] = "full"
    drift: float | None = None

    def __post_init__(self) -> None:
        whole("refresh_next", self.refresh_next, low=0)
        one_of("border", self.border, BORDERS)
        if self.drift is not None:
            real("drift", self.drift, low=0, high=2)

    def plan(self, view: View) -> Plan:
        """As in every block-wise policy, but at borders where not all rows are computed."""
        begun = view.block if view.decoding.fresh is None else view.decoding.fresh
        # All rows are computed in the first step, and where the scope of a correction begins, behind the prompt.
        if self.border == "full" or view.block_step > 0 or view.step == 0 or begun.start == view.prompt:
            return Blockwise.plan(self, view)
        spans = view.over(max(0, begun.start - len(begun)), begun.stop)
        return Plan(spans, view.candidates & spans[0].rows, refreshes=True)

    def _kinds(self) -> tuple[ModelKind, ...]:
        return ("uniform",)

    def _keeps(self) -> frozenset[Kept]:
        return frozenset() if self.drift is None else frozenset({"outputs"})

    def _spans(self, view: View) -> Spans:
        touched = view.decoding.touched
        if touched is not None:
            return view.over_rows(touched) if touched.any() else view.over(0, view.length)
        stop = view.block.stop + (len(view.block) if self._renews(view) else 0)
        if self.drift is None:
            return view.over(view.block.start, stop)
        return view.spans(("drift", view.block.start, stop), partial(self._layered, view, stop))

    def _hook(self, view: View, spans: Spans) -> LayerHook | None:
        if self.drift is None or view.decoding.touched is not None:
            return None
        return Drift(spans[0].rows, self.drift)

    def _layered(self, view: View, stop: int) -> list[Span]:
        """The rows from the block up to `stop`, a span for each layer."""
        rows = view.rows(view.block.start, stop)
        return [Span(range(i, i + 1), rows) for i in range(view.layers)]

    def _predict(self, view: View, spans: Spans) -> Mask:
        return view.candidates if view.decoding.touched is None else view.candidates & spans[0].rows

    def _renews(self, view: View) -> bool:
        if view.decoding.touched is not None:
            return not view.decoding.touched.any()
        return self._may_renew(view) and (view.block_step + 1) % self.refresh_next == 0

    def _may_renew(self, view: View) -> bool:
        end = view.length if view.response is None else view.response
        return self.refresh_next > 0 and view.block.stop < end

    def repeats(self, view: View) -> int:
        """Until the next block is computed too. In a correction rows depend on what has changed."""
        if view.block_step == 0 or view.decoding.touched is not None:
            return 0
        if not self._may_renew(view):
            return ALWAYS
        left = -(view.block_step + 1) % self.refresh_next  # steps to the next one that renews; 0: this one does
        return max(0, left - 1)

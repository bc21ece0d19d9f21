"""`exact`: computes the committed K/V of a block-causal model once, because they never change."""

from dataclasses import dataclass

from remask.checks.values import whole
from remask.plan import Plan, Span, View
from remask.policies.base import ALWAYS, CachePolicy, Traits


@dataclass(frozen=True, slots=True)
class Exact(CachePolicy):
    """Computes the current block, and once more each block whose tokens have become final.

    The second computation of a block is its commit pass. It is merged with the first pass of the next block, and so is
    the end of the prompt's prefill. The last block has a commit pass only if its pages are to be shared. Requests share
    the pages of committed rows without loss.

    Where a row predicts the next position (Fast-dLLM v2), nothing is merged: the pass that commits a block, or ends the
    prompt's prefill, gives the next block its first token.

    Attributes:
        prefill_chunk: rows of a long prompt that one pass computes, rounded down to whole blocks. Later passes compute
            the rest, so that other requests do not stall.
    """

    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        whole("prefill_chunk", self.prefill_chunk, low=1)

    @property
    def traits(self) -> Traits:
        """For block-causal models only. Cached K/V are final, so requests can share their pages."""
        return Traits(kinds=("block_causal",), sharing="pages", by_clock=True)

    def repeats(self, view: View) -> int:
        """The block alone, after its first pass."""
        return ALWAYS if view.block_step > 0 and not view.opens else 0

    def plan(self, view: View) -> Plan:
        """A chunk of the prompt, or the current block with what is to be committed before it."""
        block = view.block
        if view.step == 0:
            chunk = max(len(block), self.prefill_chunk // len(block) * len(block))
            start = (0 if view.prefix is None else view.prefix.length) + view.pass_index * chunk
            if block.start - start > chunk:
                nothing = view.rows(0, 0)
                return Plan(view.over(start, start + chunk), nothing, commit=nothing)
        else:
            start = block.start - (len(block) if view.block_step == 0 else 0)
        if view.opens:
            return Plan((self._opening(view, start),), predict=view.first, commit=view.first)
        if view.shift and view.step > 0:
            start = block.start  # its opening pass has committed what is before it
        return Plan(view.over(start, block.stop), predict=view.candidates)

    def _opening(self, view: View, start: int) -> Span:
        """The uncommitted rows before the block, and always the last row before it, even if all rows are shared."""
        stop = view.block.start
        rows = view.rows(min(start, stop - len(view.block)), stop)
        leased = 0 if view.prefix is None else view.prefix.length
        frozen = rows & view.rows(0, leased)
        return Span(range(view.layers), rows, frozen=frozen if frozen.any() else None)

    def closing(self, view: View) -> Plan:
        """The last block's commit pass."""
        nothing = view.rows(0, 0)
        return Plan(view.over(view.block.start, view.block.stop), nothing, commit=nothing)

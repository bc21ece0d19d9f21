"""`exact`: computes the committed K/V of a block-causal model once, because they never change."""

from dataclasses import dataclass

import numpy as np

from remask.checks.fields import declare
from remask.checks.values import Whole
from remask.plan import Plan, Span, Spans, View
from remask.policies.base import ALWAYS, CachePolicy, Traits


@dataclass(frozen=True, slots=True)
class Exact(CachePolicy):
    """Computes the current block, and once more each block whose tokens have become final.

    The second computation of a block is its commit pass. It is merged with the first pass of the next block, as is the
    end of the prompt's prefill. The last block has a commit pass only if its pages are to be shared. Requests share the
    pages of committed rows exactly.

    If a row predicts the next position, the last row before a block is computed with the block until its first token
    is written. On Fast-dLLM v2 nothing is merged: the pass that commits a block, or ends the prompt's prefill, gives
    the next block its first token.

    If final rows are causal (Nemotron-Labs-Diffusion, DiffusionGemma), each pass computes the rows after the committed
    ones.
    """

    prefill_chunk: int = declare(
        512,
        Whole(1),
        "Rows of a long prompt that one pass computes, rounded down to whole blocks. Later passes compute the rest, "
        "so that other requests do not stall.",
    )

    # Cached K/V are final, so requests can share their pages.
    traits = Traits(kinds=("block_causal",), sharing="pages", exact=True, by_clock=True)

    def repeats(self, view: View) -> int:
        """After the first pass of a block, passes compute the block alone."""
        if view.committed is not None:
            return 0 if view.shift or view.committed < view.block.start else ALWAYS
        return ALWAYS if view.block_step > 0 and not view.led else 0

    def plan(self, view: View) -> Plan:
        """The block and all rows before it that are not committed yet; of a long prompt one chunk, as a fill pass."""
        if view.committed is not None:
            return self._causal_plan(view, view.committed)
        block = view.block
        nothing = view.rows(0, 0)
        if view.step == 0:
            assert view.sees is not None
            # Blocks at the ends of the grid may be shorter, so the longest one has the full length.
            length = int(np.unique(view.sees, return_counts=True)[1].max())
            chunk = max(length, self.prefill_chunk // length * length)
            leased = 0 if view.prefix is None else view.prefix.length
            chunk_start = leased + view.pass_index * chunk
            start = view.block_start(chunk_start) if view.pass_index else leased  # a lease may end within a block
            if chunk_start + chunk < block.start:
                return Plan(view.over(start, view.block_start(chunk_start + chunk)), nothing, transfer=nothing)
        else:
            start = view.block_start(block.start - 1) if view.block_step == 0 else block.start
        stop = block.start if view.opens else block.stop
        needs_predecessor = view.led and start >= block.start
        spans = self._with_predecessor(view, start, stop) if needs_predecessor else view.over(start, stop)
        return Plan(spans, view.first, transfer=view.first) if view.opens else Plan(spans, view.candidates)

    def _with_predecessor(self, view: View, start: int, stop: int) -> Spans:
        """The rows from `start` up to `stop`, and the row before the block, which predicts but keeps its cached K/V."""
        rows = view.rows(view.block.start - 1, stop)
        frozen = view.rows(view.block.start - 1, start)
        return view.spans(("led", start, stop), lambda: [Span(range(view.layers), rows, frozen=frozen)])

    def _causal_plan(self, view: View, committed: int) -> Plan:
        """The next chunk of a long prompt, or all rows from `committed` on that the block's predictions depend on."""
        start, stop = committed, view.block.stop - view.shift
        if view.step == 0:
            start = (0 if view.prefix is None else view.prefix.length) + view.pass_index * self.prefill_chunk
            if view.block.start - start > self.prefill_chunk:
                nothing = view.rows(0, 0)
                return Plan(view.over(start, start + self.prefill_chunk), nothing, transfer=nothing)
        # If all rows are shared, the last one is computed again, as it predicts.
        spans = self._with_predecessor(view, start, stop) if start == stop else view.over(start, stop)
        return Plan(spans, predict=view.candidates)

    def closing(self, view: View) -> Plan:
        nothing = view.rows(0, 0)
        return Plan(view.over(view.block.start, view.block.stop), nothing, transfer=nothing)

"""A running request with drafts beside its canvas (`SamplingParams.speculate`)."""

from collections.abc import Sequence

import numpy as np

from remask.engine.canvas_state import CanvasState
from remask.engine.drafting import same
from remask.engine.planned import CanvasPlans, Tally
from remask.engine.running import RequestLoop, RunningRequest, Scores
from remask.plan.spans import Positions
from remask.sampling.decoder import Transfers

_COMPUTED = Tally(cost=0, rows=0, forwards=0)  # of a step whose pass was run before, as a draft


class SpeculatingRequest(RunningRequest):
    """A running request of one canvas whose passes compute drafts too, as long as its claim has any."""

    __slots__ = ()

    def items(self) -> CanvasPlans:
        """See `PlannedRequest`: its canvas, and then its drafts."""
        drafting, planned = self.claim.drafting, self._items is not None
        own = super().items()
        if drafting is None and len(own) > 1:  # its drafts were taken after the pass was planned
            own = own[:1]
            self.revised(own)
        if drafting is None or planned:
            return own
        if self._standing is not None:
            first, plan = own[0]
            drafts = drafting.propose(first, self.decoder, self._last_pass, plan, self.repeated)
            own = (*own, *drafts)
        self.revised(own)
        return own

    @property
    def positions(self) -> Positions:
        """See `PlannedRequest`: those of drafts come after the canvas' own."""
        return np.concatenate([plan.predicted for _, plan in self.items()])

    @property
    def transfers(self) -> Transfers | None:
        """See `PlannedRequest`: the host must choose while there are drafts."""
        return None if self.claim.drafting is not None else super().transfers

    def offer(self, row_layers: int | None) -> int:
        """See `Member`: its pass is never cut, but without its drafts where it costs too much."""
        if row_layers is not None and self.tally.cost > row_layers:
            self.revised(self.items()[:1])
        return self.tally.cost

    def ran(self, loop: RequestLoop, scores: Scores) -> None:
        """See `Member`: its predictions are transferred, and those of drafts for as long as they come true."""
        drafting = self.claim.drafting
        items = self.items()
        if drafting is None or len(items) == 1:
            loop.settle(self, scores)
            return
        own, *others = _parts(scores, [len(plan.predicted) for _, plan in items])
        drafts = list(zip((draft for draft, _ in items[1:]), others, strict=True))
        loop.settle(self, own)
        accepted, usage = 0, self.record.usage
        while not self.released:
            known = next((scores for draft, scores in drafts if _came_true(self, draft)), None)
            if known is None:
                break
            accepted += 1
            usage.accepted = (usage.accepted or 0) + 1
            loop.settle(self, known)
        drafting.note(len(drafts), accepted)


def _came_true(running: RunningRequest, draft: CanvasState) -> bool:
    """Whether `draft`, which the last pass computed, is the canvas as it is now. Its pass is the next one then."""
    first, decoder = running.branches[0], running.decoder
    if decoder.finished or not same(draft.canvas, first.canvas, decoder.block):
        return False
    again = running.repeated(decoder, first.canvas.noisy)
    if again is not None:
        running.revised(((first, again),))
        running.tally = _COMPUTED
    return again is not None


def _parts(scores: Scores, counts: Sequence[int]) -> list[Scores]:
    """The scores of so many positions each, in order. The host chooses from them."""
    found, start = [], 0
    for count in counts:
        own = slice(start, start + count)
        start = own.stop
        shares = tuple((reader, numbers[:, own]) for reader, numbers in scores.shares)
        found.append(Scores(scores.tokens[own], scores.confidence[own], shares))
    return found

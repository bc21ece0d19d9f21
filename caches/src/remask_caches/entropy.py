"""`entropy-cache`: masks and recent tokens, and a full pass when a decoded token was uncertain."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from remask.checks.fields import declare
from remask.checks.values import Choice, Real, Whole
from remask.plan import Mask, Plan, RowMeasure, View
from remask.policies import CachePolicy, Schedule, Traits

ENTROPY = RowMeasure("entropy", "remask_caches.entropy_on_device:entropy")


@dataclass(frozen=True, slots=True)
class EntropyCache(CachePolicy):
    """EntropyCache (arXiv 2603.18489): an uncertain decoded token is taken as a sign that the caches are stale.

    The first pass is full. If the distribution of a token that the last step decoded has an entropy above `threshold`,
    the next pass is full too; else it computes the masks and the `recent` tokens that were decoded last, in all layers,
    and reads everything else from the cache.
    """

    threshold: float = declare(
        1.0, Real(0), "Nats, before temperature and filters; 0 makes every pass after a decoded token full."
    )
    recent: int = declare(
        64, Whole(0), "k, decoded tokens that are computed again. Of those of one step the leftmost go first."
    )
    masks: Literal["response", "block"] = declare(
        "response", Choice(("response", "block")), "Those of the whole response, or of the current block."
    )

    traits = Traits(schedule=Schedule("within_block"), measure=ENTROPY)

    def plan(self, view: View) -> Plan:
        """All rows, or the masks, the rows that predict them, and the recent tokens."""
        if view.step == 0 or self._uncertain(view):
            return Plan(view.over(0, view.length), view.candidates, refreshes=True)
        rows = (view.noisy if self.masks == "response" else view.candidates).copy()
        rows[np.flatnonzero(rows) - view.shift] = True
        rows[self._latest(view)] = True
        return Plan(view.over_rows(rows), view.candidates)

    def _uncertain(self, view: View) -> bool:
        """Whether the entropy of a token that the last step decoded exceeds the threshold."""
        last = view.last_pass
        if last.measured is None:
            return False
        decoded: Mask = view.settled[last.positions] == view.step - 1
        return bool((last.measured[decoded] > self.threshold).any())

    def _latest(self, view: View) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The `recent` positions that were decoded last, int64; those of one step from the left."""
        decoded = np.flatnonzero(~view.noisy & (view.settled >= 0))
        newest_first = np.argsort(-view.settled[decoded].astype(np.int64), kind="stable")
        return decoded[newest_first[: self.recent]]

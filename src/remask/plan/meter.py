"""How much of the K/V that passes attend to was cached, and how old it was."""

from dataclasses import dataclass

import numpy as np

from remask.plan.ledger import UNWRITTEN, Ledger
from remask.plan.plan import Plan


@dataclass(slots=True)
class CacheMeter:
    """Means over passes of canvases, read from their ledgers. Every pass counts once.

    Attributes:
        passes: passes noted.
        upper_bound: whether rows were chosen on the device. The ledger does not know which ones, so `staleness` is an
            upper bound: it counts all candidates as old as their last pass that was certain to compute them.
    """

    passes: int = 0
    upper_bound: bool = False
    _reused: float = 0.0
    _age: float = 0.0

    @property
    def cache_ratio(self) -> float:
        """Share of the canvas' K/V that a pass takes from the cache (dKV-Cache, arXiv 2505.15781, evaluation metrics).

        The paper divides the tokens whose K/V are reused in a step by all tokens, and takes the mean over steps. Its
        tokens are cached in all layers or in none; here the share is a mean over layers too.
        """
        return self._reused / self.passes if self.passes else 0.0

    @property
    def staleness(self) -> float:
        """Passes since the K/V that a pass attends to were written; 0 for those that it writes itself.

        The mean over positions, over the layers in which any row attends, and over passes. K/V of the prefix store
        count as written by a pass before the request's first. Cached attention and FFN outputs are not K/V.
        """
        return self._age / self.passes if self.passes else 0.0

    def note(self, ledger: Ledger, plan: Plan) -> None:
        """Count the pass of `plan`, which `ledger` has entered last. Neither is changed."""
        age = ledger.step - ledger.written
        known = ledger.written != UNWRITTEN  # all, except where a family's rows do not see what follows them
        attends = np.zeros(len(age), dtype=np.bool_)
        chosen = 0
        for span in plan.spans:
            attends[span.layers.start : span.layers.stop] = span.cost > 0
            if span.pick is not None:
                chosen += span.pick.count * len(span.layers)
                self.upper_bound = True
        self.passes += 1
        self._reused += (np.count_nonzero(age[known]) - chosen) / age.size
        seen = known & attends[:, None]
        if seen.any():
            self._age += float(age[seen].mean())

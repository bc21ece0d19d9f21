"""SlowFast sampling (arXiv 2506.10848): explore slowly until a span has converged, then decode it fast.

It rests on three observations of the paper: confident predictions are mostly right (certainty), predictions settle long
before they are decoded (convergence), and the settled ones stand side by side (position).
"""

import numpy as np
from numpy.typing import NDArray

from remask.core.slowfast import SlowFastKnobs
from remask.sampling import select


class SlowFast:
    """One block's place between the two stages. A cycle explores, then fills the span that it found.

    Slow stage: the span ends at the last candidate of at least `min_confidence`, or is the first candidate alone; the
    most confident candidates in it are transferred. When its end has been stable, or after `slow_steps`, the fast
    stage begins: every candidate of the span that reaches `threshold` is transferred, and always one, until none is
    left there. Everything before a span is final, so a span is known by its end.
    """

    def __init__(self, knobs: SlowFastKnobs) -> None:
        self.knobs = knobs
        self.end: int | None = None  # last position of the converged span; None in the slow stage
        self._ends: list[int] = []  # where the span ended in each slow step of this cycle

    def choose(self, candidates: NDArray[np.int64], confidence: select.Confidence) -> select.Chosen:
        """Which of `candidates`, the noisy positions of the block, ascending, are transferred now; at least one.

        Returns indices into them, ascending.
        """
        if self.end is not None and candidates[0] > self.end:
            self.end, self._ends = None, []
        if self.end is None:
            return self._explore(candidates, confidence)
        inside = int(np.searchsorted(candidates, self.end, side="right"))
        return select.above(confidence[:inside], self.knobs.threshold)

    def _explore(self, candidates: NDArray[np.int64], confidence: select.Confidence) -> select.Chosen:
        confident = np.flatnonzero(confidence >= self.knobs.min_confidence)
        last = int(confident[-1]) if len(confident) else 0
        self._ends.append(int(candidates[last]))
        if self._converged():
            self.end = self._ends[-1]
        return select.top(confidence[: last + 1], self.knobs.slow_tokens)

    def _converged(self) -> bool:
        if len(self._ends) >= self.knobs.slow_steps:
            return True
        window = self._ends[-self.knobs.window :]
        return len(window) == self.knobs.window and float(np.var(window)) <= self.knobs.variance

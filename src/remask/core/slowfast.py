"""SlowFast sampling (arXiv 2506.10848): explore slowly until a span has converged, then decode it fast.

It rests on three observations of the paper: confident predictions are mostly right (certainty), predictions settle long
before they are decoded (convergence), and the settled ones stand side by side (position).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.core import select
from remask.core.checks import POSITIONS, Real, Whole
from remask.core.fields import check, declare, parse


@dataclass(frozen=True, slots=True)
class SlowFastKnobs:
    """How SlowFast sampling explores and when it accelerates. Raises `ConfigError` on a value that is not allowed."""

    slow_tokens: int = declare(1, Whole(1, POSITIONS), "Positions transferred in a slow step.")
    slow_steps: int = declare(8, Whole(1, POSITIONS), "Slow steps after which the span is taken as it is.")
    min_confidence: float = declare(0.1, Real(0, 1), "The span ends at the last position at least this confident.")
    window: int = declare(2, Whole(1, POSITIONS), "Slow steps over which the span's end must be stable.")
    variance: float = declare(
        1.0, Real(0, 1e15), "The span's end is stable up to this variance over the window, in positions squared."
    )
    threshold: float = declare(
        0.85, Real(0, 1), "A fast step transfers every position of the span at least this confident."
    )

    def __post_init__(self) -> None:
        check(self, "slowfast.")

    @classmethod
    def from_mapping(cls, values: object) -> "SlowFastKnobs":
        """Knobs from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        return parse(cls, values, "slowfast", "slowfast knob")


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
        """Choose at least one of `candidates`, the noisy positions of the block, ascending, to be transferred now.

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

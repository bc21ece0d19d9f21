"""SlowFast sampling (arXiv 2506.10848): explore slowly until a span has converged, then decode it fast.

It rests on three observations of the paper: confident predictions are mostly right (certainty), predictions settle long
before they are decoded (convergence), and the settled ones stand side by side (position).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.checks.fields import check, declare
from remask.checks.values import POSITIONS, Flag, Real, Whole
from remask.denoising.rules import BlockFacts, Choose, Remasking, Step
from remask.denoising.select import Chosen, Confidence, above, top


@dataclass(frozen=True, slots=True)
class SlowFastConfig:
    """How SlowFast sampling explores and when it accelerates. Raises `ConfigError` on a value that is not allowed."""

    slow_tokens: int = declare(1, Whole(1, POSITIONS), "Positions transferred in a slow step.")
    slow_steps: int = declare(8, Whole(1, POSITIONS), "Slow steps after which the span is taken as it is.")
    min_confidence: float = declare(0.1, Real(0, 1), "The span ends at the last position at least this confident.")
    window: int = declare(2, Whole(1, POSITIONS), "Slow steps over which the span's end must be stable.")
    variance: float = declare(
        1.0, Real(0, 1e15), "The span's end is stable below this variance over the window, in positions squared."
    )
    threshold: float = declare(
        0.85, Real(0, 1), "A fast step transfers every position of the span at least this confident."
    )
    slow_threshold: float | None = declare(
        None,
        Real(0, 1),
        "A slow step transfers every position at least this confident too, where there are two.",
    )
    leave_early: bool = declare(
        True, Flag(), "Whether the slow stage ends when the span is stable; without it all slow steps are taken."
    )
    cut_tail: bool = declare(
        False, Flag(), "Whether fast steps but the first of a span neither compute nor attend to what stands after it."
    )

    def __post_init__(self) -> None:
        check(self, "remasking.config.")


class SlowFast:
    """One block's place between the two stages. A cycle explores, then fills the span that it found.

    Slow stage: the span ends at the last candidate of at least `min_confidence`, or is the first candidate alone. The
    most confident candidates of the whole block are transferred. When its end has been stable, the fast stage begins.
    Where that has not come about in `slow_steps`, the span ends at the mean of the last ends. Fast stage: every
    candidate of the span that reaches `threshold` is transferred, and always one, until none is left there. What stands
    before a span is final, so a span is known by its end.

    Attributes:
        end: the last position of the converged span; None in the slow stage.
        cut: with `cut_tail`, the position from which on the next step leaves out everything; None where it leaves out
            nothing.
    """

    def __init__(self, config: SlowFastConfig) -> None:
        self.config = config
        self.end: int | None = None
        self.cut: int | None = None
        self._ends: list[int] = []  # where the span ended in each slow step of this cycle

    def choose(self, candidates: NDArray[np.int64], confidence: Confidence) -> Chosen:
        """Choose at least one of `candidates`, the noisy positions of the block, ascending, to be transferred now.

        Returns indices into them, ascending.
        """
        if self.end is not None and candidates[0] > self.end:
            self.end, self._ends = None, []
        if self.end is None:
            return self._explore(candidates, confidence)
        inside = int(np.searchsorted(candidates, self.end, side="right"))
        chosen = above(confidence[:inside], self.config.threshold)
        self.cut = self.end + 1 if self.config.cut_tail and len(chosen) < inside else None
        return chosen

    def _explore(self, candidates: NDArray[np.int64], confidence: Confidence) -> Chosen:
        confident = np.flatnonzero(confidence >= self.config.min_confidence)
        self._ends.append(int(candidates[confident[-1] if len(confident) else 0]))
        self.end = self._converged()
        best = top(confidence, self.config.slow_tokens)
        if self.config.slow_threshold is None:
            return best
        sure = np.flatnonzero(confidence >= self.config.slow_threshold)
        return np.union1d(best, sure) if len(sure) > 1 else best

    def _converged(self) -> int | None:
        """Where the span ends that this cycle has found; None while it explores."""
        config, ends = self.config, self._ends
        last = len(ends) == config.slow_steps
        if not (last or config.leave_early):
            return None
        # Without an early end the first stable one counts, whenever it was.
        for stop in (len(ends),) if config.leave_early else range(1, len(ends) + 1):
            window = ends[max(0, stop - config.window) : stop]
            if len(window) == config.window and float(np.var(window)) < config.variance:
                return window[-1]
        return int(np.mean(ends[-config.window :])) if last else None


def begin(block: BlockFacts) -> Choose:
    """The choice in the steps of one block."""
    sampler = SlowFast(block.knobs.config)

    def choose(step: Step) -> Chosen:
        chosen = sampler.choose(step.positions, step.confidence)
        block.leave_out(sampler.cut)
        return chosen

    return choose


SLOWFAST = Remasking(
    "slowfast",
    "SlowFast sampling: a few while a span is explored, then all of it that are confident.",
    begin=begin,
    config=SlowFastConfig,
    counts="rule",
    uses_steps=False,
)

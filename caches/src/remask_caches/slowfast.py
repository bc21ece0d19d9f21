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
        None, Real(0, 1), "A slow step transfers every position at least this confident too, where there are two."
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
    """The state of one block. It alternates between a slow stage, which finds a span, and a fast one, which decodes it.

    Slow stage: each step transfers the most confident candidates of the whole block. The span ends at the last one of
    at least `min_confidence`, or at the first candidate. When that end has been stable, the fast stage begins, and
    after `slow_steps` without a stable end it begins with the mean of the last ends. Fast stage: each step transfers
    every candidate of the span that reaches `threshold`, and at least one, until the span has none. Positions before a
    span are final, so its end describes it.

    Attributes:
        end: the last position of the span; None in the slow stage.
        cut: first position of the tail that the next step leaves out, with `cut_tail`; None if it leaves out nothing.
    """

    def __init__(self, config: SlowFastConfig) -> None:
        self.config = config
        self.end: int | None = None
        self.cut: int | None = None
        self._ends: list[int] = []  # the span's end in each step of this slow stage

    def choose(self, candidates: NDArray[np.int64], confidence: Confidence) -> Chosen:
        """Choose at least one of `candidates`, the block's noisy positions, ascending, to transfer in this step.

        `confidence` is that of each candidate, 0 to 1. Returns indices into `candidates`, ascending.
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
        """`choose` in the slow stage; sets `end` when the span has converged."""
        confident = np.flatnonzero(confidence >= self.config.min_confidence)
        self._ends.append(int(candidates[confident[-1] if len(confident) else 0]))
        self.end = self._converged()
        most_confident = top(confidence, self.config.slow_tokens)
        if self.config.slow_threshold is None:
            return most_confident
        above_threshold = np.flatnonzero(confidence >= self.config.slow_threshold)
        return np.union1d(most_confident, above_threshold) if len(above_threshold) > 1 else most_confident

    def _converged(self) -> int | None:
        """The end of the converged span; None while the slow stage goes on."""
        config, ends = self.config, self._ends
        exhausted = len(ends) == config.slow_steps
        if not (exhausted or config.leave_early):
            return None
        # Where the stage does not end early, the first stable end counts, whenever it was.
        for stop in (len(ends),) if config.leave_early else range(1, len(ends) + 1):
            window = ends[max(0, stop - config.window) : stop]
            if len(window) == config.window and float(np.var(window)) < config.variance:
                return window[-1]
        return int(np.mean(ends[-config.window :])) if exhausted else None


def begin(block: BlockFacts) -> Choose:
    """The function that chooses positions in the steps of one block."""
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

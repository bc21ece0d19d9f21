"""`frontier`: the first open positions that the model is sure of, and more of them the longer it was sure of none."""

from dataclasses import dataclass

import numpy as np

from remask.checks.fields import check, declare
from remask.checks.values import Real, Whole
from remask.denoising.rules import BlockFacts, Remasking, Step
from remask.denoising.select import Chosen, top
from remask.plan import RowMeasure


@dataclass(frozen=True, slots=True)
class FrontierConfig:
    """The rule's own parameters."""

    reach: int = declare(8, Whole(1), "Open positions that a step looks at, from the left.")
    least: float = declare(0.5, Real(0, 1), "The collision probability from which on a position is filled.")

    def __post_init__(self) -> None:
        check(self, "remasking.config.")


class Frontier:
    """The rule in one block.

    Attributes:
        unsure: steps in a row in which no position was sure enough.
    """

    def __init__(self, block: BlockFacts) -> None:
        self.config: FrontierConfig = block.knobs.config
        self.leave_out = block.leave_out
        self.unsure = 0

    def __call__(self, step: Step) -> Chosen:
        """Indices into `step.positions`, ascending."""
        near = step.confidence[: self.config.reach]
        chosen = np.flatnonzero(near >= self.config.least)
        self.unsure = 0 if len(chosen) else self.unsure + 1
        if not len(chosen):
            chosen = top(near, self.unsure)
        left = np.delete(step.positions, chosen)
        # The next step computes nothing behind what it looks at.
        self.leave_out(int(left[self.config.reach]) if len(left) > self.config.reach else None)
        return chosen


FRONTIER = Remasking(
    "frontier",
    "The first open positions that the model is sure of.",
    begin=Frontier,
    config=FrontierConfig,
    measure=RowMeasure("collision", "remask_example.measures:collision"),
    counts="rule",
    uses_steps=False,
)

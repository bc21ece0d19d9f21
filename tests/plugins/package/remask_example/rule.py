"""`apart`: the most probable positions first, but never two neighbours in one step."""

import numpy as np

from remask.denoising.rules import Remasking, Step, every_block
from remask.denoising.select import Chosen


def choose(step: Step) -> Chosen:
    """Indices into `step.positions`, ascending."""
    chosen: list[int] = []
    for index in np.argsort(-step.confidence, kind="stable"):
        if len(chosen) < step.count and all(abs(step.positions[index] - step.positions[c]) > 1 for c in chosen):
            chosen.append(int(index))
    return np.sort(np.array(chosen, dtype=np.int64))


APART = Remasking(
    "apart",
    "The most probable first, never two neighbours in one step.",
    begin=every_block(choose),
)

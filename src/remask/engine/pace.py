"""How many states of a block a pass computes where what passes take decides it (`speculate="auto"`).

The seconds of passes over more and more rows, and over the same rows in more canvases, are measured once, on the
device, before the first request that asks. A pass that is bound by reading weights takes little longer for twice the
rows, and one that computes takes twice as long. On a CPU attention is called once a canvas, which small models notice.
"""

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkListBuilder

ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
LAYERS = 2  # of the model, which stand for all
CANVAS, BLOCK = 256, 32  # positions that a row attends to, and rows of a canvas
SHORT_BLOCK, SHORT_ROWS = 8, 64  # rows of a canvas, and of all, where what one more canvas takes is measured
TURNS = 3
LEAST_GAIN = 1.25  # planning drafts and reading them takes time too, which is not measured
COMPUTES = 1.8  # a pass that takes so many times as long for twice the rows is bound by computing them


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """What passes take.

    Attributes:
        rows: seconds over `ROWS` rows in canvases of `BLOCK` rows each, float64 [sizes].
        canvas: seconds that the same rows take longer for each canvas more that they lie in.
    """

    rows: NDArray[np.float64]
    canvas: float = 0.0


class Pace:
    """Weighs what drafts may save against what they take.

    Attributes:
        running: canvases that take part in passes now. All are taken to draft alike.
    """

    def __init__(self, measure: Callable[[], PassSeconds]) -> None:
        """`measure` returns what passes take; it is called once, when that is first needed."""
        self.running = 1
        self._measure = measure
        self._seconds: PassSeconds | None = None

    @classmethod
    def of(cls, model: Transformer) -> "Pace":
        """The pace of a model on its device."""
        return cls(partial(model.ranks.everywhere, pass_seconds, model))

    def states(self, rows: int, chance: float, most: int) -> int:
        """How many states of `rows` rows a pass computes, the present one and up to `most` - 1 drafts.

        Each draft comes true with this `chance`, if those before it do. The number is the one with the most steps a
        second, or 1 where that is less than `LEAST_GAIN` times as many as without drafts.
        """
        if self._seconds is None:
            self._seconds = self._measure()
        each = np.arange(1, most + 1)
        canvases = each * max(1, self.running)
        total = canvases * rows
        takes = np.interp(total, ROWS, self._seconds.rows) * np.maximum(1, total / ROWS[-1])
        takes += self._seconds.canvas * np.maximum(0, canvases - total / BLOCK)
        gain = np.cumsum(chance ** (each - 1.0)) / takes * takes[0]
        best = int(np.argmax(gain))
        return best + 1 if gain[best] >= LEAST_GAIN else 1


@torch.inference_mode()
def pass_seconds(model: Transformer) -> PassSeconds:
    """What passes of the first layers of `model` take: the least of a few turns each.

    From where a pass is bound by computing its rows, longer ones are not run, and their seconds follow from the rows:
    requests wait meanwhile.
    """
    short, device = copy(model), model.device
    short.weights, short.graphs = replace(model.weights, layers=model.weights.layers[:LAYERS]), None
    short.part = replace(model.part, layers=len(short.weights.layers))
    pool = Pool(short.part, 1, CANVAS + ROWS[-1], model.dtype, device)
    for tensor in (*pool.k, *pool.v):
        tensor.zero_()

    def least(rows: int, block: int) -> float:
        batch = _batch(len(short.weights.layers), rows, block, model.config.max_length, device)
        turns = []
        for _ in range(TURNS):
            start = time.perf_counter()
            short.forward(batch, pool)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            turns.append(time.perf_counter() - start)
        return min(turns)

    found: list[float] = []
    for before, rows in zip((0, *ROWS), ROWS, strict=False):
        if len(found) > 1 and found[-1] >= COMPUTES * found[-2]:
            found.append(found[-1] * rows / before)
        else:
            found.append(least(rows, BLOCK))
    longer = least(SHORT_ROWS, SHORT_BLOCK) - least(SHORT_ROWS, BLOCK)
    more = SHORT_ROWS // SHORT_BLOCK - SHORT_ROWS // BLOCK
    return PassSeconds(np.maximum.accumulate(np.array(found)), max(0.0, longer / more))


def _batch(layers: int, rows: int, block: int, longest: int, device: torch.device) -> StepBatch:
    """A pass over `rows` rows that attend to a canvas, `block` together, and write beside it."""
    work, every = WorkListBuilder(), torch.arange(rows, device=device)
    canvas = work.slots(np.arange(CANVAS))
    for start in range(0, rows, block):
        work.add(start, min(block, rows - start), canvas, CANVAS, None)
    stage = Stage(range(layers), every % min(CANVAS, longest), CANVAS + every, None, None, work.list())
    return StepBatch(torch.zeros_like(every), (stage,), every[:1], rows * layers)

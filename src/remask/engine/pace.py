"""How many states of a block a pass computes where what passes take decides it (`speculate="auto"`).

The seconds of passes over more and more rows are measured once, on the device, before the first request that asks. A
pass that is bound by reading weights takes little longer for twice the rows, and one that computes takes twice as long.
"""

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkListBuilder

Seconds = NDArray[np.float64]

ROWS = (8, 16, 32, 64, 128, 256, 512, 1024)
LAYERS = 2  # of the model, which stand for all
CANVAS, BLOCK = 256, 32  # positions that a row attends to, and rows that do so together
TURNS = 3
COMPUTES = 1.8  # a pass that takes so many times as long for twice the rows is bound by computing them


class Pace:
    """Weighs what drafts may save against what they take.

    Attributes:
        running: canvases that take part in passes now. All are taken to draft alike.
    """

    def __init__(self, measure: Callable[[], Seconds]) -> None:
        """`measure` returns the seconds of passes over `ROWS` rows; it is called once, when they are first needed."""
        self.running = 1
        self._measure = measure
        self._seconds: Seconds | None = None

    @classmethod
    def of(cls, model: Transformer) -> "Pace":
        """The pace of a model on its device."""
        return cls(partial(model.ranks.everywhere, pass_seconds, model))

    def states(self, rows: int, chance: float, most: int) -> int:
        """How many states of `rows` rows a pass computes, the present one and up to `most` - 1 drafts.

        Each draft comes true with this `chance`, if those before it do. The number is the one with the most steps a
        second.
        """
        if self._seconds is None:
            self._seconds = self._measure()
        each = np.arange(1, most + 1)
        total = each * rows * max(1, self.running)
        takes = np.interp(total, ROWS, self._seconds) * np.maximum(1, total / ROWS[-1])
        steps = np.cumsum(chance ** (each - 1.0))
        return int(np.argmax(steps / takes)) + 1


@torch.inference_mode()
def pass_seconds(model: Transformer) -> Seconds:
    """Seconds of the first layers of `model` over `ROWS` rows, float64 [sizes]: the least of a few turns.

    From where a pass is bound by computing its rows, longer ones are not run, and their seconds follow from the rows:
    requests wait meanwhile.
    """
    short, device = copy(model), model.device
    short.weights, short.graphs = replace(model.weights, layers=model.weights.layers[:LAYERS]), None
    short.part = replace(model.part, layers=len(short.weights.layers))
    pool = Pool(short.part, 1, CANVAS + ROWS[-1], model.dtype, device)
    for tensor in (*pool.k, *pool.v):
        tensor.zero_()
    found: list[float] = []
    for before, rows in zip((0, *ROWS), ROWS, strict=False):
        if len(found) > 1 and found[-1] >= COMPUTES * found[-2]:
            found.append(found[-1] * rows / before)
            continue
        batch = _batch(len(short.weights.layers), rows, model.config.max_length, device)
        turns = []
        for _ in range(TURNS):
            start = time.perf_counter()
            short.forward(batch, pool)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            turns.append(time.perf_counter() - start)
        found.append(min(turns))
    return np.maximum.accumulate(np.array(found))


def _batch(layers: int, rows: int, longest: int, device: torch.device) -> StepBatch:
    """A pass over `rows` rows that attend to a canvas, a block together, and write beside it."""
    work, every = WorkListBuilder(), torch.arange(rows, device=device)
    canvas = work.slots(np.arange(CANVAS))
    for start in range(0, rows, BLOCK):
        work.add(start, min(BLOCK, rows - start), canvas, CANVAS, None)
    stage = Stage(range(layers), every % min(CANVAS, longest), CANVAS + every, None, None, work.list())
    return StepBatch(torch.zeros_like(every), (stage,), every[:1], rows * layers)

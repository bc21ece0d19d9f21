"""The passes of audits: over copies of canvases, in pages that they claim for as long as they run."""

import math
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, plain_table
from remask.engine.capacity import logit_rows
from remask.engine.member import Turn
from remask.engine.memory import Memory
from remask.engine.pack import Target, pack
from remask.engine.runner import vocabulary_of
from remask.model.pool import Pool
from remask.model.stage import StepBatch
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Mask, Positions, Span, rows_of
from remask.sampling.decoder import Decoding
from remask.sampling.measures import divergence


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass of a request saw, of which nothing changes any more."""

    canvas: Canvas  # a copy
    predicted: Positions  # the positions that it could fill, int64 [predicted]
    sees: Reach | None  # how many leading positions each row attends to; None: all
    shift: int  # as the adapter, of the canvas
    adapter: str | None

    @classmethod
    def of(cls, turn: Turn) -> "Seen":
        """What the pass of `turn` saw, before its predictions are written."""
        state, plan = turn.items[0]
        canvas = copy(state.canvas)
        canvas.tokens, canvas.noisy = canvas.tokens.copy(), canvas.noisy.copy()
        return cls(canvas, turn.predicted, plan.sees, state.shift, state.adapter)

    @classmethod
    def first(cls, decoding: Decoding, shift: int, adapter: str | None) -> "Seen":
        """What the first pass of a masked model's request sees, whose rows attend to the whole canvas."""
        canvas, block = decoding.canvas(), decoding.block_ranges[0]
        places = np.arange(block.start, min(block.stop, len(canvas)))
        return cls(canvas, places[canvas.noisy[places]], None, shift, adapter)


class AuditPasses:
    """Runs the passes of audits of one engine."""

    def __init__(self, model: Transformer, memory: Memory) -> None:
        self.model, self.memory = model, memory
        shape = model.config
        self._target = Target(model.device, model.arithmetic.invariant, shape.sliding)

    def exact(self, seen: Seen, *, rounded: bool = True) -> Tensor | None:
        """Hidden states [predicted, D] of a pass over the whole canvas; `rounded`: as quantized; None: no room."""
        return self._run(seen, seen.sees, 0, rounded)

    def reusing(self, seen: Seen, prefix: int, depth: int) -> Tensor | None:
        """As `exact`, not rounded, of a canvas that reuses its first `prefix` rows in `depth` layers.

        Below the depth these rows attend to themselves alone, as in the pass that fills the store, and they go on from
        that state, as `bicache` does in a step that refreshes.
        """
        apart = np.full(len(seen.canvas), len(seen.canvas))
        apart[:prefix] = prefix
        return self._run(seen, apart, depth, rounded=False)

    def moved(self, reference: Tensor, predicted: Tensor) -> float:
        """Nats by which the row of hidden states [predicted, D] moves that moves most. Waits for the device."""
        step, parts = logit_rows(self.model.config), list[Tensor]()
        for start in range(0, len(reference), step):
            rows = slice(start, start + step)
            parts.append(self.model.ranks.everywhere(_diverged, self.model, reference[rows], predicted[rows]))
        greatest = float(torch.cat(parts).max())
        if math.isnan(greatest):
            raise ArithmeticError("predictions of an audit are not numbers")
        return greatest

    def _run(self, seen: Seen, sees: Reach | None, depth: int, rounded: bool) -> Tensor | None:
        """A pass in which rows see `sees` in the first `depth` layers, and what the canvas' own do in the others."""
        layers, allocator = self.model.config.layers, self.memory.allocator
        extent = allocator.allocate(len(seen.canvas), range(layers))
        if extent is None:
            return None
        try:
            state = CanvasState(
                seen.canvas,
                Ledger(layers, len(seen.canvas), None),
                (plain_table(extent),),
                shift=seen.shift,
                adapter=seen.adapter,
            )
            below, above = (self._packed(seen, state, reach) for reach in (sees, seen.sees))
            batch = _changing(below, above, depth, layers)
            return self.model.ranks.everywhere(_forward, self.model, batch, self.memory.pool, rounded)
        finally:
            allocator.release(extent)

    def _packed(self, seen: Seen, state: CanvasState, sees: Reach | None) -> StepBatch:
        last = len(seen.canvas) if seen.sees is None else int(seen.sees.max())
        predict: Mask = np.zeros(len(seen.canvas), dtype=np.bool_)
        predict[seen.predicted] = True
        rows = rows_of(range(last), len(seen.canvas))
        plan = Plan((Span(range(self.model.config.layers), rows),), predict=predict, sees=sees)
        return pack([(state, plan)], self._target)


def _changing(below: StepBatch, above: StepBatch, depth: int, layers: int) -> StepBatch:
    """The pass that is `below` in the first `depth` layers and `above` in the others; both have the same rows."""
    parts = ((below, range(depth)), (above, range(depth, layers)))
    return replace(above, stages=tuple(replace(batch.stages[0], layers=part) for batch, part in parts if part))


@torch.inference_mode()
def _forward(model: Transformer, batch: StepBatch, pool: Pool, rounded: bool) -> Tensor:
    return (model if rounded else model.without_rounding()).forward(batch, pool)


@torch.inference_mode()
def _diverged(model: Transformer, reference: Tensor, predicted: Tensor) -> Tensor:
    return divergence(model.head(reference), model.head(predicted), vocabulary_of(model))

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
class PassInput:
    """The input of a request's pass. Nothing changes it afterwards."""

    canvas: Canvas  # a copy
    predicted: Positions  # the positions that it predicts, int64 [predicted]
    sees: Reach | None  # how many leading positions each row attends to; None: all
    shift: int  # see `CanvasState`
    adapter: str | None  # see `CanvasState`

    @classmethod
    def of(cls, turn: Turn) -> "PassInput":
        """The input of the pass of `turn`, whose predictions must not be written yet."""
        state, plan = turn.items[0]
        canvas = copy(state.canvas)
        canvas.tokens = canvas.tokens.copy()
        canvas.noisy = canvas.noisy.copy()
        return cls(canvas, turn.predicted, plan.sees, state.shift, state.adapter)

    @classmethod
    def first_pass(cls, decoding: Decoding, shift: int, adapter: str | None) -> "PassInput":
        """The input of the first pass of a request to a masked model, whose rows attend to the whole canvas."""
        canvas, block = decoding.canvas(), decoding.block_ranges[0]
        positions = np.arange(block.start, min(block.stop, len(canvas)))
        return cls(canvas, positions[canvas.noisy[positions]], sees=None, shift=shift, adapter=adapter)


class AuditPasses:
    """Runs the passes of audits of one engine."""

    def __init__(self, model: Transformer, memory: Memory) -> None:
        self.model = model
        self.memory = memory
        self._target = Target(model.device, model.arithmetic.invariant, model.config.sliding)

    def run_exact(self, pass_input: PassInput, *, rounded: bool = True) -> Tensor | None:
        """Run a pass over the whole canvas. Returns hidden states [predicted, D], or None if memory has no room.

        If not `rounded`, products with quantized weights do not round rows.
        """
        return self._run(pass_input, pass_input.sees, depth=0, rounded=rounded)

    def run_reusing(self, pass_input: PassInput, prefix_length: int, depth: int) -> Tensor | None:
        """Run a pass without rounding that reuses the first `prefix_length` rows in `depth` layers; see `run_exact`.

        In these layers the prefix rows attend to themselves alone, as in the pass that fills the store. Above them they
        attend to the whole canvas, as under `bicache` in a step that refreshes.
        """
        sees = np.full(len(pass_input.canvas), len(pass_input.canvas))
        sees[:prefix_length] = prefix_length
        return self._run(pass_input, sees, depth=depth, rounded=False)

    def max_divergence(self, reference: Tensor, predicted: Tensor) -> float:
        """The largest divergence, in nats, of predictions from two hidden states of a row, [predicted, D] each.

        Waits for the device. Raises `ArithmeticError` if the divergence is not a number.
        """
        step = logit_rows(self.model.config)
        divergences = list[Tensor]()
        for start in range(0, len(reference), step):
            rows = slice(start, start + step)
            divergences.append(self.model.ranks.run_on_all(_divergences, self.model, reference[rows], predicted[rows]))
        result = float(torch.cat(divergences).max())
        if math.isnan(result):
            raise ArithmeticError("predictions of an audit are not numbers")
        return result

    def _run(self, pass_input: PassInput, sees: Reach | None, *, depth: int, rounded: bool) -> Tensor | None:
        """Run a pass whose rows attend by `sees` in the first `depth` layers, and by `pass_input.sees` above.

        Returns hidden states [predicted, D], or None if memory has no room for its pages, which are free afterwards.
        """
        layers, allocator = self.model.config.layers, self.memory.allocator
        extent = allocator.allocate(len(pass_input.canvas), range(layers))
        if extent is None:
            return None
        try:
            state = CanvasState(
                pass_input.canvas,
                Ledger(layers, len(pass_input.canvas), None),
                (plain_table(extent),),
                shift=pass_input.shift,
                adapter=pass_input.adapter,
            )
            below = self._pack(pass_input, state, sees)
            above = self._pack(pass_input, state, pass_input.sees)
            batch = _join(below, above, depth, layers)
            return self.model.ranks.run_on_all(_forward, self.model, batch, self.memory.pool, rounded)
        finally:
            allocator.release(extent)

    def _pack(self, pass_input: PassInput, state: CanvasState, sees: Reach | None) -> StepBatch:
        """The batch of a pass over all rows that a row of the audited pass may see. They attend by `sees`."""
        length = len(pass_input.canvas)
        stop = length if pass_input.sees is None else int(pass_input.sees.max())
        predict: Mask = np.zeros(length, dtype=np.bool_)
        predict[pass_input.predicted] = True
        rows = rows_of(range(stop), length)
        plan = Plan((Span(range(self.model.config.layers), rows),), predict=predict, sees=sees)
        return pack([(state, plan)], self._target)


def _join(below: StepBatch, above: StepBatch, depth: int, layers: int) -> StepBatch:
    """The pass that is `below` in the first `depth` layers and `above` in the others. Both have the same rows."""
    halves = ((below, range(depth)), (above, range(depth, layers)))
    return replace(above, stages=tuple(replace(half.stages[0], layers=span) for half, span in halves if span))


@torch.inference_mode()
def _forward(model: Transformer, batch: StepBatch, pool: Pool, rounded: bool) -> Tensor:
    return (model if rounded else model.without_rounding()).forward(batch, pool)


@torch.inference_mode()
def _divergences(model: Transformer, reference: Tensor, predicted: Tensor) -> Tensor:
    return divergence(model.head(reference), model.head(predicted), vocabulary_of(model))

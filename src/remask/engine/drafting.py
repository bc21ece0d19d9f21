"""Drafts: later states of a request's block, computed beside the present one (`speculate`; FreeDave, arXiv 2510.00294).

A pass is a function of the canvas and of K/V that it does not write itself. So where a step leaves the canvas as a
draft had it, under the plan that the draft was computed by, its pass has been run already, and what was read of it
holds. The tokens are those of a run without drafts, whatever was drafted.

A draft is a canvas of its own in the pass, and copies no context: it has K/V of its own where the plan writes, and
reads those of the request, or of the store, everywhere else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from remask.engine.canvas_state import CanvasState, SlotTable
from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkListBuilder
from remask.plan.canvas import Canvas
from remask.plan.plan import LastPass, Plan
from remask.plan.spans import Mask, Positions, Spans
from remask.sampling.decoder import Decoder
from remask.store.pages import PageRange

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
        running: members that take part in passes now. Each is taken for one canvas, and all to draft alike.
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
        # Which passes are run follows from their seconds, so all ranks go by those of the slowest.
        return float(model.ranks.gather(torch.tensor([min(turns)], dtype=torch.float64, device=device)).max())

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
    attended, positions = work.list(), every % min(CANVAS, longest)
    # Rows that see their neighbours alone take less: an upper estimate.
    stage = Stage(range(layers), positions, CANVAS + every, None, None, attended, attended)
    return StepBatch(torch.zeros_like(every), (stage,), every[:1], rows * layers)


Repeated = Callable[[Decoder, Mask], Plan | None]
"""The plan of a later step, given its decoder and its noisy positions, where the last one repeats; else None."""


MOST_PACED = 8  # states of a pass where their number follows the load


@dataclass(slots=True)
class Drafting:
    """The drafts of one request.

    Attributes:
        extents: K/V pages of each draft, the same in all layers.
        pace: what decides how many a pass has; None: as many as there are.
    """

    extents: Sequence[PageRange]
    pace: Pace | None = None
    _accepted: int = field(init=False, default=0)  # drafts that came true
    _missed: int = field(init=False, default=0)  # passes with a draft that did not
    _weighed: tuple[Spans, tuple[int, ...], int] | None = field(init=False, default=None)  # what was chosen, for what
    _spans: Spans | None = field(init=False, default=None)  # what the canvases below were made for
    _canvases: list[CanvasState] = field(init=False, default_factory=list)

    def propose(
        self, first: CanvasState, decoder: Decoder, last: LastPass, plan: Plan, repeated: Repeated
    ) -> Iterator[tuple[CanvasState, Plan]]:
        """Drafts of the states that follow the canvas `first`, each with its plan; `plan` is that of the canvas itself.

        Each state is the one before after a step that predicts what the last pass did. They end with the block, with
        what the last pass predicted, and where `plan` does not repeat. They are valid until they are asked for again.
        """
        number = self._number(plan)
        if not number:
            return
        before, block = first.canvas, decoder.block
        left = block.start + before.noisy[block.start : block.stop].nonzero()[0]
        if not len(left) or not np.isin(left, last.positions).all():
            return
        for draft in self._made(first, plan.spans, number):
            at = np.searchsorted(last.positions, left)
            written = decoder.choose(left, last.token_ids[at], last.confidences[at])
            if not len(written):
                return
            _follow(draft.canvas, before, written, last.token_ids[np.searchsorted(last.positions, written)], decoder)
            draft.unsent = None  # all of it is new
            decoder, before = decoder.ahead(draft.canvas), draft.canvas
            again = None if decoder.finished else repeated(decoder, before.noisy)
            if again is None:
                return
            yield draft, again
            left = left[before.noisy[left]]

    def note(self, drafts: int, accepted: int) -> None:
        """Take in how many of the `drafts` of a pass came true."""
        self._accepted += accepted
        self._missed += accepted < drafts

    def _number(self, plan: Plan) -> int:
        """How many drafts stand beside the pass of `plan`."""
        if self.pace is None:
            return len(self.extents)
        load = self.pace.running, self._accepted, self._missed
        if self._weighed is None or self._weighed[0] is not plan.spans or self._weighed[1] != load:
            chance = (self._accepted + 2) / (self._accepted + self._missed + 3)  # as if of three, two had come true
            number = self.pace.states(plan.widest, chance, len(self.extents) + 1) - 1
            self._weighed = plan.spans, load, number
        return self._weighed[2]

    def _made(self, first: CanvasState, spans: Spans, number: int) -> Sequence[CanvasState]:
        """Canvases for `number` drafts of `first` under plans of these `spans`. They are kept as long as these stay."""
        if self._spans is not spans:
            self._spans, self._canvases = spans, []
        for each in self.extents[len(self._canvases) : number]:
            written = np.logical_or.reduce([span.written for span in spans]).nonzero()[0]
            self._canvases.append(_beside(first, written, each.slots()))
        return self._canvases[:number]


def same(draft: Canvas, canvas: Canvas, block: range) -> bool:
    """Whether a draft of `canvas` in this block is what has become of it."""
    here = slice(block.start, block.stop)
    return np.array_equal(draft.noisy[here], canvas.noisy[here]) and np.array_equal(
        draft.tokens[here], canvas.tokens[here]
    )


def _follow(draft: Canvas, before: Canvas, positions: Positions, tokens: NDArray[np.int64], decoder: Decoder) -> None:
    """Make `draft` the canvas `before` after a step of `decoder` that writes `tokens`. Its arrays stay the same."""
    for mine, theirs in ((draft.tokens, before.tokens), (draft.noisy, before.noisy), (draft.settled, before.settled)):
        np.copyto(mine, theirs)
    draft.write(positions, tokens)
    draft.settle(positions, decoder.step)


def _beside(first: CanvasState, written: Positions, slots: NDArray[np.int64]) -> CanvasState:
    """A canvas that reads what `first` reads, and has the first of `slots` at the positions `written`."""
    canvas = copy(first.canvas)
    canvas.tokens, canvas.noisy, canvas.settled = canvas.tokens.copy(), canvas.noisy.copy(), canvas.settled.copy()
    tables = []
    for table in first.tables:
        own = table.slots.copy()
        own[written] = slots[: len(written)]
        tables.append(SlotTable(table.layers, own, table.common, own[len(own) - len(table.own) :]))
    return CanvasState(
        canvas=canvas,
        ledger=first.ledger.fork(),
        tables=tuple(tables),
        lease=first.lease,
        restored=first.restored,
        shift=first.shift,
        adapter=first.adapter,
        prefix=first.prefix,
        chain=first.chain,
    )

"""Passes over whole canvases without an engine: all rows in all layers, no cache."""

from collections.abc import Sequence

import numpy as np

from remask.engine.canvas_state import CanvasState, plain_table
from remask.engine.pack import pack
from remask.model.stage import StepBatch
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.plan.ledger import Ledger
from remask.plan.plan import Plan, Reach
from remask.plan.spans import Mask, Span
from remask.store.pages import PageRange


def pack_uncached(
    model: Transformer,
    canvases: Sequence[Canvas],
    predict: Sequence[Mask] | None = None,
    sees: Sequence[Reach | None] | None = None,
) -> StepBatch:
    """A pass over `canvases`, whose K/V go to consecutive slots: those of the first from slot 0 on, and so forth.

    The pool that the pass runs on needs pages of one slot. `predict` are the positions whose hidden states the pass
    returns, bool [T] for each canvas; None returns none. `sees` is how many leading positions each row attends to,
    int64 [T] for each canvas; None: all.
    """
    layers, items, slot = range(model.config.layers), [], 0
    for index, canvas in enumerate(canvases):
        tokens = len(canvas)
        own = PageRange(layers, np.arange(slot, slot + tokens), 1, tokens)
        state = CanvasState(canvas, Ledger(len(layers), tokens, None), (plain_table(own),), shift=model.config.shift)
        rows = np.ones(tokens, dtype=np.bool_)
        reach = None if sees is None else sees[index]
        wanted = ~rows if predict is None else predict[index]
        items.append((state, Plan((Span(layers, rows),), predict=wanted, sees=reach)))
        slot += tokens
    return pack(items, model.device)

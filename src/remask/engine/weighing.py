"""Attention that a pass tells once it has run: how much some rows attend to each of some positions, over all layers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Plan
from remask.engine.canvas_state import CanvasState
from remask.engine.drift_watcher import Asked, look
from remask.engine.stage_rows import Index, send_run
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.sending import fetch, send


def weigh(model: Transformer, pool: Pool, items: Sequence[tuple[CanvasState, Plan]]) -> None:
    """Put what the plans of `items`, which have run, tell of attention into `CanvasState.weights`.

    Waits for the device where there is anything to tell, once for all canvases.
    """
    told = [(branch, plan.weigh) for branch, plan in items if plan.weigh is not None]
    if not told:
        return
    places = [(branch, weigh.rows.nonzero()[0], weigh.among.nonzero()[0]) for branch, weigh in told]
    layers = range(model.config.layers)
    masses = [[mass for mass, _ in look(model, pool, layer, _asked(model, layer, places))] for layer in layers]
    totals = [torch.stack(each).sum(0) for each in zip(*masses, strict=True)]
    ends = np.cumsum([len(each) for each in totals])[:-1]
    for (branch, _, among), found in zip(places, np.split(fetch(torch.cat(totals)), ends), strict=True):
        branch.weights = np.zeros(len(branch.canvas), dtype=np.float32)
        branch.weights[among] = found


def _asked(model: Transformer, layer: int, places: Sequence[tuple[CanvasState, Index, Index]]) -> list[Asked]:
    """The attention of each canvas' rows in `layer`, over some of its positions alone."""
    asked = []
    for branch, rows, among in places:
        states: Tensor | None = None
        if layer:
            assert branch.states is not None
            states = branch.states[layer - 1]
        numbers = rows if layer else branch.canvas.tokens[rows]
        slots = send_run(branch.slots(layer)[among], model.device)
        asked.append(Asked(states, send(numbers, model.device), slots, rows, len(rows)))
    return asked

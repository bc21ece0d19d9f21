"""Rows whose V has hardly moved: what a layer is about to compute is compared with the cache, and they are held."""

import numpy as np
import torch
from torch import Tensor

from remask.core.plan import Plan
from remask.core.spans import Span
from remask.engine.canvas_state import CanvasState
from remask.models.pool import Pool
from remask.models.stage import Stage
from remask.models.transformer import Transformer
from remask.sending import fetch, send


def hold_still_rows(
    model: Transformer, pool: Pool, stage: Stage, h: Tensor, items: list[tuple[CanvasState, Plan]]
) -> bool:
    """Compare what `stage` is about to compute where plans ask for it. Puts the plans with held rows into `items`.

    `h` is the output of the stage before. Waits for the device once, for all canvases together, where a plan asks.
    Returns whether one did.
    """
    layer, start = stage.layers.start, 0
    asking: list[tuple[int, Span]] = []
    rows, slots = [], []
    for number, (branch, plan) in enumerate(items):
        span = plan.spans.at(layer)
        if span.drift is not None and not span.drift.compared and span.layers.start == layer:
            among = np.flatnonzero(span.drift.among)
            asking.append((number, span))
            rows.append(start + np.searchsorted(span.positions, among))
            slots.append(branch.slots(layer)[among])
        start += len(span.positions)
    if not asking:
        return False
    sent = send(np.stack([np.concatenate(rows), np.concatenate(slots)]), model.device)
    similarity = fetch(model.ranks.everywhere(_stillness, model, stage, h, pool, sent[0], sent[1]))
    ends = np.cumsum([len(each) for each in rows])[:-1]
    for (number, span), each in zip(asking, np.split(similarity, ends), strict=True):
        assert span.drift is not None
        held = span.drift.among.copy()
        held[held] = each >= 1 - span.drift.threshold
        branch, plan = items[number]
        items[number] = branch, plan.holding(layer, held)
    return True


@torch.inference_mode()
def _stillness(model: Transformer, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
    return model.stillness(stage, h, pool, rows, slots)

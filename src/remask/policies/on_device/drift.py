"""Uniform-Cache with drift: rows whose V has hardly moved are held, before their layer computes them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.machine.transfers import fetch, send
from remask.model.pool import Pool
from remask.model.stage import Stage
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.policies.drift import Drift
from remask.policies.on_device.base import Changed, DeviceHook


class HoldStillRows(DeviceHook):
    """Compares what each layer is about to compute with the cache."""

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:
        """See `DeviceHook`. Waits for the device once, for all canvases together, where a plan asks."""
        layer = stage.layers.start
        starts = np.cumsum([0, *(len(plan.spans.at(layer).positions) for plan in plans)])
        asking: list[tuple[int, Drift]] = []
        rows, slots = [], []
        for each in self.canvases:
            plan = plans[each.number]
            span = plan.spans.at(layer)
            if isinstance(plan.hook, Drift) and plan.hook.compares(span) and span.layers.start == layer:
                among = np.flatnonzero(plan.hook.among)
                asking.append((each.number, plan.hook))
                rows.append(starts[each.number] + np.searchsorted(span.positions, among))
                slots.append(each.branch.slots(layer)[among])
        if not asking:
            return {}
        model = self.model
        sent = send(np.stack([np.concatenate(rows), np.concatenate(slots)]), model.device)
        similarity = fetch(model.ranks.everywhere(_stillness, model, stage, h, self.pool, sent[0], sent[1]))
        ends = np.cumsum([len(each) for each in rows])[:-1]
        changed = {}
        for (number, drift), found in zip(asking, np.split(similarity, ends), strict=True):
            held = drift.among.copy()
            held[held] = found >= 1 - drift.threshold
            changed[number] = drift.hold(plans[number], layer, held)
        return changed


@torch.inference_mode()
def _stillness(model: Transformer, stage: Stage, h: Tensor, pool: Pool, rows: Tensor, slots: Tensor) -> Tensor:
    return model.stillness(stage, h, pool, rows, slots)

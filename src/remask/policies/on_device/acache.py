"""ACache after a pass: how much some rows attend to each of some positions, over all layers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.machine.transfers import fetch, send
from remask.model.row_attention import AskedRows, look
from remask.model.runs import Index, send_run
from remask.model.transformer import Transformer
from remask.policies.acache import Weigh
from remask.policies.on_device.base import DeviceHook, HookedCanvas


class AttentionScores(DeviceHook):
    """Reports the attention that the plans ask for to the policy: float32 [T], 0 at other positions."""

    def done(self) -> None:
        """See `DeviceHook`. Waits for the device once for all canvases."""
        model = self.model
        places = [
            (each.branch, each.plan.hook.rows.nonzero()[0], each.plan.hook.among.nonzero()[0])
            for each in self.canvases
            if isinstance(each.plan.hook, Weigh)
        ]
        layers = range(model.config.layers)
        masses = [[mass for mass, _ in look(model, self.pool, layer, _asked(model, layer, places))] for layer in layers]
        totals = [torch.stack(each).sum(0) for each in zip(*masses, strict=True)]
        ends = np.cumsum([len(each) for each in totals])[:-1]
        for (branch, _, among), found in zip(places, np.split(fetch(torch.cat(totals)), ends), strict=True):
            branch.hook_output = np.zeros(len(branch.canvas), dtype=np.float32)
            branch.hook_output[among] = found


def _asked(model: Transformer, layer: int, places: Sequence[tuple[HookedCanvas, Index, Index]]) -> list[AskedRows]:
    """The attention of each canvas' rows in `layer`, over some of its positions alone."""
    asked = []
    for branch, rows, among in places:
        states: Tensor | None = None
        if layer:
            assert branch.states is not None
            states = branch.states[layer - 1]
        numbers = rows if layer else branch.canvas.tokens[rows]
        slots = send_run(branch.slots(layer)[among], model.device)
        asked.append(AskedRows(states, send(numbers, model.device), slots, rows, len(rows)))
    return asked

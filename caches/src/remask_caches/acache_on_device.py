"""The device's part of `acache`: it sums attention after a pass."""

import numpy as np
import torch

from remask.machine.transfers import fetch
from remask.policies.on_device import AttendingRows, DeviceHook
from remask_caches.acache import Weigh


class AttentionScores(DeviceHook):
    """Reports the summed attention to the positions `Weigh.among`, float32 [T], 0 at other positions."""

    def after_pass(self) -> None:
        """Sum and report for all canvases. Waits for the device once."""
        queries = list[AttendingRows]()
        for canvas in self.canvases:
            assert isinstance(canvas.plan.hook, Weigh)
            rows, among = canvas.plan.hook.rows.nonzero()[0], canvas.plan.hook.among.nonzero()[0]
            queries.append(AttendingRows(canvas.branch, rows, len(rows), among))
        layers = range(self.canvases[0].plan.spans.layers)
        layer_masses = [[mass for mass, _ in self.attention(layer, queries)] for layer in layers]
        totals = [torch.stack(masses).sum(0) for masses in zip(*layer_masses, strict=True)]
        ends = np.cumsum([len(total) for total in totals])[:-1]
        for query, total in zip(queries, np.split(fetch(torch.cat(totals)), ends), strict=True):
            attention = np.zeros(len(query.branch.canvas), dtype=np.float32)
            attention[query.key_positions] = total
            query.branch.hook_output = attention

"""What `acache` does on the device once a pass has run: it sums attention."""

import numpy as np
import torch

from remask.machine.transfers import fetch
from remask.policies.on_device import AttendingRows, DeviceHook
from remask_caches.acache import Weigh


class AttentionScores(DeviceHook):
    """Reports the attention that the plans ask for to the policy: float32 [T], 0 at other positions."""

    def after_pass(self) -> None:
        """Waits for the device once for all canvases."""
        asked = list[AttendingRows]()
        for each in self.canvases:
            assert isinstance(each.plan.hook, Weigh)
            rows, among = each.plan.hook.rows.nonzero()[0], each.plan.hook.among.nonzero()[0]
            asked.append(AttendingRows(each.branch, rows, len(rows), among))
        layers = range(self.canvases[0].plan.spans.layers)
        masses = [[mass for mass, _ in self.attention(layer, asked)] for layer in layers]
        totals = [torch.stack(each).sum(0) for each in zip(*masses, strict=True)]
        ends = np.cumsum([len(each) for each in totals])[:-1]
        for rows_of, found in zip(asked, np.split(fetch(torch.cat(totals)), ends), strict=True):
            attention = np.zeros(len(rows_of.branch.canvas), dtype=np.float32)
            attention[rows_of.key_positions] = found
            rows_of.branch.hook_output = attention

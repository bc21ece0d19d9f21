"""Attention of rows to their neighbours, where only the device knows which rows they are."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.model.attention import Sink
from remask.model.stage import Neighbours

ROWS = 256  # whose keys and values are copied at a time


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, near: Neighbours, reach: int, sink: Sink | None = None, cap: float | None = None
) -> Tensor:
    """Attention [N, heads * Dh] of rows `q` [N, heads, Dh] to `reach` positions to each side. Their own K/V are there.

    `k`, `v`, `sink` and `cap` are as of `Attention`, which is for rows that the host knows. The host does not wait.
    """
    wide, groups, dim = torch.promote_types(q.dtype, torch.float32), k.shape[1], q.shape[2]
    offsets, parts = torch.arange(-reach, reach + 1, device=q.device), [q[:0].flatten(1)]
    for rows, places in zip(torch.split(q, ROWS), torch.split(near.places, ROWS, 1), strict=True):
        own, first, end = places[:, :, None]
        at = own + offsets
        seen = (at >= first) & (at < end)
        # What a row does not see may be unwritten, so its own slot is read instead.
        slots = near.slots[torch.where(seen, at, own)]
        keys, values = (kept[slots].to(wide) for kept in (k, v))
        if sink is not None:
            seen = F.pad(seen, (0, 1), value=True)
            alike = (one.to(wide).expand(len(rows), 1, -1, -1) for one in sink)
            keys, values = (torch.cat(pair, 1) for pair in zip((keys, values), alike, strict=True))
        asking = rows.to(wide).view(len(rows), groups, -1, dim) * (1 / math.sqrt(dim))
        scores = torch.einsum("ngsd,nwgd->ngsw", asking, keys)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        parts.append(torch.einsum("ngsw,nwgd->ngsd", weights, values).flatten(1).to(q.dtype))
    return torch.cat(parts)

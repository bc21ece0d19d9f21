"""Attention with capped scores and a learned key that every row sees (GIDD). PyTorch's attention has neither."""

import math

import torch
from torch import Tensor

from remask.errors import PlanError
from remask.models.attention import Sink
from remask.models.stage import Direct, Segments

TILE = 256  # rows whose scores exist at a time


class CappedAttention:
    """Softmax over cap * tanh(score / cap) of the slots that a row sees, and of the sink."""

    def __init__(self, cap: float | None) -> None:
        self.cap = cap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, sink: Sink | None = None) -> Tensor:
        """See `Attention`. Raises `PlanError` for shared prefixes: no policy for such models reads one."""
        out = torch.empty_like(q)
        for segment in segments:
            if not isinstance(segment, Direct):
                raise PlanError("a model with capped attention reads no shared prefix")
            keys, values = k[segment.keys].permute(1, 2, 0), v[segment.keys].transpose(0, 1)
            start, stop, _ = segment.rows.indices(len(q))
            for at in range(start, stop, TILE):
                rows = slice(at, min(at + TILE, stop))
                visible = None if segment.visible is None else segment.visible[at - start : rows.stop - start]
                out[rows] = self._attend(q[rows], keys, values, visible, sink)
        return out.flatten(1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, sink: Sink | None) -> Tensor:
        """Returns [n, heads, Dh] from `q` [n, heads, Dh], `keys` [kv heads, Dh, m] and `values` [kv heads, m, Dh]."""
        n, heads, dim = q.shape
        groups = keys.shape[0]
        # [kv heads, query heads of the kv head * rows, Dh]
        q = (q * (1 / math.sqrt(dim))).view(n, groups, -1, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
        scores = self._capped((q @ keys).float())
        if visible is not None:
            scores.masked_fill_(~visible.repeat(heads // groups, 1), -math.inf)
        top = scores.amax(dim=-1, keepdim=True)
        if sink is not None:
            extra = self._capped((q @ sink[0][:, :, None]).float())
            top = torch.maximum(top, extra)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        out = weights.to(values.dtype) @ values
        if sink is not None:
            share = extra.sub_(top).exp_()
            total += share
            out += share.to(out.dtype) * sink[1][:, None, :]
        out = out / total.to(out.dtype)
        return out.view(groups, heads // groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)

    def _capped(self, scores: Tensor) -> Tensor:
        """The capped scores, computed in place."""
        return scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)

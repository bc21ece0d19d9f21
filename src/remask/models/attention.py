"""Attention over K/V slots. Segments describe which slots a row sees; there is no mask of the whole batch."""

import math
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from remask.models.stage import Cascade, Direct, Segments

Sink: TypeAlias = tuple[Tensor, Tensor]


class Attention(Protocol):
    """Attention of rows to the slots that `segments` name. It neither changes nor keeps its inputs."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, sink: Sink | None = None) -> Tensor:
        """Returns [N, heads * Dh] from `q` [N, heads, Dh] and one layer's `k` and `v` [slots, kv_heads, Dh].

        `sink` is a key and a value, [kv_heads, Dh] each. Every row attends to it and to its slots.
        """
        ...


class SdpaAttention:
    """Attention by PyTorch operations, on any device.

    A canvas whose K/V lie in one run is passed to `scaled_dot_product_attention` without a copy. Where rows read a
    common run and slots of their own, one softmax covers the scores of both. So the common run is read once for all
    rows, and never copied.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, sink: Sink | None = None) -> Tensor:  # noqa: ARG002
        """See `Attention`. Models with a sink use `CappedAttention`."""
        if not segments:  # no row of the stage is computed
            return q.flatten(1)
        parts = []
        for segment in segments:
            rows = q[segment.rows]
            parts.append(_direct(rows, k, v, segment) if isinstance(segment, Direct) else _cascade(rows, k, v, segment))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _direct(q: Tensor, k: Tensor, v: Tensor, segment: Direct) -> Tensor:
    rows, heads, dim = q.shape
    keys, values = k[segment.keys].transpose(0, 1)[None], v[segment.keys].transpose(0, 1)[None]
    groups = k.shape[1]
    visible = segment.visible
    if groups == heads:
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, visible)
        return out[0].transpose(0, 1)
    # Query heads that share a key head are further rows of that head.
    grouped = q.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(1, groups, -1, dim)
    if visible is not None:
        visible = visible.repeat(heads // groups, 1)
    out = F.scaled_dot_product_attention(grouped, keys, values, visible)
    return out.view(groups, heads // groups, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _cascade(q: Tensor, k: Tensor, v: Tensor, segment: Cascade) -> Tensor:
    heads, dim = q.shape[1:]
    groups, members = k.shape[1], segment.own.shape[0]
    if segment.queries is not None:
        q = q[segment.queries.flatten()]
    # [kv heads, members, query heads of the kv head * rows, Dh]
    q = q.view(members, -1, groups, heads // groups, dim).permute(2, 0, 3, 1, 4).reshape(groups, members, -1, dim)
    q = q * (1 / math.sqrt(dim))
    flat = q.flatten(1, 2)
    own_k = k[segment.own].permute(2, 0, 3, 1)  # [kv heads, members, Dh, M]
    own_v = v[segment.own].permute(2, 0, 1, 3)  # [kv heads, members, M, Dh]
    own = q @ own_k
    if segment.hidden is not None:
        hidden = segment.hidden if segment.hidden.shape[1] == 1 else segment.hidden.repeat(1, heads // groups, 1)
        own = own.masked_fill(hidden, -math.inf)
    widths = [run.stop - run.start for run in segment.common]
    common = [(flat @ k[run].permute(1, 2, 0)).view(*q.shape[:3], -1) for run in segment.common]
    weights = torch.cat([*common, own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    *parts, last = torch.split(weights, [*widths, own.shape[-1]], dim=-1)
    out = last @ own_v
    for run, part in zip(segment.common, parts, strict=True):
        out += (part.flatten(1, 2) @ v[run].transpose(0, 1)).view_as(out)
    out = out.view(groups, members, heads // groups, -1, dim).permute(1, 3, 0, 2, 4).reshape(-1, heads, dim)
    return out if segment.back is None else out[segment.back]

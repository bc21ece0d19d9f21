"""Regions of a canvas, as seen from the block that is denoised, and the attention that the block gives to each."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.model.attention import Attention, Sink
from remask.model.work_list import WorkList

REGIONS = ("bias", "prompt", "rest_past", "previous", "current", "next", "rest_future", "trailing")
SINK = REGIONS.index("bias")  # the learned key of models that have one: it stands at no position
TILE = 128  # queries whose probabilities exist at a time

Regions = NDArray[np.int8]


def regions(length: int, prompt: int, end: int, start: int, block: int) -> Regions:
    """The region of every position of a canvas, int8 [length], as an index into `REGIONS`.

    The response is the positions from `prompt` to `end`, the current block the `block` positions from `start` on. What
    follows the last block that holds a response position is trailing. A prompt that reaches into the current block is
    current there, as it is computed with the block.
    """
    places = np.arange(length)
    distance = (places - start) // block
    region = np.full(length, REGIONS.index("rest_future"), dtype=np.int8)
    region[distance < -1] = REGIONS.index("rest_past")
    for name, away in (("previous", -1), ("next", 1)):
        region[distance == away] = REGIONS.index(name)
    region[places < prompt] = REGIONS.index("prompt")
    region[distance == 0] = REGIONS.index("current")
    region[distance > (end - 1 - start) // block] = REGIONS.index("trailing")
    return region


def words(region: str) -> str:
    """The name of a region as text."""
    return region.replace("_", " ")


class QueryTap:
    """An attention that keeps the queries of the pass, layer after layer, and otherwise is the one that it wraps."""

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.queries: list[Tensor] = []  # [rows, heads, Dh] each, after RoPE

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """See `Attention`."""
        self.queries.append(q)
        return self.inner(q, k, v, work, sink)

    def take(self) -> list[Tensor]:
        """The queries since the last call."""
        taken, self.queries = self.queries, []
        return taken


def attention_mass(q: Tensor, k: Tensor, region: Tensor, sink_k: Tensor | None, cap: float | None) -> Tensor:
    """The share of attention that each of `REGIONS` gets in one layer, float32 [8]: mean over heads and queries.

    `q` [n, heads, Dh] and `k` [m, kv_heads, Dh] are after RoPE, and every query sees all of `k`; `region` int64 [m] are
    the keys' regions; `sink_k` [kv_heads, Dh] is the model's learned key and `cap` its cap on scores.
    """
    keys = k if sink_k is None else torch.cat([sink_k[None], k])
    total = torch.zeros(len(keys), device=q.device)
    for at in range(0, len(q), TILE):
        total += attention_scores(q[at : at + TILE], keys, cap).softmax(dim=-1).sum(dim=(0, 1, 2))
    total /= q[:, :, 0].numel()
    if sink_k is not None:
        region = torch.cat([region.new_full((1,), SINK), region])
    return torch.zeros(len(REGIONS), device=q.device).index_add(0, region, total)


def attention_scores(q: Tensor, k: Tensor, cap: float | None = None) -> Tensor:
    """Scores before the softmax, float32 [n, kv_heads, heads / kv_heads, m], heads in their order.

    `q` [n, heads, Dh] and `k` [m, kv_heads, Dh] are after RoPE; `cap` is the model's cap on scores.
    """
    rows, heads, dim = q.shape
    groups = k.shape[1]
    grouped = (q * (1 / math.sqrt(dim))).view(rows, groups, heads // groups, dim)
    scores = torch.einsum("nghd,mgd->nghm", grouped, k).float()
    return scores if cap is None else cap * (scores / cap).tanh()

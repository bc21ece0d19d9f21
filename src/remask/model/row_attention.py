"""The attention of single rows over a canvas, computed again from the inputs to their layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from remask.machine.transfers import send
from remask.model.pool import Pool
from remask.model.stage import AdapterRows, Index, Run
from remask.model.transformer import Transformer


def attention_rows(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    """Logarithms of the attention of `q` [N, heads, Dh] over `k` [T, kv_heads, Dh]: float32 [heads, N, T].

    With `seen`, bool [N, T], -inf where a row does not see a key.
    """
    rows, heads, dim = q.shape
    groups = k.shape[1]
    # Query heads that share a key head are treated as more rows of one head.
    q = q.view(rows, groups, heads // groups, dim).permute(1, 0, 2, 3).reshape(groups, -1, dim) * (1 / math.sqrt(dim))
    scores = (q @ k.permute(1, 2, 0)).float().view(groups, rows, heads // groups, -1)
    if seen is None:
        attention = scores.log_softmax(-1)
    else:  # a row that sees none of the keys would be NaN
        unseen = ~seen[:, None]
        attention = scores.masked_fill(unseen, -math.inf).log_softmax(-1).masked_fill(unseen, -math.inf)
    return attention.transpose(1, 2).reshape(heads, rows, -1)


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Rows of a canvas whose attention in one layer is wanted."""

    # What entered the layer when the canvas' rows were last computed, [T, D]; None: the embedding
    states: Tensor | None
    rows: Tensor  # int64 [N], positions among `states`; without these, tokens
    slots: Run | Tensor  # those of the canvas' K in the layer, or of those that are looked at
    positions: Index  # canvas positions of the rows, int64 [N]
    window: int  # of how many leading rows only the mass is wanted
    adapter: str | None  # that of the canvas' request, if it has one
    among: Index | None = None  # canvas positions of these; None: all


Looked: TypeAlias = tuple[Tensor, Tensor]
"""Mass of the window's attention, float32 [T], and `attention_rows` of the rows after it."""


def look(model: Transformer, pool: Pool, layer: int, canvases: Sequence[AskedRows]) -> list[Looked]:
    """The attention that is asked for, over each canvas. Queries are projected once for all of them."""
    if not canvases:
        return []
    positions = send(np.concatenate([canvas.positions for canvas in canvases]), model.device)
    return model.ranks.everywhere(_look_here, model, pool, layer, canvases, positions)


@torch.inference_mode()
def _look_here(
    model: Transformer, pool: Pool, layer: int, canvases: Sequence[AskedRows], positions: Tensor
) -> list[Looked]:
    """As `look`, on every rank: its heads are read, and those of all ranks are returned."""
    h = torch.cat([model.embed(part.rows) if part.states is None else part.states[part.rows] for part in canvases])
    adapters = AdapterRows.of((canvas.adapter, len(canvas.rows)) for canvas in canvases)
    counts, reach = [len(canvas.rows) for canvas in canvases], model.config.window(layer)
    parts = torch.split(model.queries(h, layer, positions, adapters), counts)
    results = []
    for q, places, canvas in zip(parts, torch.split(positions, counts), canvases, strict=True):
        k, seen = model.arithmetic.placed(pool.k[layer][canvas.slots].to(q.dtype)), None
        if reach is not None:
            keys = torch.arange(len(k), device=k.device) if canvas.among is None else send(canvas.among, model.device)
            seen = (places[:, None] - keys).abs() <= reach
        rows = attention_rows(q, k, seen)
        results.append((rows[:, : canvas.window].exp().sum((0, 1)), rows[:, canvas.window :]))
    if not model.ranks.several:
        return results
    masses = model.ranks.sum(torch.cat([mass for mass, _ in results]))
    heads = model.ranks.gather(torch.cat([rows.flatten() for _, rows in results]))
    totals = torch.split(masses, [len(mass) for mass, _ in results])
    flat = torch.split(heads, [rows.numel() for _, rows in results], dim=1)
    shapes = [(len(heads), *rows.shape) for _, rows in results]
    return [(mass, part.view(shape).flatten(0, 1)) for mass, part, shape in zip(totals, flat, shapes, strict=True)]

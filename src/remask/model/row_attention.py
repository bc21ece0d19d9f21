"""The attention of single rows over a canvas, computed once more from the inputs to their layer."""

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


def attention_rows(q: Tensor, k: Tensor, visible: Tensor | None = None) -> Tensor:
    """Logarithms of the attention of `q` [N, heads, Dh] over `k` [T, kv_heads, Dh]: float32 [heads, N, T].

    Keys that are not `visible`, bool [N, T], to a row have -inf; None: each row sees all keys.
    """
    rows, heads, dim = q.shape
    groups = k.shape[1]
    # Query heads that share a key head become further rows of that head.
    queries = q.view(rows, groups, heads // groups, dim).permute(1, 0, 2, 3).reshape(groups, -1, dim)
    scores = (queries * (1 / math.sqrt(dim)) @ k.permute(1, 2, 0)).float().view(groups, rows, heads // groups, -1)
    if visible is None:
        attention = scores.log_softmax(-1)
    else:
        unseen = ~visible[:, None]
        # Filled twice, as a row that sees none of the keys is NaN in between.
        attention = scores.masked_fill(unseen, -math.inf).log_softmax(-1).masked_fill(unseen, -math.inf)
    return attention.transpose(1, 2).reshape(heads, rows, -1)


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Rows of a canvas whose attention in one layer is to be computed."""

    # The inputs of the layer when the canvas' rows were last computed, [T, D]; None: the embedding
    states: Tensor | None
    rows: Tensor  # int64 [N], indices into `states`; without `states`, tokens
    slots: Run | Tensor  # of the keys in the layer
    positions: Index  # canvas positions of the rows, int64 [N]
    sum_count: int  # number of leading rows whose attention is summed
    adapter: str | None  # of the canvas' request, if it has one
    key_positions: Index | None = None  # canvas positions of the keys, int64; None: all of the canvas


RowAttention: TypeAlias = tuple[Tensor, Tensor]
"""The attention of the summed rows, summed over rows and heads, float32 [T], and `attention_rows` of the others."""


def attention_of(model: Transformer, pool: Pool, layer: int, queries: Sequence[RowQuery]) -> list[RowAttention]:
    """The attention of the rows of each of `queries` in `layer`. Their projections are one product."""
    if not queries:
        return []
    positions = send(np.concatenate([query.positions for query in queries]), model.device)
    return model.ranks.run_on_all(_rank_attention_of, model, pool, layer, queries, positions)


@torch.inference_mode()
def _rank_attention_of(
    model: Transformer, pool: Pool, layer: int, queries: Sequence[RowQuery], positions: Tensor
) -> list[RowAttention]:
    """Do what `attention_of` says, on every rank: compute the heads of this rank, and return those of all ranks."""
    inputs = [model.embed(query.rows) if query.states is None else query.states[query.rows] for query in queries]
    adapters = AdapterRows.of((query.adapter, len(query.rows)) for query in queries)
    counts = [len(query.rows) for query in queries]
    reach = model.config.reach(layer)
    projected = torch.split(model.queries(torch.cat(inputs), layer, positions, adapters), counts)
    sums, rows = list[Tensor](), list[Tensor]()
    for q, q_positions, query in zip(projected, torch.split(positions, counts), queries, strict=True):
        k = model.arithmetic.align(pool.k[layer][query.slots].to(q.dtype))
        visible = None
        if reach is not None:
            index = query.key_positions
            keys = torch.arange(len(k), device=k.device) if index is None else send(index, model.device)
            visible = (q_positions[:, None] - keys).abs() <= reach
        attention = attention_rows(q, k, visible)
        sums.append(attention[:, : query.sum_count].exp().sum((0, 1)))
        rows.append(attention[:, query.sum_count :])
    if not model.ranks.several:
        return list(zip(sums, rows, strict=True))
    all_sums = torch.split(model.ranks.sum(torch.cat(sums)), list(map(len, sums)))
    # One gather for all queries; heads of rank r are followed by those of rank r + 1.
    by_rank = model.ranks.gather(torch.cat([local.flatten() for local in rows]))
    all_rows = torch.split(by_rank, [local.numel() for local in rows], 1)
    return [
        (row_sum, flat.view(len(by_rank), *local.shape).flatten(0, 1))
        for row_sum, flat, local in zip(all_sums, all_rows, rows, strict=True)
    ]

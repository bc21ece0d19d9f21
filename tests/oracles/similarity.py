"""The profiler's similarities and the depth table (sections 3.2, 3.3)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.dense import DenseModel


def similarities(model: DenseModel, ids: Sequence[int], prefix_length: int) -> dict[str, list[float]]:
    """Per layer, the prefix' K/V from a pass over the prefix alone against those from a pass over all of `ids`.

    `official_mean_token_cosine` is the BiCache profiler's own: one cosine per token with the heads concatenated, mean
    over tokens, K and V with equal weight. `flat_*` are one cosine over everything flattened.
    """
    tokens = torch.tensor(list(ids))
    alone, within = model.forward(tokens[:prefix_length]).kv, model.forward(tokens).kv
    pairs = [
        (alone.k[layer], alone.v[layer], within.k[layer, :prefix_length], within.v[layer, :prefix_length])
        for layer in range(model.layers)
    ]
    token_k = [_token_cosine(k, k_within) for k, _, k_within, _ in pairs]
    token_v = [_token_cosine(v, v_within) for _, v, _, v_within in pairs]
    return {
        "official_mean_token_cosine": [(k + v) / 2 for k, v in zip(token_k, token_v, strict=True)],
        "mean_token_cosine_k": token_k,
        "mean_token_cosine_v": token_v,
        "flat_cosine_k": [_flat_cosine(k, k_within) for k, _, k_within, _ in pairs],
        "flat_cosine_v": [_flat_cosine(v, v_within) for _, v, _, v_within in pairs],
        "flat_cosine_concat_kv": [
            _flat_cosine(torch.stack([k, v]), torch.stack([k_within, v_within])) for k, v, k_within, v_within in pairs
        ],
    }


def ratio(prefix_length: int, length: int) -> int:
    """The integer percentage of the prefix, rounded half to even on the float."""
    return round(prefix_length / length * 100)


def mean_by_ratio(samples: Sequence[tuple[int, Sequence[float]]]) -> dict[int, list[float]]:
    """(ratio, similarity per layer) of many samples as the mean per ratio bin."""
    bins: dict[int, list[Sequence[float]]] = {}
    for key, values in samples:
        bins.setdefault(key, []).append(values)
    return {key: [sum(layer) / len(layer) for layer in zip(*rows, strict=True)] for key, rows in sorted(bins.items())}


def depth_table(similarity: Mapping[int, Sequence[float]], threshold: float) -> dict[int, int]:
    """Ratio bin -> depth: the leading layers strictly above the threshold, listed only where it grows."""
    table: dict[int, int] = {}
    for key in sorted(similarity):
        depth = 0
        while depth < len(similarity[key]) and similarity[key][depth] > threshold:
            depth += 1
        if depth > max(table.values(), default=0):
            table[key] = depth
    return table


def depth_for(table: Mapping[int, int], key: int) -> int:
    """The depth of the largest listed ratio not above `key`; 0 below the first (the original fails there)."""
    below = [listed for listed in table if listed <= key]
    return table[max(below)] if below else 0


def _token_cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.flatten(1), b.flatten(1), dim=-1).mean())


def _flat_cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0))

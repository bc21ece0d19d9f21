"""How similar a prefix's K/V, computed alone, are to those inside its canvas, per layer, and the limits of depths."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.pack import pack_uncached
from remask.errors import ConfigError
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask_lab.similarity.rule import DepthRule

Measure = Literal["flat", "joint", "official"]
Floats: TypeAlias = NDArray[np.float64]
KV: TypeAlias = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # K, then V: a tensor [P, kv_heads, Dh] per layer


def _flat_products(a: Tensor, b: Tensor) -> Tensor:
    """Dot products over all tokens, heads and channels: a b, a a and b b, float32 [3], of `a` and `b` [P, H, Dh]."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    # Token by token first: one float32 sum over millions of products would lose digits.
    return torch.stack([torch.linalg.vecdot(x, y).sum() for x, y in ((a, b), (a, a), (b, b))])


def joint_cosine(keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
    """One cosine over K and V as one vector (BiCache equation 3 read literally), float32 [], of two pairs [P, H, Dh].

    It weighs K and V by the squares of their norms, where the mean of two cosines weighs them equally.
    """
    dot, left, right = _flat_products(*keys) + _flat_products(*values)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def flat_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine over all tokens, heads and channels of [P, H, Dh] (BiCache section 4.1, equation 3), float32 []."""
    dot, left, right = _flat_products(a, b)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def token_cosine(a: Tensor, b: Tensor) -> Tensor:
    """The mean over tokens of one cosine per token over all heads and channels (the authors' profiler), float32 []."""
    return F.cosine_similarity(a.float().flatten(1), b.float().flatten(1), dim=1).mean()


_MEASURES = {"flat": flat_cosine, "official": token_cosine}


def layer_cosines(kv: KV, other_kv: KV, measure: Measure = "flat") -> NDArray[np.float64]:
    """Cosine similarities of the K and V of two sides, layer by layer, float64 [2, layers]: K's row, then V's.

    `measure` is "flat" (`flat_cosine`), "official" (`token_cosine`) or "joint" (`joint_cosine`, in both rows). RoPE, of
    equal positions on both sides, does not change a cosine. The device is waited for once.
    """
    pairs = [list(zip(kv[side], other_kv[side], strict=True)) for side in range(2)]
    if measure == "joint":
        values = [joint_cosine(k, v) for k, v in zip(*pairs, strict=True)] * 2
    else:
        cosine = _MEASURES[measure]
        values = [cosine(a, b) for side in pairs for a, b in side]
    return torch.stack(values).view(2, -1).cpu().numpy().astype(np.float64)


class PrefixProbe:
    """Compares prefixes computed alone with the same prefixes inside whole canvases of one model.

    It owns K/V memory for one canvas of at most `max_tokens` and its prefix, apart from any engine's.
    """

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.pool = Pool(model.config, 2 * max_tokens, 1, model.dtype, model.device)

    @torch.inference_mode()
    def similarity(
        self, prompt: Sequence[int], response: int, prefix: int, measure: Measure = "flat", layers: int | None = None
    ) -> NDArray[np.float64]:
        """Cosine similarities of the first `prefix` positions' K and V, as `layer_cosines` returns them.

        One side is the canvas at its first step, `prompt` followed by `response` masks, without a cache; the other is
        the prefix alone, as the store computes it. Only the first `layers` layers are computed; None computes all.
        Raises `ConfigError` where the prefix is empty or longer than the prompt, or the canvas exceeds `max_tokens`.
        """
        if not 1 <= prefix <= len(prompt):
            raise ConfigError(f"prefix must be from 1 to the prompt's {len(prompt)} tokens, got {prefix}")
        self.check_length(len(prompt) + response)
        whole = Canvas.masked(prompt, response, self.model.config.mask_id)
        alone = Canvas(prompt[:prefix], (), 0)
        batch = pack_uncached(self.model, [whole, alone])
        if layers is not None:
            batch = replace(batch, stages=tuple(replace(stage, layers=range(layers)) for stage in batch.stages))
        self.model.forward(batch, self.pool)
        return layer_cosines(self.kv(0, prefix, layers), self.kv(len(whole), prefix, layers), measure)

    def check_length(self, tokens: int) -> None:
        """Raise `ConfigError` where `tokens` exceeds `max_tokens`."""
        if tokens > self.max_tokens:
            raise ConfigError(f"a canvas of {tokens} tokens exceeds the probe's {self.max_tokens}")

    def kv(self, slot: int, count: int, layers: int | None = None) -> KV:
        """K and V in `count` slots from `slot` on, of the first `layers` layers; None takes all."""
        rows = slice(slot, slot + count)
        return tuple(k[rows] for k in self.pool.k[:layers]), tuple(v[rows] for v in self.pool.v[:layers])


def limits_of(rule: DepthRule, curves: Floats) -> Floats:
    """The limits of curves of similarities, each by itself: [..., layers], of `curves` [..., layers]."""
    if rule.layers == "leading":
        limits = np.minimum.accumulate(curves, axis=-1)
    else:
        limits = np.maximum.accumulate(curves[..., ::-1], axis=-1)[..., ::-1]
    if rule.boundary == "paper":
        return limits
    return np.concatenate([limits[..., 1:], limits[..., -1:]], axis=-1)


def table_limits(rule: DepthRule, curves: Floats) -> Floats:
    """The limits of a table, [ratios, layers], from the curves of N requests, [N, ratios, layers]."""
    if rule.requests == "mean-curve":
        return limits_of(rule, curves.mean(axis=0))
    if rule.requests == "least-depth":
        limits: Floats = limits_of(rule, curves).min(axis=0)
        return limits
    requests, ratios, _ = curves.shape
    descending = -np.sort(-np.moveaxis(limits_of(rule, curves), 0, 1).reshape(ratios, -1), axis=1)
    # The mean of N depths is at least b if at least N b of all their limits are above tau.
    return descending[:, requests - 1 :: requests]

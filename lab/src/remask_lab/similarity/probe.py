"""How much a prefix's K/V change when the rest of the canvas is there, per layer, and the limits of depths in that."""

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
    """Products over all tokens, heads and channels: a b, a a, b b. [P, H, Dh] twice -> float32 [3]."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    # Token by token first: one float32 sum over millions of products would lose digits.
    return torch.stack([torch.linalg.vecdot(x, y).sum() for x, y in ((a, b), (a, a), (b, b))])


def joint_cosine(keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> Tensor:
    """One cosine over K and V as one vector (equation 3 read literally): two pairs [P, H, Dh] twice -> [].

    It weighs K and V by the squares of their norms, where the mean of two cosines weighs them alike.
    """
    dot, left, right = _flat_products(*keys) + _flat_products(*values)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def flat_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine over all tokens, heads and channels (BiCache section 4.1, equation 3). [P, H, Dh] twice -> []."""
    dot, left, right = _flat_products(a, b)
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def token_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine per token over its heads put together, averaged over the tokens (the authors' profiler)."""
    return F.cosine_similarity(a.float().flatten(1), b.float().flatten(1), dim=1).mean()


_MEASURES = {"flat": flat_cosine, "official": token_cosine}


def layer_cosines(these: KV, those: KV, measure: Measure = "flat") -> NDArray[np.float64]:
    """Cosine similarity of K and V layer by layer, [2, layers]: K's row first, then V's.

    "flat" takes one cosine of each, over all tokens; "official" one a token, and their mean; "joint" one of both
    together, which stands in both rows. Both sides carry RoPE, which leaves a cosine as it is. Sums are float32; the
    device is waited for once, at the end.
    """
    pairs = [list(zip(these[side], those[side], strict=True)) for side in range(2)]
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
        self,
        prompt: Sequence[int],
        response: int,
        prefix: int,
        measure: Measure = "flat",
        layers: int | None = None,
    ) -> NDArray[np.float64]:
        """Cosine similarity of the first `prefix` positions' K and V, [2, layers]: K's row first, then V's.

        One side is the canvas at its first step, `prompt` followed by `response` masks, without a cache; the other the
        prefix alone, as the store computes it. Only the first `layers` are computed; None: all. Raises `ConfigError`
        where the prefix is empty or no part of the prompt, or the canvas exceeds `max_tokens`.
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
        """Raise `ConfigError` where a canvas of so many tokens is too long."""
        if tokens > self.max_tokens:
            raise ConfigError(f"a canvas of {tokens} tokens exceeds the probe's {self.max_tokens}")

    def kv(self, slot: int, count: int, layers: int | None = None) -> KV:
        """What stands in `count` slots from `slot` on, of the first `layers`; None: of all."""
        rows = slice(slot, slot + count)
        return tuple(k[rows] for k in self.pool.k[:layers]), tuple(v[rows] for v in self.pool.v[:layers])


def limits_of(rule: DepthRule, curves: Floats) -> Floats:
    """Limits of single curves of similarities, which may be those of requests or means: [..., layers] both."""
    if rule.layers == "leading":
        reached = np.minimum.accumulate(curves, axis=-1)
    else:
        reached = np.maximum.accumulate(curves[..., ::-1], axis=-1)[..., ::-1]
    if rule.boundary == "paper":
        return reached
    return np.concatenate([reached[..., 1:], reached[..., -1:]], axis=-1)


def table_limits(rule: DepthRule, measured: Floats) -> Floats:
    """Limits of a table, [ratios, layers], from the curves of N requests, [N, ratios, layers]."""
    if rule.requests == "mean-curve":
        return limits_of(rule, measured.mean(axis=0))
    if rule.requests == "least-depth":
        least: Floats = limits_of(rule, measured).min(axis=0)
        return least
    requests, ratios, _ = measured.shape
    falling = -np.sort(-np.moveaxis(limits_of(rule, measured), 0, 1).reshape(ratios, -1), axis=1)
    # The mean of N depths is at least b where N b of all their limits are above tau.
    return falling[:, requests - 1 :: requests]

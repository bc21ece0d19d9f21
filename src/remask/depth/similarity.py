"""How much a prefix's K/V change when the rest of the canvas is there: both computed, and compared per layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.uncached import pack_uncached
from remask.errors import ConfigError
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas

Measure = Literal["flat", "joint", "official"]
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

    "flat" takes one cosine of each, over all tokens; "official" one a token, and their mean; "joint" one cosine of both
    together, which stands in both rows. Both sides carry RoPE, which turns them alike and leaves a cosine as it is.
    Sums are taken in float32; the device is waited for once, at the end.
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
        self._pool = Pool(model.config, 2 * max_tokens, 1, model.dtype, model.device)

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

        One side is the canvas at its first step, `prompt` followed by `response` masks, without any caching; the other
        is the prefix alone, as the prefix store computes it. Only the first `layers` are computed; None: all.

        Raises `ConfigError` where the prefix is empty, not a part of the prompt, or the canvas exceeds `max_tokens`.
        """
        if not 1 <= prefix <= len(prompt):
            raise ConfigError(f"prefix must be from 1 to the prompt's {len(prompt)} tokens, got {prefix}")
        self._check_length(len(prompt) + response)
        whole = Canvas.masked(prompt, response, self.model.config.mask_id)
        alone = Canvas(prompt[:prefix], (), 0)
        batch = pack_uncached(self.model, [whole, alone])
        if layers is not None:
            batch = replace(batch, stages=tuple(replace(stage, layers=range(layers)) for stage in batch.stages))
        self.model.forward(batch, self._pool)
        return layer_cosines(self._kv(0, prefix, layers), self._kv(len(whole), prefix, layers), measure)

    @torch.inference_mode()
    def behind(
        self, prompt: Sequence[int], response: int, affix: Sequence[int], measure: Measure = "flat"
    ) -> NDArray[np.float64]:
        """As `similarity`, of an affix that stands behind the response: [2, layers] for the tokens `affix`.

        The canvas is `prompt`, `response` masks and `affix`. Computed alone the affix stands at positions from 0 on,
        and its keys are turned to where it stands on the canvas.

        Raises `ConfigError` where the affix is empty, or the canvas exceeds `max_tokens`.
        """
        if not affix:
            raise ConfigError("the affix behind the masks is empty; give one token or more")
        before = [*prompt, *[self.model.config.mask_id] * response]
        whole = [*before, *affix]
        self._check_length(len(whole))
        canvases = [Canvas(tokens, (), 0) for tokens in (whole, affix)]
        self.model.forward(pack_uncached(self.model, canvases), self._pool)
        keys, values = self._kv(len(whole), len(affix))
        moved = tuple(self.model.turned(k, len(before)) for k in keys)
        return layer_cosines(self._kv(len(before), len(affix)), (moved, values), measure)

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], count: int | None = None) -> KV:
        """K and V of the first `count` positions (default: of all) of a canvas of `tokens`, computed without a cache.

        They are copies. The tokens may be a prefix, or a canvas at any step. Raises `ConfigError` where they exceed
        `max_tokens`.
        """
        self._check_length(len(tokens))
        self.model.forward(pack_uncached(self.model, [Canvas(tokens, (), 0)]), self._pool)
        keys, values = self._kv(0, len(tokens) if count is None else count)
        return tuple(k.clone() for k in keys), tuple(v.clone() for v in values)

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_tokens:
            raise ConfigError(f"a canvas of {tokens} tokens exceeds the probe's {self.max_tokens}")

    def _kv(self, slot: int, count: int, layers: int | None = None) -> KV:
        rows = slice(slot, slot + count)
        return tuple(k[rows] for k in self._pool.k[:layers]), tuple(v[rows] for v in self._pool.v[:layers])

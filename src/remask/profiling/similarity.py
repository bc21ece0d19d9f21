"""How much a prefix's K/V change when the rest of the canvas is there: both computed, and compared per layer."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from remask.core.canvas import Canvas
from remask.core.ledger import Ledger
from remask.core.plan import Plan, Span
from remask.engine.branch import Branch, plain_table
from remask.engine.pack import pack
from remask.errors import ConfigError
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.store.pages import Extent

Measure = Literal["flat", "official"]


def flat_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine over all tokens, heads and channels (BiCache section 4.1, equation 3). [P, H, Dh] twice -> []."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    # Token by token first: one float32 sum over millions of products would lose digits.
    dot, left, right = (torch.linalg.vecdot(x, y).sum() for x, y in ((a, b), (a, a), (b, b)))
    cosine: Tensor = dot / (left * right).sqrt()
    return cosine


def token_cosine(a: Tensor, b: Tensor) -> Tensor:
    """One cosine per token over its heads put together, averaged over the tokens (the authors' profiler)."""
    return F.cosine_similarity(a.float().flatten(1), b.float().flatten(1), dim=1).mean()


_MEASURES = {"flat": flat_cosine, "official": token_cosine}


class PrefixProbe:
    """Compares prefixes computed alone with the same prefixes inside whole canvases of one model.

    It owns K/V memory for one canvas of at most `max_tokens` and its prefix, apart from any engine's.
    """

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self._pool = Pool(model.config, 2 * max_tokens, 1, model.dtype, model.device)

    @torch.inference_mode()
    def similarity(
        self, prompt: Sequence[int], response: int, prefix: int, measure: Measure = "flat"
    ) -> NDArray[np.float64]:
        """Cosine similarity of the first `prefix` positions' K and V, [2, layers]: K's row first, then V's.

        One side is the canvas at its first step, `prompt` followed by `response` masks, without any caching; the other
        is the prefix alone, as the prefix store computes it. Both sides carry RoPE, which turns them alike and leaves
        a cosine as it is. Sums are taken in float32; the device is waited for once, at the end.

        Raises `ConfigError` where the prefix is empty, not a part of the prompt, or the canvas exceeds `max_tokens`.
        """
        if not 1 <= prefix <= len(prompt):
            raise ConfigError(f"prefix must be from 1 to the prompt's {len(prompt)} tokens, got {prefix}")
        if len(prompt) + response > self.max_tokens:
            raise ConfigError(f"a canvas of {len(prompt) + response} tokens exceeds the probe's {self.max_tokens}")
        mask_id = self.model.config.mask_id
        whole = self._dense(Canvas.masked(prompt, response, mask_id), 0)
        alone = self._dense(Canvas(prompt[:prefix], (), 0), self.max_tokens)
        self.model.forward(pack([whole, alone], self.model.device), self._pool)
        cosine = _MEASURES[measure]
        first, second = slice(0, prefix), slice(self.max_tokens, self.max_tokens + prefix)
        values = torch.stack(
            [cosine(layer[first], layer[second]) for side in (self._pool.k, self._pool.v) for layer in side]
        )
        return values.view(2, -1).cpu().numpy().astype(np.float64)

    def _dense(self, canvas: Canvas, slot: int) -> tuple[Branch, Plan]:
        """A pass over all rows of `canvas` in all layers that predicts nothing, its K/V in the slots from `slot` on."""
        layers, tokens = self.model.config.layers, len(canvas)
        extent = Extent(range(layers), np.arange(slot, slot + tokens), 1, tokens)
        branch = Branch(canvas, Ledger(layers, tokens, None), (plain_table(extent),))
        rows = np.ones(tokens, dtype=np.bool_)
        return branch, Plan((Span(range(layers), rows),), predict=~rows)

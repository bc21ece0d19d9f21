"""Passes over canvases with masked response positions, and the model's predictions there."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.canvas import Canvas
from remask.core.plan import Mask
from remask.engine.uncached import pack_uncached
from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.pool import Pool
from remask_lab.likelihood.pairs import Pair

HEAD_ROWS = 256  # rows of logits held at a time
MAX_ROWS = 4096  # rows of a pass, where a canvas has fewer


MaskedPair = tuple[Pair, Mask]
"""A pair, and the mask of its response: bool [response], at least one position."""


class MaskedPasses:
    """Runs canvases of a masked model once each, all rows in all layers, as many at a time as `max_rows` allows.

    It owns K/V memory for one layer of such a pass, separate from any engine's. Raises `ConfigError` on other kinds of
    models.
    """

    def __init__(self, llm: LLM, max_rows: int = MAX_ROWS) -> None:
        self.config = llm.model.config
        if self.config.kind != "masked":
            raise ConfigError(
                f"likelihoods are estimated by masking a response, which {llm.loaded.name!r}, a {self.config.kind} "
                "model, is not trained for in this form; use a masked model (LLaDA, Dream)"
            )
        self._model, self._max_rows = llm.model, max_rows
        self._pool: Pool | None = None

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot run."""
        if not len(pair.response):
            raise ConfigError("the response has no tokens, so there is nothing to score")
        if len(pair) > self.config.max_length:
            raise ConfigError(
                f"prompt and response have {len(pair)} tokens, and the model reads {self.config.max_length}; "
                "shorten one of them"
            )
        if not all(0 <= token < self.config.vocab for token in (*pair.prompt, *pair.response)):
            raise ConfigError(
                f"token ids go from 0 to {self.config.vocab - 1}, and the prompt or response holds others"
            )

    def log_probabilities(self, masked: Sequence[MaskedPair]) -> NDArray[np.float64]:
        """Return the summed log-probability of each pair's masked tokens, given all others: nats, [pairs].

        Probabilities are over the whole vocabulary, the mask token included, as confidences are.
        """
        sums = [np.empty(0)]
        for chunk, hidden in self._run(masked):
            targets = np.concatenate([np.asarray(pair.response)[mask] for pair, mask in chunk])
            owner = np.repeat(np.arange(len(chunk)), [int(mask.sum()) for _, mask in chunk])
            wanted, to = self._send(targets), self._send(owner)
            total = torch.zeros(len(chunk), dtype=torch.float64, device=hidden.device)
            for rows, logits in self._logits(hidden):
                of_target = logits.gather(1, wanted[rows, None])[:, 0] - logits.logsumexp(dim=-1)
                total.index_add_(0, to[rows], of_target.double())
            sums.append(total.cpu().numpy())
        return np.concatenate(sums)

    @torch.inference_mode()
    def most_confident(self, masked: Sequence[MaskedPair]) -> list[tuple[int, int]]:
        """Return, for each pair, the masked position that a greedy step transfers, and the token that it writes."""
        found = []
        for chunk, hidden in self._run(masked):
            tokens, confidence = [], []
            for _, logits in self._logits(hidden):
                total = logits.logsumexp(dim=-1)
                logits[:, self.config.mask_id] = -torch.inf
                best, token = logits.max(dim=-1)
                tokens.append(token)
                confidence.append(best - total)
            both = torch.stack((torch.cat(tokens).double(), torch.cat(confidence).double())).cpu().numpy()
            edges = np.cumsum([int(mask.sum()) for _, mask in chunk])[:-1]
            for (_, mask), (own, sure) in zip(chunk, np.split(both, edges, axis=1), strict=True):
                place = int(sure.argmax())
                found.append((int(np.flatnonzero(mask)[place]), int(own[place])))
        return found

    def _run(self, masked: Sequence[MaskedPair]) -> Iterator[tuple[Sequence[MaskedPair], Tensor]]:
        """Yield chunks of `masked`, and the final hidden states of their masked positions, [M, D]."""
        at = 0
        while at < len(masked):
            rows, stop = len(masked[at][0]), at + 1
            while stop < len(masked) and rows + len(masked[stop][0]) <= self._max_rows:
                rows += len(masked[stop][0])
                stop += 1
            yield masked[at:stop], self._forward(masked[at:stop], rows)
            at = stop

    @torch.inference_mode()
    def _forward(self, masked: Sequence[MaskedPair], rows: int) -> Tensor:
        if self._pool is None or self._pool.pages < rows:
            slots = max(rows, self._max_rows)
            pool = Pool(replace(self.config, layers=1), slots, 1, self._model.dtype, self._model.device)
            # Nothing reads a layer's K/V after the pass has left the layer, so all layers use the same slots.
            pool.k, pool.v = pool.k * self.config.layers, pool.v * self.config.layers
            self._pool = pool
        canvases = [self._masked(pair, mask) for pair, mask in masked]
        predict = [np.concatenate([np.zeros(len(pair.prompt), dtype=np.bool_), mask]) for pair, mask in masked]
        return self._model.forward(pack_uncached(self._model, canvases, predict), self._pool)

    def _masked(self, pair: Pair, mask: Mask) -> Canvas:
        """The canvas of `pair`, with `mask` applied to its response."""
        canvas = Canvas(pair.prompt, pair.response, len(pair.response))
        canvas.tokens[len(pair.prompt) :][mask] = self.config.mask_id
        return canvas

    def _logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for at in range(0, len(hidden), HEAD_ROWS):
            rows = slice(at, at + HEAD_ROWS)
            yield rows, self._model.head(hidden[rows]).float()

    def _send(self, index: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self._model.device, non_blocking=True)

"""Passes over canvases with masked response positions, and the model's predictions there."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.plan.spans import Mask
from remask_lab.likelihood.names import MAX_ROWS
from remask_lab.likelihood.pairs import Pair
from remask_lab.likelihood.uncached_pass import Job, UncachedPasses

MaskedPair = tuple[Pair, Mask]
"""A pair, and the mask of its response: bool [response], at least one position."""


class MaskedPasses(UncachedPasses):
    """Runs canvases of a masked model once each. Raises `ConfigError` on other kinds of models."""

    def __init__(self, llm: LLM, max_rows: int = MAX_ROWS) -> None:
        super().__init__(llm, max_rows)
        if self.config.kind != "masked":
            raise ConfigError(
                f"likelihoods are estimated by masking a response, which {llm.loaded.name!r}, a {self.config.kind} "
                "model, is not trained for in this form; use a masked model (LLaDA, Dream)"
            )

    def log_probabilities(self, masked: Sequence[MaskedPair]) -> NDArray[np.float64]:
        """Return the summed log-probability of each pair's masked tokens, given all others: nats, [pairs].

        Probabilities are over the whole vocabulary, the mask token included, as confidences are.
        """
        sums = [np.empty(0)]
        for chunk, hidden in self._run(masked):
            targets = np.concatenate([np.asarray(pair.response)[mask] for pair, mask in chunk])
            owner = np.repeat(np.arange(len(chunk)), [int(mask.sum()) for _, mask in chunk])
            wanted, to = self.send(targets), self.send(owner)
            total = torch.zeros(len(chunk), dtype=torch.float64, device=hidden.device)
            for rows, logits in self.logits(hidden):
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
            for _, logits in self.logits(hidden):
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
        for own in self.chunks([len(pair) for pair, _ in masked]):
            yield masked[own], self.hidden([self._job(pair, mask) for pair, mask in masked[own]])

    def _job(self, pair: Pair, mask: Mask) -> Job:
        """The canvas of `pair`, with `mask` applied to its response."""
        canvas = Canvas(pair.prompt, pair.response, len(pair.response))
        canvas.tokens[len(pair.prompt) :][mask] = self.config.mask_id
        return Job(canvas, np.concatenate([np.zeros(len(pair.prompt), dtype=np.bool_), mask]))

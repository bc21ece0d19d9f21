"""Tokens and confidences of predicted rows, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remask.sampling.rules import Measure


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One request's predicted rows among the logits, and how they are read.

    With classifier-free guidance `guide` holds the unconditional canvas' rows for the same positions, or `residual`
    what the conditional ones differed from them by when both were last computed, [rows, V].
    """

    rows: slice
    measure: Measure
    filtered: bool
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    guide: slice | None = None
    residual: Tensor | None = None
    cfg_scale: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether argmax and its plain probability are all that is asked."""
        plain = self.temperature == 0 and self.measure == "probability"
        return plain and not (self.filtered and (self.top_k is not None or self.top_p is not None))


def step_seed(seed: int, step: int) -> int:
    """A seed for one step of one request, so that its draws depend on nothing else in the batch."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def score(logits: Tensor, groups: Sequence[RowGroup], mask_id: int) -> Tensor:
    """Token and confidence of every row of `groups`, float32 [2, rows], in their order; guide rows are left out.

    `logits` [M, V] is used as scratch. The mask token is never chosen, but counts in the probabilities, as in the
    originals. Nothing waits for the device.
    """
    for group in groups:
        if group.residual is not None:
            logits[group.rows].add_(group.residual, alpha=group.cfg_scale)
        if group.guide is not None:
            conditional, unconditional = logits[group.rows], logits[group.guide]
            torch.lerp(unconditional, conditional, group.cfg_scale + 1, out=conditional)
    special = [_sampled(logits[group.rows], group, mask_id) if not group.greedy else None for group in groups]
    if any(group.greedy for group in groups):
        tokens, confidence = _greedy(logits, mask_id)
    parts = [
        own if own is not None else torch.stack((tokens[group.rows].float(), confidence[group.rows]))
        for group, own in zip(groups, special, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _greedy(logits: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    total = logits.logsumexp(dim=-1)
    logits[:, mask_id] = -torch.inf
    best, tokens = logits.max(dim=-1)
    return tokens, (best - total).exp()


def _sampled(logits: Tensor, group: RowGroup, mask_id: int) -> Tensor:
    """Token and confidence of one request's rows, float32 [2, rows]. Does not change `logits`."""
    tempered = logits / group.temperature if group.temperature > 0 else logits
    measured = _filter(tempered, group.top_k, group.top_p) if group.filtered else logits
    measured = measured.log_softmax(dim=-1)
    # The mask is taken out before filtering, or it could be all that a filter leaves.
    choice = tempered.clone()
    choice[:, mask_id] = -torch.inf
    choice = _filter(choice, group.top_k, group.top_p)
    if group.temperature > 0:
        generator = torch.Generator(device=logits.device)
        generator.manual_seed(group.seed)
        # argmax of logits + Gumbel noise draws from their softmax; -log of an exponential draw is Gumbel.
        choice -= torch.empty_like(choice).exponential_(generator=generator).log_()
    tokens = choice.argmax(dim=-1)
    if group.measure == "entropy":
        probabilities = measured.exp()
        confidence = (probabilities * (probabilities + 1e-10).log()).sum(dim=-1)
    elif group.measure == "margin":
        first, second = measured.topk(2, dim=-1).values.exp().unbind(dim=-1)
        confidence = first - second
    else:
        confidence = measured.gather(1, tokens[:, None])[:, 0].exp()
    return torch.stack((tokens.float(), confidence))


def _filter(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Top-p, then top-k, in Dream's order; the token that crosses p is kept. Does not change `logits`."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, order, before > top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits

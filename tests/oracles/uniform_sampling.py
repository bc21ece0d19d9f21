"""Noise schedules, mixing distributions and single steps of the uniform-diffusion samplers.

MASK is banned by the caller: its logit is -inf (or very low) in all `logits` here. Probabilities of the noise process
are float32 as in the originals: one minus a probability near one has few digits, and these digits are seen in results.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """The noise of a model: `shift` decides between uniform (large), masked (very negative) and hybrid."""

    shift: float
    vocabulary: int
    mask_id: int

    def pi(self, log_snr: float) -> Tensor:
        """What a noisy token is drawn from, [V]: evenly over all but MASK, or MASK."""
        even = torch.tensor(log_snr + self.shift).sigmoid()
        pi = (even / (self.vocabulary - 1)).repeat(self.vocabulary)
        pi[self.mask_id] = 1 - even
        return pi


def schedule(kind: str, steps: int, low: float = -9.0, high: float = 9.0) -> Tensor:
    """The log-SNR grid [steps + 1] of one block; index `steps` is the start, where all is noise."""
    t = torch.arange(steps + 1) / steps
    fall = {"linear": 1 - t, "cosine": (1 + torch.cos(math.pi * t)) / 2}[kind]
    first, last = (torch.tensor(edge).sigmoid() for edge in (low, high))
    return ((last - first) * fall + first).logit().clamp(low, high)


def filtered(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Probabilities [..., V] after temperature, top-k (ties of the k-th stay) and top-p (the crossing token stays)."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.where(logits >= kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before > top_p)
        logits = logits.where(~drop, -torch.inf)
    return logits.softmax(-1)


def gain(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities of the best token and of the current one, [..., L] each."""
    p = logits.softmax(-1)
    return p.amax(-1), p.gather(-1, tokens[..., None])[..., 0]


def adaptive_scores(logits: Tensor, tokens: Tensor, pi: Tensor) -> Tensor:
    """The score of every window position, [..., L]: gain in probability, weighted by how likely the token is noise.

    The weights are normalised over the window. Where none of its tokens can be noise the original divides by zero;
    here all its scores are 0.
    """
    best, current = gain(logits, tokens)
    weight = pi[tokens]
    total = weight.sum(-1, keepdim=True)
    return (best - current) * (weight / total.where(total > 0, 1.0))


def adaptive_selection(scores: Tensor, tokens_per_step: int) -> Tensor:
    """The mask [L] of the positions that take a new token: the highest scores [L] that are above 0.

    A position of score 0 holds its argmax or is MASK under uniform noise; the original may pick one to fill its count.
    """
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[scores.topk(min(tokens_per_step, len(scores))).indices] = True
    return chosen & (scores > 0)


@dataclass(frozen=True)
class Mixture:
    """A time of the noise process: the share of clean tokens, and noise share times mixing distribution [V]."""

    alpha: Tensor  # a scalar
    beta_pi: Tensor


def mixture(noise: Noise, log_snr: float) -> Mixture:
    """The process at a log-SNR."""
    alpha = torch.tensor(log_snr).sigmoid()
    return Mixture(alpha, (1 - alpha) * noise.pi(log_snr))


def posterior(clean: Tensor, tokens: Tensor, now: Mixture, then: Mixture) -> Tensor:
    """The distribution [..., L, V] of the tokens at the less noisy time `then`, given `tokens` [..., L] at `now`.

    `clean` [..., L, V] is the prediction. A token that neither it nor the noise can explain gives NaN.
    """
    ratio = now.alpha / then.alpha
    between = now.beta_pi - ratio * then.beta_pi
    same = torch.nn.functional.one_hot(tokens, clean.shape[-1])
    reach = ratio * same + between[tokens][..., None]
    here = now.alpha * clean.gather(-1, tokens[..., None]) + now.beta_pi[tokens][..., None]
    return (then.alpha * clean + then.beta_pi) * reach / here


def marginal(clean: Tensor, tokens: Tensor, now: Mixture, then: Mixture) -> Tensor:
    """Equation 2.4 of the thesis, token by token: the posterior of every clean token x, in the mean over x ~ `clean`.

    Shapes and arguments as in `posterior`, which is exact for one x. An x that `tokens` cannot have come from has no
    posterior, and is left out of the mean. Where no x of the prediction has one the result is NaN.
    """
    vocabulary = clean.shape[-1]
    single = torch.eye(vocabulary, dtype=clean.dtype)
    total, mass = torch.zeros_like(clean), torch.zeros_like(clean[..., 0])
    for x in range(vocabulary):
        chances = posterior(single[x].expand_as(clean), tokens, now, then)
        weight = clean[..., x].where(~chances.isnan().any(-1), 0)
        total += weight[..., None] * chances.nan_to_num()
        mass += weight
    return total / mass[..., None]

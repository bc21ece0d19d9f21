"""Scores of uniform diffusion from logits: expected gains, and draws from the posterior (GIDD)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.noise import Noise, sigmoid
from remask.sampling.filters import Draws, draw, top_k, top_p
from remask.sending import send


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the reverse process, from log-SNR `before` to the cleaner `after`."""

    noise: Noise
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Rows of positions whose tokens may change: their current tokens, and how these are weighed.

    `weights` [rows] are those of the adaptive sampler, the prior probability of each current token. With a `transition`
    every row is drawn from the exact posterior instead. With neither, a correction's proposal is drawn.
    The first `banned_rows` rows never yield `banned` tokens.
    """

    current: NDArray[np.int64]  # [rows]
    weights: NDArray[np.float32] | None = None
    transition: Transition | None = None
    banned: tuple[int, ...] = ()
    banned_rows: int = 0


def read_noisy(
    logits: Tensor,
    rows: NoisyRows,
    mask_id: int,
    temperature: float,
    keep_k: int | None,
    keep_p: float | None,
    draws: Draws,
) -> Tensor:
    """Return token and score of every row of `logits` [rows, V], float32 [2, rows]. Does not change `logits`."""
    logits = logits.clone()
    logits[:, mask_id] = -torch.inf
    if rows.banned and rows.banned_rows:
        banned = send(np.array(rows.banned, dtype=np.int64), logits.device)
        logits[: rows.banned_rows].index_fill_(1, banned, -torch.inf)
    tempered = logits / temperature if temperature > 0 else logits
    filtered = top_p(top_k(tempered, keep_k), keep_p)
    current = send(rows.current, logits.device)
    if rows.transition is not None:
        tokens = draw(posterior(filtered, current, rows.transition, greedy=temperature == 0).log(), draws)
        return torch.stack((tokens.float(), torch.ones_like(tokens, dtype=torch.float32)))
    tokens = draw(filtered, draws) if temperature > 0 else filtered.argmax(dim=-1)
    if rows.weights is None:
        chances = tempered.softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        return torch.stack((tokens.float(), chances))
    weights = send(rows.weights, logits.device)
    return torch.stack((tokens.float(), gain(logits, current, weights)))


def gain(logits: Tensor, current: Tensor, weights: Tensor) -> Tensor:
    """Return the adaptive sampler's score: (best token's probability - current token's) * `weights`, [rows].

    `logits` [rows, V] are plain, before temperature and filters.
    """
    probabilities = logits.softmax(dim=-1)
    return (probabilities.amax(dim=-1) - probabilities.gather(1, current[:, None])[:, 0]) * weights


def posterior(logits: Tensor, current: Tensor, step: Transition, *, greedy: bool) -> Tensor:
    """Return the ancestral sampler's p(next token | current token, predicted clean token), [rows, V].

    With `greedy` the prediction is the argmax alone. Where the formula is 0 / 0, a current token that carries no
    information (the mask, under noise that never yields it) gives the forward process at `after`, and any other stays.
    """
    noise = step.noise
    if greedy:
        clean = torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    else:
        clean = logits.softmax(dim=-1)
    alpha_t, alpha_s = sigmoid(step.before), sigmoid(step.after)
    beta_t, beta_s = sigmoid(-step.before), sigmoid(-step.after)
    ratio = alpha_t / alpha_s
    every = np.arange(noise.vocab)
    pi_t, pi_s = (
        send(noise.probability(every, level).astype(np.float32), logits.device) for level in (step.before, step.after)
    )
    at = current[:, None]
    between = beta_t * pi_t[current] - ratio * beta_s * pi_s[current]
    likelihood = between[:, None].expand_as(clean).clone()
    likelihood.scatter_add_(1, at, torch.full_like(likelihood[:, :1], ratio))
    evidence = alpha_t * clean.gather(1, at)[:, 0] + beta_t * pi_t[current]
    forward = alpha_s * clean + beta_s * pi_s
    lost = evidence <= 0
    stay = torch.zeros_like(clean).scatter_(1, at, 1.0)
    fallback = torch.where((current == noise.mask_id)[:, None], forward, stay)
    return torch.where(lost[:, None], fallback, forward * likelihood / evidence.clamp_min(1e-38)[:, None])

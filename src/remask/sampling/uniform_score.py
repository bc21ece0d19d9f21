"""Scores of uniform diffusion from logits: expected gains, and draws from the reverse step (GIDD)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.denoising.noise import Noise, sigmoid
from remask.machine.transfers import send
from remask.sampling.filters import Draws
from remask.sampling.vocabulary import WHOLE, Vocabulary


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the reverse process, from log-SNR `before` to the cleaner `after`.

    Let q(z_s | z_t, x) be the posterior of the token at `after`, given that at `before` and the clean token x. What the
    model predicts is a distribution of x. Its step is q with that distribution in the place of x's one-hot vector, as
    in GIDD's code; or, with `marginal`, the mean of q over x (equation 2.4 of the Uniform-Cache thesis). The two are
    one where the prediction is a single token.
    """

    noise: Noise
    before: float
    after: float
    marginal: bool = False


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Rows of positions whose tokens may change: their current tokens, and how these are weighed.

    `weights` [rows] are those of the adaptive sampler, the prior probability of each current token. With a `transition`
    every row is drawn from the reverse step instead. With neither, a correction's proposal is drawn. Where weights
    follow from the number of masks among the current tokens, `table` [rows + 1, 2] holds for each number the weight of
    a token that is none, and of a mask.
    The first `banned_rows` rows never yield `banned` tokens.
    """

    current: NDArray[np.int64] | Tensor  # [rows]
    weights: NDArray[np.float32] | Tensor | None = None
    transition: Transition | None = None
    banned: tuple[int, ...] = ()
    banned_rows: int = 0
    table: NDArray[np.float32] | None = None

    def piece(self, start: int, stop: int) -> "NoisyRows":
        """The rows from the one numbered `start` up to `stop`."""
        weights = None if self.weights is None else self.weights[start:stop]
        banned = min(max(0, self.banned_rows - start), stop - start)
        return replace(self, current=self.current[start:stop], weights=weights, banned_rows=banned)

    def on(self, current: Tensor, mask_id: int) -> "NoisyRows":
        """The same rows with other current tokens, int64 [rows], which only the device knows."""
        if self.table is None:
            return replace(self, current=current)
        masks = current == mask_id
        table = send(self.table, current.device).index_select(0, masks.sum()[None])
        return replace(self, current=current, weights=table[0].index_select(0, masks.long()))


def read_noisy(
    logits: Tensor,
    rows: NoisyRows,
    mask_id: int,
    temperature: float,
    keep_k: int | None,
    keep_p: float | None,
    draws: Draws,
    vocabulary: Vocabulary = WHOLE,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return token and score of every row of `logits` [rows, V], float32 [2, rows]. Does not change `logits`.

    `keep` is a filter before `keep_k` and `keep_p`, which changes no argument.
    """
    logits = logits.clone()
    vocabulary.bar(logits, [mask_id] if mask_id >= 0 else [])
    if rows.banned and rows.banned_rows:
        vocabulary.bar(logits[: rows.banned_rows], rows.banned)
    tempered = logits / temperature if temperature > 0 else logits
    kept = tempered if keep is None else keep(tempered)
    filtered = vocabulary.top_p(vocabulary.top_k(kept, keep_k), keep_p)
    current = rows.current if isinstance(rows.current, Tensor) else send(rows.current, logits.device)
    if rows.transition is not None:
        chances = reverse_step(filtered, current, rows.transition, greedy=temperature == 0, vocabulary=vocabulary)
        tokens = vocabulary.draw(chances.log(), draws)
        return torch.stack((tokens.float(), torch.ones_like(tokens, dtype=torch.float32)))
    tokens = vocabulary.draw(filtered, draws) if temperature > 0 else vocabulary.best(filtered)[1]
    if rows.weights is None:
        return torch.stack((tokens.float(), vocabulary.at(vocabulary.softmax(tempered), tokens)))
    weights = rows.weights if isinstance(rows.weights, Tensor) else send(rows.weights, logits.device)
    return torch.stack((tokens.float(), gain(logits, current, weights, vocabulary)))


def gain(logits: Tensor, current: Tensor, weights: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """Return the adaptive sampler's score: (best token's probability - current token's) * `weights`, [rows].

    `logits` [rows, V] are plain, before temperature and filters.
    """
    probabilities = vocabulary.softmax(logits)
    return (vocabulary.best(probabilities)[0] - vocabulary.at(probabilities, current)) * weights


def reverse_step(
    logits: Tensor, current: Tensor, step: Transition, *, greedy: bool, vocabulary: Vocabulary = WHOLE
) -> Tensor:
    """Return p(next token | current token) of the ancestral samplers, float32 [rows, V].

    `logits` [rows, V] predict the clean token, `current` [rows] are the tokens that stand there. With `greedy` the
    prediction is the argmax alone. Where the formula is 0 / 0, a current token that carries no information (the mask,
    under noise that never yields it) gives the forward process at `after`, and any other stays. Under noise that cannot
    have put the current token there the marginal step stays, whatever is predicted: no other clean token explains it.
    """
    noise = step.noise
    clean = vocabulary.only(vocabulary.best(logits)[1], logits) if greedy else vocabulary.softmax(logits)
    alpha_t, alpha_s = sigmoid(step.before), sigmoid(step.after)
    beta_t, beta_s = sigmoid(-step.before), sigmoid(-step.after)
    ratio = alpha_t / alpha_s
    every = np.arange(noise.vocab)
    pi_t, pi_s = (
        send(noise.probability(every, level).astype(np.float32), logits.device) for level in (step.before, step.after)
    )
    by_noise = beta_t * pi_t[current]  # q(z_t | x) of a token that is not x
    stay, own = vocabulary.only(current, clean), vocabulary.at(clean, current)
    likelihood = (by_noise - ratio * beta_s * pi_s[current])[:, None] + stay * ratio  # q(z_t | z_s)
    kept, fresh = alpha_s * clean, beta_s * vocabulary.columns(pi_s)
    forward = kept + fresh  # q(z_s | x) in the mean over x
    evidence = by_noise if step.marginal else alpha_t * own + by_noise
    lost, evidence = evidence <= 0, evidence.clamp_min(1e-38)
    if step.marginal:
        # q(z_t | x) divides each x's own share: it is `evidence`, and for the x that stands there alpha_t more.
        shares = own / (alpha_t + by_noise) + (1 - own) / evidence
        found = likelihood * (kept / (evidence[:, None] + alpha_t * stay) + fresh * shares[:, None])
    else:
        found = likelihood * forward / evidence[:, None]
    fallback = torch.where((current == noise.mask_id)[:, None], forward, stay)
    return torch.where(lost[:, None], fallback, found)

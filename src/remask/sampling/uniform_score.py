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

_SMALLEST = 1e-38  # about the smallest normal float32: keeps a division by 0 finite


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the reverse process, from `log_snr` to the cleaner `next_log_snr`.

    Let q(z_s | z_t, x) be the posterior of the next token z_s, given the current token z_t and the clean token x. The
    model predicts a distribution of x. The step is q with that distribution in place of x's one-hot vector, as in
    GIDD's code, or, with `marginal`, the mean of q over x (equation 2.4 of the Uniform-Cache thesis). The two are equal
    if the prediction is a single token.
    """

    noise: Noise
    log_snr: float
    next_log_snr: float
    marginal: bool = False


@dataclass(frozen=True, slots=True)
class NoisyRows:
    """Rows of positions whose tokens may change.

    Attributes:
        current: their current tokens, int64 [rows].
        weights: the adaptive sampler's prior probability of each current token, float32 [rows]; None for other
            samplers.
        transition: the reverse step from which rows are drawn; None for samplers that are not ancestral. Rows with
            neither weights nor a transition propose tokens of a correction.
        banned, banned_rows: tokens that the first `banned_rows` rows never yield.
        table: the weight of a token that is no mask, and of a mask, by the number of masks among the current tokens,
            float32 [rows + 1, 2]; None if weights do not follow from that number.
    """

    current: NDArray[np.int64] | Tensor
    weights: NDArray[np.float32] | Tensor | None = None
    transition: Transition | None = None
    banned: tuple[int, ...] = ()
    banned_rows: int = 0
    table: NDArray[np.float32] | None = None

    def slice_rows(self, start: int, stop: int) -> "NoisyRows":
        """The rows from index `start` up to `stop`."""
        weights = None if self.weights is None else self.weights[start:stop]
        banned = min(max(0, self.banned_rows - start), stop - start)
        return replace(self, current=self.current[start:stop], weights=weights, banned_rows=banned)

    def with_current(self, current: Tensor, mask_id: int) -> "NoisyRows":
        """The rows with other current tokens, int64 [rows], which are on the device."""
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
    top_k: int | None,
    top_p: float | None,
    draws: Draws,
    vocabulary: Vocabulary = WHOLE,
    apply_filters: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return token and score of every row of `logits` [rows, V], float32 [2, rows]. Does not change `logits`.

    The score is 1 for tokens drawn from a transition, the gain with weights, and otherwise the token's probability.
    `apply_filters` is applied before `top_k` and `top_p`, and must not change its argument.
    """
    logits = logits.clone()
    vocabulary.bar(logits, [mask_id] if mask_id >= 0 else [])
    if rows.banned and rows.banned_rows:
        vocabulary.bar(logits[: rows.banned_rows], rows.banned)
    tempered = logits / temperature if temperature > 0 else logits
    remaining = tempered if apply_filters is None else apply_filters(tempered)
    filtered = vocabulary.top_p(vocabulary.top_k(remaining, top_k), top_p)
    current = rows.current if isinstance(rows.current, Tensor) else send(rows.current, logits.device)
    if rows.transition is not None:
        step = reverse_step(filtered, current, rows.transition, greedy=temperature == 0, vocabulary=vocabulary)
        tokens = vocabulary.draw(step.log(), draws)
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

    `logits` [rows, V] predict the clean token; `current` [rows] are the current tokens. With `greedy` the prediction is
    the argmax alone. If the formula is 0 / 0, a mask becomes the forward process at the next log-SNR, as it carries no
    information under noise without masks, and any other token stays. If noise never yields the current token, the
    marginal step keeps it, whatever the prediction is: no other clean token explains it.
    """
    noise = step.noise
    clean = vocabulary.one_hot(vocabulary.best(logits)[1], logits) if greedy else vocabulary.softmax(logits)
    alpha_t, alpha_s = sigmoid(step.log_snr), sigmoid(step.next_log_snr)
    beta_t, beta_s = sigmoid(-step.log_snr), sigmoid(-step.next_log_snr)
    ratio = alpha_t / alpha_s
    tokens = np.arange(noise.vocab)
    pi_t, pi_s = (
        send(noise.probability(tokens, log_snr).astype(np.float32), logits.device)
        for log_snr in (step.log_snr, step.next_log_snr)
    )
    by_noise = beta_t * pi_t[current]  # q(z_t | x) of a token that is not x
    stay = vocabulary.one_hot(current, clean)
    clean_current = vocabulary.at(clean, current)
    likelihood = (by_noise - ratio * beta_s * pi_s[current])[:, None] + stay * ratio  # q(z_t | z_s)
    from_clean = alpha_s * clean
    from_noise = beta_s * vocabulary.columns(pi_s)
    forward = from_clean + from_noise  # mean of q(z_s | x) over x
    evidence = by_noise if step.marginal else alpha_t * clean_current + by_noise
    is_undefined = evidence <= 0
    evidence = evidence.clamp_min(_SMALLEST)
    if step.marginal:
        # The term of x is divided by q(z_t | x), which is `evidence`, and alpha_t more for x = z_t.
        noise_scale = clean_current / (alpha_t + by_noise) + (1 - clean_current) / evidence
        posterior = likelihood * (from_clean / (evidence[:, None] + alpha_t * stay) + from_noise * noise_scale[:, None])
    else:
        posterior = likelihood * forward / evidence[:, None]
    fallback = torch.where((current == noise.mask_id)[:, None], forward, stay)
    return torch.where(is_undefined[:, None], fallback, posterior)

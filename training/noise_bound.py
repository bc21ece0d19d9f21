"""One term of the variational bound under GIDD's noise, which `--loss bound` of the uniform model's training minimises.

A chain has T steps between T + 1 levels of noise. Level 0 is the clean token, level T noise alone, and the levels
between lie on the sampler's grid of log-SNRs. The negative bound (D3PM, arXiv 2107.03006; the Uniform-Cache thesis,
equation 2.6) is a sum over the steps of

    KL(q(z_s | z_t, x) || p(z_s | z_t)),    s = t - 1,

in the mean over z_t drawn from q(z_t | x). At s = 0 the term is -log p(x | z_1). p is the reverse step of the sampler
"ancestral": q with the predicted distribution of the clean token in the token's place (GIDD, arXiv 2503.04482).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from remask.denoising.noise import Noise, log_snrs

TINY = 1e-300  # stands for 0 under a logarithm whose factor is 0


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of noise, one for each row or for each level of a chain.

    Attributes:
        clean: the probability that a token is clean, float64 [N].
        uniform: the probability that noise is not the mask, float64 [N].
    """

    clean: Tensor
    uniform: Tensor

    def at(self, index: Tensor) -> "Levels":
        """The levels numbered `index` [M]."""
        return Levels(self.clean[index], self.uniform[index])

    def noise(self, vocab: int, mask_id: int) -> Tensor:
        """The probability of each token as noise, float64 [N, V]."""
        each = (self.uniform / (vocab - 1))[:, None].repeat(1, vocab)
        each[:, mask_id] = 1 - self.uniform
        return each


def chain(noise: Noise, steps: int, schedule: str, device: torch.device | None = None) -> Levels:
    """The levels 0 to `steps` of a chain on the grid `schedule`, "cosine" or "linear"."""
    log_snr = torch.from_numpy(log_snrs(schedule, steps, noise.min_log_snr, noise.max_log_snr)).to(device)
    clean = log_snr.sigmoid()
    clean[0], clean[-1] = 1.0, 0.0
    return Levels(clean, (log_snr + noise.shift).sigmoid())


def divergences(
    logits: Tensor,
    clean: Tensor,
    noisy: Tensor,
    before: Levels,
    after: Levels,
    mask_id: int,
) -> Tensor:
    """Return KL(q(z_s | z_t, x) || p(z_s | z_t)) of each row in nats, float64 [N]. Differentiable in `logits`.

    `logits` [N, V] predict the clean tokens; the mask is never predicted. `clean` [N] are the tokens x, `noisy` [N] the
    tokens z_t, int64; `before` are the rows' levels t, `after` their levels s.
    """
    vocab = logits.shape[-1]
    barred = torch.arange(vocab, device=logits.device) == mask_id
    predicted = logits.double().masked_fill(barred, -torch.inf).softmax(dim=-1)
    known = torch.zeros_like(predicted).scatter_(1, clean[:, None], 1.0)
    then, now = after.noise(vocab, mask_id), before.noise(vocab, mask_id)
    kept = before.clean / after.clean  # the probability that a step from s to t keeps a token
    fresh = (1 - before.clean) * _at(now, noisy) - kept * (1 - after.clean) * _at(then, noisy)  # that it puts z_t there

    def forward(of: Tensor) -> tuple[Tensor, Tensor]:
        """q(z_s | x) [N, V], and q(z_t | x) [N] of the token that stands there."""
        ahead = after.clean[:, None] * of + (1 - after.clean)[:, None] * then
        return ahead, before.clean * _at(of, noisy) + (1 - before.clean) * _at(now, noisy)

    true, seen = forward(known)
    model, expected = forward(predicted)
    logs = true.clamp_min(TINY).log() - model.clamp_min(TINY).log()
    kept_term = kept * _at(true, noisy) * _at(logs, noisy)
    found: Tensor = (fresh * (true * logs).sum(dim=-1) + kept_term) / seen
    return found + expected.clamp_min(TINY).log() - seen.log()


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens[:, None])[:, 0]

"""The noise process of uniform and hybrid diffusion (GIDD, Sumi), and how noise falls over a block or a canvas."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LARGEST_EXPONENT = 700  # exp of more than 709 overflows float64
# Of Sumi's code: distances from 0 and 1 of the clean probability at the ends of the linear schedule, of the time at the
# ends of the cosine schedule, and of every clean probability at least.
_LINEAR_END, _COSINE_END, _CLEAN_MARGIN = 1e-4, 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Noise:
    """A mixture of uniform noise over all tokens but the mask, and of masks. The mixture depends on the log-SNR.

    At log-SNR l a token is clean with probability sigmoid(l). Noise is uniform with probability sigmoid(l + shift),
    otherwise it is the mask (the hybrid parametrisation of GIDD, with scale 1). A `shift` of +1000 is uniform noise
    alone, and of -1000 masks alone. Without a mask (`mask_id` -1) noise is uniform over all tokens.

    Attributes:
        shift: log-SNR by which the mixture of uniform noise and masks is shifted.
        min_log_snr, max_log_snr: log-SNR of the noisiest and of the cleanest step.
        vocab: size of the vocabulary, the mask included.
        mask_id: the mask token; -1 without one.
        anchor: the end and begin tokens that close an answer on a canvas that is denoised as a whole (Sumi); None for
            canvases that are denoised block by block (GIDD).
    """

    shift: float
    min_log_snr: float
    max_log_snr: float
    vocab: int
    mask_id: int
    anchor: tuple[int, int] | None = None

    @property
    def uniform_tokens(self) -> int:
        """Number of tokens that uniform noise is drawn from: all but the mask."""
        return self.vocab - int(self.mask_id >= 0)

    def uniform_probability(self, log_snr: float) -> float:
        """Return the probability that noise at `log_snr` is uniform, and not the mask."""
        return sigmoid(log_snr + self.shift)

    @property
    def has_only_masks(self) -> bool:
        """Whether noise is always the mask."""
        return self.uniform_probability(self.max_log_snr) == 0

    def probability(self, tokens: NDArray[np.int64], log_snr: float) -> NDArray[np.float64]:
        """Return the probability of each of `tokens` as noise, float64 of the same shape."""
        uniform = self.uniform_probability(log_snr)
        return np.where(tokens == self.mask_id, 1 - uniform, uniform / self.uniform_tokens)

    def draw(self, count: int, seed: int) -> NDArray[np.int64]:
        """Draw the tokens of `count` positions at the noisiest log-SNR, int64 [count]."""
        rng = np.random.default_rng([seed, 0])  # stream 0 of a seed is what its canvas begins with
        tokens = rng.integers(0, self.uniform_tokens, count)
        if self.mask_id < 0:
            return tokens
        tokens += tokens >= self.mask_id  # skips the mask, which uniform noise never is
        is_mask = rng.random(count) >= self.uniform_probability(self.min_log_snr)
        return np.where(is_mask, self.mask_id, tokens)


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), rounded to float32. Returns 0 where `exp` would overflow."""
    return float(np.float32(1 / (1 + math.exp(-x)))) if x > -_LARGEST_EXPONENT else 0.0


def log_snrs(schedule: str, steps: int, lowest: float, highest: float) -> NDArray[np.float64]:
    """Return GIDD's grid of log-SNRs over a block, float64 [steps + 1]: index 0 is the cleanest, `steps` the noisiest.

    The clean probability falls from its highest to its lowest value along a line ("linear") or half a cosine.
    """
    times = np.arange(steps + 1) / steps
    shape = 1 - times if schedule == "linear" else (1 + np.cos(np.pi * times)) / 2
    low, high = (1 / (1 + np.exp(-bound)) for bound in (lowest, highest))
    clean = (high - low) * shape + low
    return np.asarray(np.clip(np.log(clean) - np.log1p(-clean), lowest, highest))


def canvas_log_snrs(schedule: str, steps: int, lowest: float, highest: float) -> NDArray[np.float64]:
    """Return Sumi's grid of log-SNRs over a canvas, float64 [steps + 1], in the order of `log_snrs`.

    The ends of the schedule are constants. `lowest` and `highest` only clamp the log-SNRs.
    """
    if schedule == "linear":
        clean = np.linspace(1 - _LINEAR_END, _LINEAR_END, steps + 1)
    else:
        clean = (1 + np.cos(np.pi * np.linspace(_COSINE_END, 1 - _COSINE_END, steps + 1))) / 2
    clean = np.clip(clean, _CLEAN_MARGIN, 1 - _CLEAN_MARGIN)
    return np.asarray(np.clip(np.log(clean) - np.log1p(-clean), lowest, highest))

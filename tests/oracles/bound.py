"""The discrete-time variational bound of diffusion (D3PM; equation 2.6 of the Uniform-Cache thesis), by enumeration.

Everything is a matrix over the vocabulary. The chain is built from its one-step transitions, posteriors follow from
Bayes' rule, and the sequences of a level are listed one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Levels of noise 0 to T: the share of clean tokens, and what noise is drawn from, [T + 1] and [T + 1, V]."""

    clean: Array
    noise: Array

    @property
    def steps(self) -> int:
        return len(self.clean) - 1

    def marginal(self, level: int) -> Array:
        """q(z_level | x), [V, V] from row x."""
        rows: Array = self.clean[level] * np.eye(self.noise.shape[1]) + (1 - self.clean[level]) * self.noise[level]
        return rows

    def transition(self, level: int) -> Array:
        """q(z_level | z_(level - 1)), [V, V]: what turns the marginal below into that of this level."""
        kept = self.clean[level] / self.clean[level - 1]
        fresh = (1 - self.clean[level]) * self.noise[level] - kept * (1 - self.clean[level - 1]) * self.noise[level - 1]
        step: Array = kept * np.eye(self.noise.shape[1]) + fresh[None, :]
        return step

    def reverse(self, level: int, clean: Array, token: int) -> Array:
        """q(z_(level - 1) | z_level = token, x ~ clean) by Bayes' rule, [V]."""
        joint = (clean @ self.marginal(level - 1)) * self.transition(level)[:, token]
        found: Array = joint / joint.sum()
        return found

    def marginal_reverse(self, level: int, clean: Array, token: int) -> Array:
        """The mean over x ~ `clean` of q(z_(level - 1) | z_level = token, x), [V]: equation 2.4 of the thesis.

        An x that `token` cannot have come from has no posterior, and is left out.
        """
        size = len(clean)
        found, mass = np.zeros(size), 0.0
        for x in range(size):
            if self.marginal(level)[x, token] > 0:
                found += clean[x] * self.reverse(level, np.eye(size)[x], token)
                mass += clean[x]
        return found / mass if mass > 0 else np.eye(size)[token]


def chain(steps: int, shift: float, vocab: int, mask_id: int, low: float, high: float, kind: str = "cosine") -> Chain:
    """GIDD's noise on the sampler's grid. Level 0 is clean, level T noise alone."""
    clean, noise = np.ones(steps + 1), np.zeros((steps + 1, vocab))
    edges = [1 / (1 + math.exp(-edge)) for edge in (low, high)]
    for level in range(steps + 1):
        time = level / steps
        fall = 1 - time if kind == "linear" else (1 + math.cos(math.pi * time)) / 2
        clean[level] = (edges[1] - edges[0]) * fall + edges[0]
        log_snr = math.log(clean[level] / (1 - clean[level]))
        even = 1 / (1 + math.exp(-(log_snr + shift))) if log_snr + shift > -700 else 0.0
        noise[level] = even / (vocab - 1)
        noise[level, mask_id] = 1 - even
    clean[0], clean[steps] = 1, 0
    return Chain(clean, noise)


def step_divergence(chain: Chain, level: int, response: Sequence[int], noisy: Sequence[int], clean: Array) -> float:
    """KL(q(z_(level - 1) | z_level, x) || p(z_(level - 1) | z_level)), summed over the response."""
    total = 0.0
    for place, (x, z) in enumerate(zip(response, noisy, strict=True)):
        q = chain.reverse(level, np.eye(len(clean[0]))[x], z)
        p = chain.reverse(level, clean[place], z)
        total += sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a > 0)
    return total

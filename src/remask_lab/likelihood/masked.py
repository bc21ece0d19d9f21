"""Likelihoods under a masked diffusion model, by the Monte-Carlo estimator of LLaDA (arXiv 2502.09992).

A draw masks l of a response's L tokens. l is uniform from 1 to L, and the positions are drawn without replacement. Each
draw gives L / l times the summed log-probability of the masked tokens, given all others. The mean over draws estimates
a lower bound of the log-likelihood: the mean log-likelihood over all orders in which the tokens could be decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.llm import LLM
from remask.plan.spans import Mask
from remask_lab.likelihood.draws import Floats, Likelihood, StratifiedDraws
from remask_lab.likelihood.masked_pass import MaskedPair, MaskedPasses
from remask_lab.likelihood.names import MAX_ROWS
from remask_lab.likelihood.pairs import Pair

TOGETHER = 64  # pairs whose masks are in memory at a time


@dataclass(frozen=True, slots=True)
class MaskDraws(StratifiedDraws):
    """How sets of masks are drawn.

    Attributes:
        exact: compute all sets of masks where that takes no more passes than `samples`.
    """

    exact: bool = True


class MaskLikelihoods:
    """Estimates log-likelihoods of responses under a masked model. Raises `ConfigError` on other kinds of models."""

    def __init__(self, llm: LLM, draws: MaskDraws | None = None, max_rows: int = MAX_ROWS) -> None:
        self.draws = draws or MaskDraws()
        self._passes = MaskedPasses(llm, max_rows)

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot be scored."""
        self._passes.check(pair)

    def score(
        self, pairs: Sequence[Pair], groups: Sequence[int] | None = None, progress: bool = False
    ) -> list[Likelihood]:
        """Return the log-likelihood of every response after its prompt.

        Pairs of one group get the same masks where their responses are equally long, which takes noise out of their
        comparison: the choices of a question form a group. By default all pairs are in one group. A result does not
        depend on the other pairs.

        Raises `ConfigError`, before anything runs, on a pair that cannot run.
        """
        for pair in pairs:
            self.check(pair)
        each = [0] * len(pairs) if groups is None else groups
        scored = []
        with tqdm(total=len(pairs), desc="likelihood", unit="resp", disable=not progress) as bar:
            for at in range(0, len(pairs), TOGETHER):
                drawn = [self._draw(*item) for item in zip(pairs[at : at + TOGETHER], each[at:], strict=False)]
                found = self._passes.log_probabilities([masked for own in drawn for masked in own.masked])
                parts = np.split(found, np.cumsum([len(own.masked) for own in drawn])[:-1])
                scored += [own.estimate(part, self.draws) for own, part in zip(drawn, parts, strict=True)]
                bar.update(len(drawn))
        return scored

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return whether greedy decoding, the most confident token a step, would give each response.

        A pair ends at the first token that differs, so it takes from one pass to as many as it has tokens.
        """
        for pair in pairs:
            self.check(pair)
        masks = [np.ones(len(pair.response), dtype=np.bool_) for pair in pairs]
        open_ones = list(range(len(pairs)))
        while open_ones:
            found = self._passes.most_confident([(pairs[number], masks[number]) for number in open_ones])
            for number, (place, token) in zip(open_ones, found, strict=True):
                masks[number][place] = token != pairs[number].response[place]
            alike = [number for number, (place, _) in zip(open_ones, found, strict=True) if not masks[number][place]]
            open_ones = [number for number in alike if masks[number].any()]
        return [not mask.any() for mask in masks]

    def _draw(self, pair: Pair, group: int) -> "_Drawn":
        draws, length = self.draws, len(pair.response)
        # The first comparison keeps 2 ** length small.
        if draws.exact and length < 63 and 2**length - 1 <= draws.samples:
            masks, weights = every_mask(length)
            return _Drawn([(pair, mask) for mask in masks], weights, None)
        masks = draw_masks(length, draws, group)
        # A set that is drawn twice is computed once.
        distinct, which = np.unique(masks, axis=0, return_inverse=True)
        return _Drawn([(pair, mask) for mask in distinct], length / distinct.sum(axis=1), which.reshape(-1))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The different sets of masks of one pair.

    Attributes:
        masked: the pair with each set.
        weights: the factor of each set's log-probability.
        which: the set of each draw. None where all sets are computed.
    """

    masked: list[MaskedPair]
    weights: Floats
    which: NDArray[np.intp] | None

    def estimate(self, found: Floats, draws: MaskDraws) -> Likelihood:
        """Returns the estimate from the summed log-probability of each set."""
        length, weighted = len(self.masked[0][0].response), found * self.weights
        if self.which is None:
            return Likelihood(float(weighted.sum()), 0.0, length, 0)
        return draws.estimate(weighted[self.which].reshape(-1, draws.strata).mean(axis=1), length)


def draw_masks(length: int, draws: MaskDraws, group: int = 0) -> Mask:
    """Draw sets of masks, bool [samples, length], stratum by stratum."""
    rng = np.random.default_rng([draws.seed, group, length])
    masks = np.zeros((draws.samples, length), dtype=np.bool_)
    counts = np.minimum((draws.points(rng) * length).astype(np.int64), length - 1) + 1
    for mask, count in zip(masks, counts, strict=True):
        mask[rng.permutation(length)[:count]] = True
    return masks


def every_mask(length: int) -> tuple[Mask, Floats]:
    """All sets of masks but the empty one, bool [2 ** length - 1, length], and their factors in the expectation."""
    numbers = np.arange(1, 2**length)
    masks = (numbers[:, None] >> np.arange(length)) % 2 == 1
    # The probability of the number of masks is 1 / length, that of the set among those of its size 1 / comb. The
    # product of both with length / masks is the factor.
    weights = np.array([1 / (count * comb(length, count)) for count in masks.sum(axis=1).tolist()])
    return masks, weights

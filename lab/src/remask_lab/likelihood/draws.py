"""What a Monte-Carlo likelihood is, its draws, which are spread evenly over a range, and what every estimator has."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remask.checks.values import whole
from remask.errors import ConfigError
from remask_lab.likelihood.passes import Pair

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The estimate for one response.

    Attributes:
        log_likelihood: in nats, summed over the response's tokens. Its expectation is a lower bound.
        standard_error: of the estimate, over its draws. 0 where nothing was drawn.
        tokens: of the response.
        draws: number of draws. 0 where the expectation itself was computed.
    """

    log_likelihood: float
    standard_error: float
    tokens: int
    draws: int


@dataclass(frozen=True, slots=True)
class StratifiedDraws:
    """How many draws a response gets, and how they are spread.

    Attributes:
        samples: draws for a response: a multiple of `strata`, and at least twice as many.
        strata: draws whose levels of noise are spread evenly. Each level by itself is still uniform. 1 makes all draws
            independent.
        seed: the draws depend on it, on the response's length and on the pair's group, and on nothing else.
    """

    samples: int = 128
    strata: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        whole("strata", self.strata, low=1)
        whole("samples", self.samples, low=1)
        whole("seed", self.seed, low=0)
        if self.samples % self.strata or self.samples < 2 * self.strata:
            raise ConfigError(
                f"samples={self.samples} must be a multiple of strata={self.strata}, and at least two of them: "
                "the standard error comes from how they differ"
            )

    def points(self, rng: np.random.Generator) -> Floats:
        """Draw numbers uniform in [0, 1), float64 [samples], stratum by stratum."""
        # One uniform number shifts the evenly spaced points of a stratum round the circle, so each point is uniform.
        starts = rng.random(self.samples // self.strata).repeat(self.strata)
        return (starts + np.tile(np.arange(self.strata) / self.strata, self.samples // self.strata)) % 1.0

    def estimate(self, strata: Floats, tokens: int) -> Likelihood:
        """The estimate for a response of `tokens` tokens from the mean of each of its strata, float64."""
        error = float(strata.std(ddof=1) / np.sqrt(len(strata)))
        return Likelihood(float(strata.mean()), error, tokens, self.samples)


class LikelihoodEstimator(ABC):
    """Estimates log-likelihoods of responses after prompts; `draws` is how it draws."""

    draws: StratifiedDraws

    @abstractmethod
    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot be scored."""

    def score(
        self, pairs: Sequence[Pair], groups: Sequence[int] | None = None, progress: bool = False
    ) -> list[Likelihood]:
        """Return the log-likelihood of every response after its prompt.

        Pairs of one group share what is drawn where their responses are equally long, which takes noise out of their
        comparison: the choices of a question form a group. By default all pairs are in one group. A result does not
        depend on the other pairs. Raises `ConfigError`, before anything runs, on a pair that cannot run.
        """
        for pair in pairs:
            self.check(pair)
        return self._score(pairs, [0] * len(pairs) if groups is None else groups, progress)

    @abstractmethod
    def _score(self, pairs: Sequence[Pair], groups: Sequence[int], progress: bool) -> list[Likelihood]: ...

    @abstractmethod
    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return whether greedy decoding would give each response. Raises `ConfigError` as `score`."""

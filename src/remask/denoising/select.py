"""Which candidates to transfer, given their confidences: pure functions on the host.

Every function returns ascending indices into `confidence`, float32 [n]. Of equal confidences the leftmost come first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Confidence = NDArray[np.float32]
Chosen = NDArray[np.int64]

DRAW_WEIGHT = 4  # memory of a row that is not read greedily, in greedy rows: draws, filters and forms copy its logits


@dataclass(frozen=True, slots=True)
class RankRule:
    """A choice that depends on confidences alone, so that the device can make it (`remask.sampling.choice`).

    It chooses all candidates whose confidence is at least `threshold` (float32), and at least the `least` most
    confident; with a `factor` those of the function `by_factor`. With `changes` a chosen position is written only if it
    gets another token with a confidence above 0, and is not final before its block is done.
    """

    least: int
    threshold: float = np.inf
    factor: float | None = None
    changes: bool = False

    @classmethod
    def above(cls, threshold: float) -> "RankRule":
        """The rule of the function `above`."""
        return cls(1, float(np.float32(threshold)))

    @classmethod
    def strictly_above(cls, threshold: float, least: int) -> "RankRule":
        """The rule that chooses all candidates above `threshold`, and at least the `least` most confident."""
        return cls(least, float(np.nextafter(np.float32(threshold), np.float32(np.inf))))

    def min_count(self, candidate_count: int) -> int:
        """How many of `candidate_count` candidates are chosen whatever their confidences."""
        # The factor rule always accepts the first and the last rank.
        takes_all = self.factor is not None and candidate_count <= 2
        return candidate_count if takes_all else min(self.least, candidate_count)

    def has_fixed_count(self, candidate_count: int) -> bool:
        """Whether exactly `min_count` of the candidates are chosen, so that their number is known before the pass."""
        return self.min_count(candidate_count) == candidate_count or (self.threshold == np.inf and self.factor is None)


def top(confidence: Confidence, count: int) -> Chosen:
    """Return the `count` most confident."""
    chosen = _ranking(confidence)[:count]
    chosen.sort()
    return chosen


def above(confidence: Confidence, threshold: float) -> Chosen:
    """Return the most confident one, and every one of at least `threshold` (Fast-dLLM section 3.3)."""
    return top(confidence, max(1, int((confidence >= threshold).sum())))


def by_factor(confidence: Confidence, factor: float) -> Chosen:
    """Return the candidates of Fast-dLLM's factor rule: rank n >= 2 while its confidence is >= 1 - factor / (n + 1).

    As in the original, the last rank is accepted if all before it are. So two remaining candidates are always taken.
    """
    ranking = _ranking(confidence)
    ranks = np.arange(1, len(ranking) + 1)
    is_accepted = confidence[ranking] >= 1 - factor / (ranks + 1)
    is_accepted[[0, -1]] = True
    return _accepted_lead(ranking, is_accepted)


def within_budget(confidence: Confidence, threshold: float, count: int) -> Chosen:
    """Return the `count` most confident without those below `threshold`, but always the best (Fast-dLLM for Dream)."""
    ranking = _ranking(confidence)[:count]
    return np.sort(ranking[(confidence[ranking] >= threshold) | (np.arange(len(ranking)) == 0)])


def by_bound(confidence: Confidence, threshold: float, least: float = 0.45, factor: float = 2.0) -> Chosen:
    """Return the most confident ones while each has at least `threshold`, or `least` and the factor rule's bound.

    The first is always returned.
    """
    ranking = _ranking(confidence)
    bounds = np.maximum(least, 1 - factor / (np.arange(len(ranking)) + 2))
    return _accepted_lead(ranking, confidence[ranking] >= np.minimum(threshold, bounds))


def by_product(confidence: Confidence, threshold: float) -> Chosen:
    """Return the most confident ones while the product of all is at least `threshold`, and at least the first."""
    ranking = _ranking(confidence)
    return _accepted_lead(ranking, np.cumprod(confidence[ranking], dtype=np.float64) >= threshold)


def by_entropy(entropy: Confidence, bound: float) -> Chosen:
    """Return those of least entropy (nats) while the sum of all is below `bound`, at least the first (JetEngine)."""
    ranking = np.argsort(entropy, kind="stable")
    return _accepted_lead(ranking, np.cumsum(entropy[ranking]) < bound)


def _accepted_lead(ranking: Chosen, is_accepted: NDArray[np.bool_]) -> Chosen:
    """Return the candidates of the ranks before the first that is not accepted, and at least that of the first rank."""
    lead = len(ranking) if is_accepted.all() else int(is_accepted.argmin())
    return np.sort(ranking[: max(1, lead)])


def _ranking(confidence: Confidence) -> Chosen:
    """Return the indices of the candidates by confidence, descending; of equal ones the leftmost first."""
    return (-confidence).argsort(kind="stable")

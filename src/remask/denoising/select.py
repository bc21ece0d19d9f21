"""Which candidates to transfer, given their confidences: pure functions on the host.

Every function returns indices into `confidence`, in ascending order. Equal confidences are taken from the left.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Confidence = NDArray[np.float32]
Chosen = NDArray[np.int64]

DRAWN = 4  # weight of a row that is not read greedily: draws, filters and forms need copies of its logits


@dataclass(frozen=True, slots=True)
class RankRule:
    """A choice that depends on confidences alone, so that the device can make it (`remask.sampling.choice`).

    As many of the most confident are chosen as have at least `threshold` (float32), and `least` of them at least. With
    a `factor` it is `by_factor` in place of a threshold. With `changes` those of them are taken alone that have got
    another token and a confidence above 0, and none is final before its block is done.
    """

    least: int
    threshold: float = np.inf
    factor: float | None = None
    changes: bool = False

    @classmethod
    def above(cls, threshold: float) -> "RankRule":
        """As the function `above`."""
        return cls(1, float(np.float32(threshold)))

    @classmethod
    def beyond(cls, threshold: float, least: int) -> "RankRule":
        """Every one above `threshold`, and the `least` most confident."""
        return cls(least, float(np.nextafter(np.float32(threshold), np.float32(np.inf))))

    def sure(self, candidates: int) -> int:
        """How many of so many candidates are chosen in any case."""
        return candidates if self.factor is not None and candidates <= 2 else min(self.least, candidates)

    def counted(self, candidates: int) -> bool:
        """Whether these are all that are chosen, so that their number is known."""
        return self.sure(candidates) == candidates or (self.threshold == np.inf and self.factor is None)


def top(confidence: Confidence, count: int) -> Chosen:
    """Return the `count` most confident."""
    chosen = _ranked(confidence)[:count]
    chosen.sort()
    return chosen


def above(confidence: Confidence, threshold: float) -> Chosen:
    """Return the most confident one, and every one of at least `threshold` (Fast-dLLM section 3.3)."""
    ranked = _ranked(confidence)
    return np.sort(ranked[: max(1, int((confidence >= threshold).sum()))])


def by_factor(confidence: Confidence, factor: float) -> Chosen:
    """Return what Fast-dLLM's factor rule accepts: rank n >= 2 while its confidence is >= 1 - factor / (n + 1).

    A first failure at the very last rank does not stop the rule, as in the original: two remaining candidates always
    go together.
    """
    ranked = _ranked(confidence)
    ranks = np.arange(1, len(ranked) + 1)
    accepted = confidence[ranked] >= 1 - factor / (ranks + 1)
    accepted[0] = True
    accepted[-1] = True
    lead = len(ranked) if accepted.all() else int(accepted.argmin())
    return np.sort(ranked[:lead])


def within_budget(confidence: Confidence, threshold: float, considered: int) -> Chosen:
    """Return the best of the `considered` most confident, and those of at least `threshold` (Fast-dLLM for Dream)."""
    ranked = _ranked(confidence)[:considered]
    return np.sort(ranked[(confidence[ranked] >= threshold) | (np.arange(len(ranked)) == 0)])


def bounded(confidence: Confidence, threshold: float, least: float = 0.45, factor: float = 2.0) -> Chosen:
    """Return the most confident one, and as many more as have `threshold`, or `least` and the factor rule's bound."""
    ranked = _ranked(confidence)
    bounds = np.maximum(least, 1 - factor / (np.arange(len(ranked)) + 2))
    return _leading(ranked, confidence[ranked] >= np.minimum(threshold, bounds))


def cumulative(confidence: Confidence, threshold: float) -> Chosen:
    """Return the most confident one, and as many more as keep the product of all at least at `threshold`."""
    ranked = _ranked(confidence)
    return _leading(ranked, np.cumprod(confidence[ranked], dtype=np.float64) >= threshold)


def entropy_bounded(entropy: Confidence, bound: float) -> Chosen:
    """Return the most certain one, and as many more as keep the sum of entropies (nats) below `bound` (JetEngine)."""
    ranked = np.argsort(entropy, kind="stable")
    return _leading(ranked, np.cumsum(entropy[ranked]) < bound)


def _leading(ranked: Chosen, accepted: NDArray[np.bool_]) -> Chosen:
    """Those of `ranked` before the first that is not `accepted`, and the first in any case, sorted."""
    lead = len(ranked) if accepted.all() else int(accepted.argmin())
    return np.sort(ranked[: max(1, lead)])


def _ranked(confidence: Confidence) -> Chosen:
    return (-confidence).argsort(kind="stable")

"""Confidence intervals of measured shares."""

import math
from collections.abc import Hashable, Sequence

import numpy as np

RESAMPLES = 2000
Z = 1.96


def wilson(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default. It stays within [0, 1] and also holds for small counts."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    margin = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def clustered(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95 % interval of the share of true `verdicts`, where those of one cluster are not independent.

    Clusters are what questions share, such as a prefix. A bootstrap over clusters (resampled whole, with a fixed seed)
    gives the variance of the share, hence the number of independent questions that would have it, and Wilson's interval
    is over that many, with Student's quantile for as many clusters (Korn and Graubard, Survey Methodology 24, 1998).

    - All clusters agree, as at 0 % and 100 %: nothing says how much the questions of a cluster vary together, so each
      cluster counts once.
    - One question a cluster: Wilson's interval.
    - One cluster: Wilson's interval over its questions, which says nothing of other clusters.
    """
    number = {cluster: place for place, cluster in enumerate(dict.fromkeys(clusters))}
    places = [number[cluster] for cluster in clusters]
    count, total, share = len(number), len(verdicts), sum(verdicts) / len(verdicts)
    if count in (1, total):
        return wilson(sum(verdicts), total)
    right, asked = np.bincount(places, weights=verdicts), np.bincount(places)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    # The bootstrap's variance is that of `count` - 1 degrees of freedom.
    variance = float(np.var((drawn @ right) / (drawn @ asked))) * count / (count - 1)
    alike = variance < 1e-12
    independent = count if alike else min(total, max(1.0, share * (1 - share) / variance))
    return wilson(share * independent, independent, _student(count - 1))


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, expanded around the normal one; 1 % low at 3 degrees of freedom.

    Of two clusters it gives 8.8 in place of 12.7, with which an interval is nearly [0, 1] as well.
    """
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    added: float = sum(term / freedom**power for power, term in enumerate(terms, 1))
    return Z + added


def percent_text(share: float, interval: Sequence[float]) -> str:
    """A share and its interval as reports show them: "50.0 % (40.0 to 60.0)"."""
    low, high = interval
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

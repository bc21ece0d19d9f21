"""Confidence intervals of measured shares, and what a difference of two of them shows."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Estimate: TypeAlias = tuple[float, float, float]
"""A share or a difference of two, and the ends of its 95 % interval."""

Z = 1.96
MARGIN = 0.05
"""A loss, as a share of all questions, that is small: where it is excluded and no loss is certain, answers are kept."""
POINTS, CORRELATIONS = 240, 24  # of the grid over which a posterior is summed


def wilson(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default. It stays within [0, 1] and also holds for small counts."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    margin = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def clustered(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95 % interval of the share of true `verdicts`, where those of one cluster are not independent.

    Clusters are what questions share, such as a prefix. Right answers of a cluster are beta-binomial: all clusters have
    one mean share and one correlation between two of their questions. The interval is the middle 95 % of the share's
    posterior under Jeffreys' prior, over all correlations alike (Brown, Cai and DasGupta, Statistical Science 16, 2001,
    for independent questions), and reaches the end where all verdicts are the same. Of a single cluster it is over the
    questions as if they were independent, and says nothing of other clusters.
    """
    own: dict[Hashable, list[bool]] = {}
    for verdict, cluster in zip(verdicts, clusters, strict=True):
        own.setdefault(cluster, []).append(bool(verdict))
    groups = list(own.values()) if len(own) > 1 else [[bool(verdict)] for verdict in verdicts]
    tallies = Counter((sum(group), len(group)) for group in groups)
    edges = np.linspace(0, np.pi / 2, POINTS + 1)  # equal steps of the arcsine have equal mass under Jeffreys' prior
    while True:
        below = np.concatenate([[0.0], np.cumsum(_posterior(np.sin((edges[1:] + edges[:-1]) / 2) ** 2, tallies))])
        first, last = np.searchsorted(below, [1e-5, 1 - 1e-5])
        if last - first > POINTS / 4:
            break
        edges = np.linspace(edges[max(0, first - 2)], edges[min(POINTS, last + 1)], POINTS + 1)
    low, high = np.sin(np.interp([0.025, 0.975], below, edges)) ** 2
    right = sum(verdicts)
    return (float(low) if right else 0.0), (float(high) if right < len(verdicts) else 1.0)


def _posterior(shares: Floats, tallies: Mapping[tuple[int, int], int]) -> Floats:
    """The posterior mass [n] of `shares` [n], given how many clusters have so many right answers of so many."""
    share = torch.from_numpy(shares)[:, None]
    correlation = (torch.arange(CORRELATIONS, dtype=torch.float64) + 0.5) / CORRELATIONS
    spread = (1 - correlation) / correlation
    likelihood = torch.zeros(len(shares), CORRELATIONS, dtype=torch.float64)
    for (right, asked), count in tallies.items():
        for size, drawn in ((share * spread, right), ((1 - share) * spread, asked - right)):
            likelihood += count * (torch.lgamma(size + drawn) - torch.lgamma(size))
        likelihood += count * (torch.lgamma(spread) - torch.lgamma(spread + asked))
    mass = (likelihood - likelihood.max()).exp().sum(1)
    return (mass / mass.sum()).numpy()


def difference(share: Estimate, other: Estimate, correlation: float = 0.0) -> Estimate:
    """`share` less `other`, with its 95 % interval from theirs and the `correlation` of the two.

    An end is as far away as the distances of both shares to their own ends are together, by the variance of a
    difference (Newcombe, Statistics in Medicine 17, 1998, method 10; for any intervals Zou and Donner, ibid. 27, 2008).
    """
    (own, low, high), (theirs, other_low, other_high) = share, other

    def away(first: float, second: float) -> float:
        return math.sqrt(first**2 + second**2 - 2 * correlation * first * second)

    centre = own - theirs
    least, most = centre - away(own - low, other_high - theirs), centre + away(high - own, theirs - other_low)
    return centre, max(-1.0, least), min(1.0, most)


def paired(verdicts: Sequence[bool], others: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate:
    """The share of true `verdicts` less that of `others` to the same questions, with its 95 % interval.

    It is the share of questions that only the former answer, less the share that only the latter do, each with its
    `clustered` interval, which stays open where no question tells them apart. No question counts for both, so the two
    are correlated as shares of a multinomial are.
    """
    gained = [own and not other for own, other in zip(verdicts, others, strict=True)]
    lost = [other and not own for own, other in zip(verdicts, others, strict=True)]
    more, less = estimate(gained, clusters), estimate(lost, clusters)
    correlation = -math.sqrt(more[0] * less[0] / ((1 - more[0]) * (1 - less[0]))) if more[0] and less[0] else 0.0
    return difference(more, less, correlation)


def estimate(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate:
    """The share of true `verdicts`, and the ends of its `clustered` interval."""
    return sum(verdicts) / len(verdicts), *clustered(verdicts, clusters)


def by_cluster(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> list[str]:
    """`verdicts` as records keep them: for each cluster a text of 1 for what is right and 0 for what is not."""
    own: dict[Hashable, str] = {}
    for verdict, cluster in zip(verdicts, clusters, strict=True):
        own[cluster] = own.get(cluster, "") + str(int(verdict))
    return list(own.values())


class Shown(Enum):
    """What the 95 % interval of a difference shows: a loss wherever it lies below 0, else an equivalence, or neither.

    Equivalence is within `MARGIN` (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987), and so is a
    loss of `FEW`: it is certain, and smaller than `MARGIN`. An interval that shrinks within itself never turns a loss
    into `KEPT`.
    """

    KEPT = "keeps its answers"
    FEW = "loses a few answers"
    LOST = "loses answers"
    OPEN = "loses no answers that could be seen"

    @property
    def loses(self) -> bool:
        """Whether a loss is certain, of whatever size."""
        return self in (Shown.FEW, Shown.LOST)


def shown(over: Estimate) -> Shown:
    """What `over`, one share less another, shows of the first."""
    near = over[1] > -MARGIN
    if over[2] < 0:
        return Shown.FEW if near else Shown.LOST
    return Shown.KEPT if near else Shown.OPEN


def judged(result: Mapping[str, Any], other: Mapping[str, Any]) -> Shown:
    """Whether `result` keeps the right answers of `other`, both as `run_bench` reports them.

    Where there are no answers, its tokens stand in for them: whether they are those of its baseline.
    """
    if result["accuracy"] is not None:
        return shown(accuracy_over(result, other))
    agreed = result["agreement_with_none"]
    low, high = result.get("agreement_interval") or (None, None)
    if low is None or high is None or math.isnan(low):  # not kept, or of one prefix alone
        low = high = agreed
    return shown((agreed - 1, low - 1, high - 1))


def accuracy_over(result: Mapping[str, Any], other: Mapping[str, Any]) -> Estimate:
    """How much more of the questions `result` answers rightly than `other` does, both as `run_bench` reports them.

    Of the same questions they are `paired`. Older results keep no verdicts: beside its own baseline the difference is
    the one that was kept, otherwise it is of two shares.
    """
    if result.get("verdicts") and other.get("verdicts"):
        clusters = [number for number, each in enumerate(result["verdicts"]) for _ in each]
        own, theirs = ([letter == "1" for letter in "".join(each["verdicts"])] for each in (result, other))
        return paired(own, theirs, clusters)
    if result.get("accuracy_over_none") is not None and result["baseline"] == other["cache"] != result["cache"]:
        return result["accuracy_over_none"], *result["accuracy_over_none_interval"]
    first, second = ((each["accuracy"], *each["accuracy_interval"]) for each in (result, other))
    return difference(first, second)


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of `values` over the means of clusters, as values of one may vary together.

    Where all are of one cluster it is over the values, and holds for that cluster alone. NaN of a single value.
    """
    own: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        own.setdefault(cluster, []).append(value)
    means = [float(np.mean(each)) for each in own.values()] if len(own) > 1 else list(values)
    if len(means) < 2:
        return math.nan, math.nan
    centre, margin = float(np.mean(values)), _student(len(means) - 1) * float(np.std(means, ddof=1)) / len(means) ** 0.5
    return centre - margin, centre + margin


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution; from 3 degrees of freedom on expanded around the normal one.

    The expansion is 1 % low at 3, and closer beyond.
    """
    if freedom in _STUDENT:
        return _STUDENT[freedom]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    added: float = sum(term / freedom**power for power, term in enumerate(terms, 1))
    return Z + added


_STUDENT = {1: 12.706, 2: 4.303}


def percent_text(share: float, interval: Sequence[float]) -> str:
    """A share and its interval as reports show them: "50.0 % (40.0 to 60.0)"."""
    low, high = interval
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

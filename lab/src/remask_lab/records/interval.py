"""Confidence intervals of measured shares, and what a difference of two of them shows."""

import math
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Estimate: TypeAlias = tuple[float, float, float]
"""A share or a difference of two, and the ends of its 95 % interval."""

Z = 1.96
MARGIN = 0.05
"""A loss, as a share of all questions, that is small: where it is excluded and no loss is certain, answers are kept."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share. It stays within [0, 1] and also holds for small counts."""
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    margin = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def clustered(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95 % interval of the share of true `verdicts`, where those of one cluster are not independent.

    Clusters are what questions share, such as a prefix. The interval is the mid-P one (Lancaster, JASA 56, 1961; Berry
    and Armitage, The Statistician 44, 1995) of as many questions as these are worth: n questions in clusters of m are
    worth n / (1 + (m - 1) r) independent ones (Kish, Survey Sampling, 1965). The correlation r within a cluster follows
    from how far the shares of clusters vary. Few clusters that are not all right, or not all wrong, say little of it: r
    is a mean over as many of them as there are of the rarer kind, and one more in which it is 1. So all right, n
    questions are worth as many as there are clusters, and no other outcome has an end nearer to 1. Of a single cluster
    the interval is over the questions as if they were independent.

    Where nearly all are right it covers more than 95 %, as any method must that covers no share in less than 93.5 %.
    """
    own: dict[Hashable, list[bool]] = {}
    for verdict, cluster in zip(verdicts, clusters, strict=True):
        own.setdefault(cluster, []).append(bool(verdict))
    groups = list(own.values()) if len(own) > 1 else [[bool(verdict)] for verdict in verdicts]
    asked, right = (np.array([count(group) for group in groups], dtype=np.float64) for count in (len, sum))
    number, share = asked.sum(), right.sum() / asked.sum()
    size = (asked**2).sum() / number
    least = number / size
    worth = _worth(right, asked, share, size)
    low, high = _mid_p(share * worth, worth)
    all_right = (2 * _END) ** (1 / least)
    return float(min(low, all_right)), float(max(high, 1 - all_right))


def _worth(right: Floats, asked: Floats, share: float, size: float) -> float:
    """How many independent questions are worth what these are, of which clusters answer `right` of `asked`, [C] each.

    `size` is what a question's cluster holds on average.
    """
    number, told = asked.sum(), min((right < asked).sum(), (right > 0).sum())
    if size == 1 or not told:
        return float(number / size)
    count = len(asked)
    variance = count / (count - 1) * ((right - share * asked) ** 2).sum() / number**2
    correlation = min(1.0, max(0.0, (variance * number / (share * (1 - share)) - 1) / (size - 1)))
    return float(number / (1 + (size - 1) * (1 + told * correlation) / (1 + told)))


_END = 0.025  # the probability beyond either end of an interval


def _mid_p(right: float, asked: float) -> tuple[float, float]:
    """The mid-P interval of a share; both numbers may be fractions."""
    wrong = asked - right

    def end(probability: float) -> float:
        low, high = 0.0, 1.0
        while high - low > 1e-7:
            share = (low + high) / 2
            # The probabilities that a share of at most `share` has, as at least and as more than so many are right.
            least = _beta(share, right, wrong + 1) if right > 0 else 1.0
            more = _beta(share, right + 1, wrong) if wrong > 0 else 0.0
            low, high = (share, high) if (least + more) / 2 < probability else (low, share)
        return (low + high) / 2

    return (end(_END) if right > 0 else 0.0), (end(1 - _END) if wrong > 0 else 1.0)


def _beta(x: float, a: float, b: float) -> float:
    """The distribution function of a beta distribution at 0 < x < 1.

    By its continued fraction (DLMF 8.17.22), which converges fast below the mean.
    """
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m = step // 2
        grows = -(a + m) * (a + b + m) if step % 2 else m * (b - m)
        term = grows * x / ((a + step - 1) * (a + step))
        c, d = 1 + term / c, 1 / (1 + term * d)
        fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    scale = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale) / (a * fraction)


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

    Where there are no answers, its tokens stand in for them: whether they are its baseline's, but for `MARGIN`. That
    they differ is no loss by itself.
    """
    if result["accuracy"] is not None:
        return shown(accuracy_over(result, other))
    agreed = result["agreement_with_none"]
    low, high = result.get("agreement_interval") or (None, None)
    if low is None or high is None or math.isnan(low):  # not kept, or of one prefix alone
        low = high = agreed
    return Shown.KEPT if low - 1 > -MARGIN else shown((agreed - 1, low - 1, high - 1))


def accuracy_over(result: Mapping[str, Any], other: Mapping[str, Any]) -> Estimate:
    """How much more of the questions `result` answers rightly than `other` does, both as `run_bench` reports them.

    Of the same questions they are `paired`. Without verdicts it is the difference to its own baseline that was kept,
    otherwise that of two shares.
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

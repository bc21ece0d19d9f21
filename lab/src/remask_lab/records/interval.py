"""Confidence intervals of measured shares, and what the interval of a difference says about a loss of answers."""

import math
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Estimate: TypeAlias = tuple[float, float, float]
"""A share or a difference of two shares, then the lower and the upper end of its 95 % interval."""

Z = 1.96
MARGIN = 0.05
"""The loss, as a share of all questions, up to which answers count as kept unless a loss is certain."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of `successes` / `trials`, within [0, 1]. It holds for small counts too."""
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    margin = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def clustered_interval(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95 % interval of the share of true `verdicts`, where verdicts of one cluster may depend on each other.

    `clusters` names what each verdict's question shares with others, such as a prefix. The interval is the mid-P one
    (Lancaster, JASA 56, 1961; Berry and Armitage, The Statistician 44, 1995) of the effective number of questions:
    n / (1 + (m - 1) r) for n questions in clusters of m (Kish, Survey Sampling, 1965). The correlation r within a
    cluster is estimated as in `_effective_count`. If all verdicts are equal, the effective number is that of clusters,
    and no other outcome has a wider interval on that side. The questions of a single cluster count as independent.

    Near a share of 0 or 1 it covers more than 95 %, as every method does that covers no share in less than 93.5 %.
    """
    groups: dict[Hashable, list[bool]] = {}
    for verdict, cluster in zip(verdicts, clusters, strict=True):
        groups.setdefault(cluster, []).append(bool(verdict))
    by_cluster = list(groups.values()) if len(groups) > 1 else [[bool(verdict)] for verdict in verdicts]
    sizes = np.array([len(group) for group in by_cluster], dtype=np.float64)
    successes = np.array([sum(group) for group in by_cluster], dtype=np.float64)
    share = successes.sum() / sizes.sum()
    count = _effective_count(successes, sizes)
    low, high = _mid_p(share * count, count)
    all_equal = (2 * _TAIL) ** (1 / _least_count(sizes))  # the lower end where every verdict is true
    return float(min(low, all_equal)), float(max(high, 1 - all_equal))


def _least_count(sizes: Floats) -> float:
    """The effective number of questions in clusters of `sizes`, [C], at a correlation of 1: all alike in a cluster."""
    return float(sizes.sum() / ((sizes**2).sum() / sizes.sum()))


def _effective_count(successes: Floats, sizes: Floats) -> float:
    """The number of independent questions that tell as much as these, of clusters with `successes` of `sizes`, [C].

    The correlation within clusters follows from the variance of their shares. Clusters that are all wrong or all right
    say little of it: with k clusters that have a right answer, or k that have a wrong one, whichever are fewer, it has
    weight k beside a correlation of 1 of weight 1.
    """
    total, least = sizes.sum(), _least_count(sizes)
    weight = min((successes < sizes).sum(), (successes > 0).sum())
    if least == total or not weight:
        return least
    clusters, size, share = len(sizes), (sizes**2).sum() / total, successes.sum() / total
    variance = clusters / (clusters - 1) * ((successes - share * sizes) ** 2).sum() / total**2
    correlation = min(1.0, max(0.0, (variance * total / (share * (1 - share)) - 1) / (size - 1)))
    return float(total / (1 + (size - 1) * (1 + weight * correlation) / (1 + weight)))


_TAIL = 0.025  # the probability beyond either end of an interval


def _mid_p(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % mid-P interval of a share, by bisection to 1e-7; both numbers may be fractions."""
    failures = trials - successes

    def end(probability: float) -> float:
        low, high = 0.0, 1.0
        while high - low > 1e-7:
            share = (low + high) / 2
            # The probabilities of at least, and of more than, so many successes at this share; mid-P is their mean.
            at_least = _beta(share, successes, failures + 1) if successes > 0 else 1.0
            more = _beta(share, successes + 1, failures) if failures > 0 else 0.0
            low, high = (share, high) if (at_least + more) / 2 < probability else (low, share)
        return (low + high) / 2

    return (end(_TAIL) if successes > 0 else 0.0), (end(1 - _TAIL) if failures > 0 else 1.0)


def _beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b) at 0 < x < 1: the distribution function of Beta(a, b).

    By its continued fraction (DLMF 8.17.22), which converges fast below the mean.
    """
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m = step // 2
        coefficient = -(a + m) * (a + b + m) if step % 2 else m * (b - m)
        term = coefficient * x / ((a + step - 1) * (a + step))
        c, d = 1 + term / c, 1 / (1 + term * d)
        fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    scale = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale) / (a * fraction)


def difference(share: Estimate, other: Estimate, correlation: float = 0.0) -> Estimate:
    """`share` minus `other`, with its 95 % interval from theirs and the `correlation` of the two.

    The distance of an end from the difference is the root of a variance, for which the distances of both shares to
    their own ends stand as standard deviations (Newcombe, Statistics in Medicine 17, 1998, method 10; for any intervals
    Zou and Donner, ibid. 27, 2008).
    """
    value, low, high = share
    other_value, other_low, other_high = other

    def distance(margin: float, other_margin: float) -> float:
        return math.sqrt(margin**2 + other_margin**2 - 2 * correlation * margin * other_margin)

    centre = value - other_value
    lower = centre - distance(value - low, other_high - other_value)
    upper = centre + distance(high - value, other_value - other_low)
    return centre, max(-1.0, lower), min(1.0, upper)


def paired_difference(verdicts: Sequence[bool], others: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate:
    """The share of true `verdicts` minus that of `others`, to the same questions, with its 95 % interval.

    It is the share of questions that only the former answer, minus the share that only the latter answer, each with its
    `clustered_interval`, which has a width even where all verdicts agree. No question counts for both, so the two are
    correlated as shares of a multinomial are.
    """
    gains = [verdict and not other for verdict, other in zip(verdicts, others, strict=True)]
    losses = [other and not verdict for verdict, other in zip(verdicts, others, strict=True)]
    gain, loss = estimate(gains, clusters), estimate(losses, clusters)
    correlation = -math.sqrt(gain[0] * loss[0] / ((1 - gain[0]) * (1 - loss[0]))) if gain[0] and loss[0] else 0.0
    return difference(gain, loss, correlation)


def estimate(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> Estimate:
    """The share of true `verdicts`, and the ends of its `clustered_interval`."""
    return sum(verdicts) / len(verdicts), *clustered_interval(verdicts, clusters)


def verdict_texts(verdicts: Sequence[bool], clusters: Sequence[Hashable]) -> list[str]:
    """`verdicts` as records keep them: a text for each cluster, with a 1 for a true verdict and a 0 for a false one."""
    texts: dict[Hashable, str] = {}
    for verdict, cluster in zip(verdicts, clusters, strict=True):
        texts[cluster] = texts.get(cluster, "") + str(int(verdict))
    return list(texts.values())


class LossVerdict(Enum):
    """What the 95 % interval of a difference says: a loss if it lies below 0, else equivalence, or neither.

    Equivalence is within `MARGIN` (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987). A loss is
    `FEW` where the interval excludes one of `MARGIN`. An interval that shrinks within itself never turns a loss into
    `KEPT`.
    """

    KEPT = "keeps its answers"
    FEW = "loses a few answers"
    LOST = "loses answers"
    OPEN = "loses no answers that could be seen"

    @property
    def loses(self) -> bool:
        """Whether a loss is certain, of whatever size."""
        return self in (LossVerdict.FEW, LossVerdict.LOST)


def loss_verdict(change: Estimate) -> LossVerdict:
    """What `change`, a share minus the one that it should keep, says about a loss."""
    _, low, high = change
    small = low > -MARGIN
    if high < 0:
        return LossVerdict.FEW if small else LossVerdict.LOST
    return LossVerdict.KEPT if small else LossVerdict.OPEN


def judge_answers(result: Mapping[str, Any], other: Mapping[str, Any]) -> LossVerdict:
    """Whether `result` keeps the right answers of `other`, both as `run_bench` reports them.

    Without right answers, `result` keeps those of its baseline if its tokens agree with them but for `MARGIN`. That
    fewer agree is no loss by itself.
    """
    if result["accuracy"] is not None:
        return loss_verdict(accuracy_difference(result, other))
    agreement = result["agreement_with_none"]
    low, high = result.get("agreement_interval") or (None, None)
    if low is None or high is None or math.isnan(low):  # not in the record, or of one prefix alone
        low = high = agreement
    return LossVerdict.KEPT if low - 1 > -MARGIN else loss_verdict((agreement - 1, low - 1, high - 1))


def accuracy_difference(result: Mapping[str, Any], other: Mapping[str, Any]) -> Estimate:
    """The accuracy of `result` minus that of `other`, both as `run_bench` reports them.

    It is a `paired_difference` if both have verdicts. Otherwise it is the recorded difference if `other` is the
    baseline of `result`, else that of two independent shares.
    """
    if result.get("verdicts") and other.get("verdicts"):
        clusters = [number for number, text in enumerate(result["verdicts"]) for _ in text]
        verdicts, others = ([digit == "1" for digit in "".join(row["verdicts"])] for row in (result, other))
        return paired_difference(verdicts, others, clusters)
    if result.get("accuracy_over_none") is not None and result["baseline"] == other["cache"] != result["cache"]:
        return result["accuracy_over_none"], *result["accuracy_over_none_interval"]
    share, other_share = ((row["accuracy"], *row["accuracy_interval"]) for row in (result, other))
    return difference(share, other_share)


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of `values`, from the means of clusters, whose values may vary together.

    If all are of one cluster it is computed from the values, and holds for that cluster alone. NaN for a single value.
    """
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    means = [float(np.mean(group)) for group in groups.values()] if len(groups) > 1 else list(values)
    if len(means) < 2:
        return math.nan, math.nan
    centre = float(np.mean(values))
    margin = _student_quantile(len(means) - 1) * float(np.std(means, ddof=1)) / len(means) ** 0.5
    return centre - margin, centre + margin


def _student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution with `freedom` degrees of freedom.

    From 3 degrees on it is expanded around the normal quantile: 1 % too low at 3, and closer beyond.
    """
    if freedom in _STUDENT:
        return _STUDENT[freedom]
    terms = ((Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96, (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384)
    correction: float = sum(term / freedom**power for power, term in enumerate(terms, 1))
    return Z + correction


_STUDENT = {1: 12.706, 2: 4.303}


def percent_text(share: float, interval: Sequence[float]) -> str:
    """A share and the two ends of its interval as reports show them: "50.0 % (40.0 to 60.0)"."""
    low, high = interval
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

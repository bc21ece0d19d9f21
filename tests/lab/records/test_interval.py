"""Intervals of shares against known values, and their coverage where answers of one cluster vary together."""

import numpy as np
import pytest

from remask_lab.records.interval import clustered, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (190, 200, 0.9104, 0.9726)],
)
def test_known_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize("clusters", [range(40), [0] * 40])
def test_questions_of_their_own_and_of_one_cluster_are_wilsons(clusters: list[int]) -> None:
    assert clustered([True] * 30 + [False] * 10, clusters) == wilson(30, 40)


@pytest.mark.parametrize("right", [True, False])
def test_where_all_clusters_agree_each_counts_once(right: bool) -> None:
    low, high = clustered([right] * 200, [number % 20 for number in range(200)])
    wide = wilson(20 * right, 20)
    assert (low, high) != wilson(200 * right, 200)
    assert (low, high) == pytest.approx(wide, abs=0.02), "Student's quantile of 19 degrees of freedom is above 1.96"


def test_clusters_that_are_right_or_wrong_as_a_whole_count_once() -> None:
    low, high = clustered([number % 40 < 20 for number in range(200)], [number % 40 for number in range(200)])
    assert (low, high) == pytest.approx(wilson(20, 40), abs=0.01)
    assert (low, high) == clustered([number % 40 < 20 for number in range(200)], [number % 40 for number in range(200)])


@pytest.mark.parametrize(("prefixes", "share", "spread"), [(4, 0.8, 0.3), (20, 0.5, 0.3), (20, 0.9, 0.02)])
def test_coverage(prefixes: int, share: float, spread: float) -> None:
    """Prefixes differ in difficulty as a beta distribution does; intervals over questions cover 40, 65 and 92 %."""
    rng, covered, draws = np.random.default_rng(0), 0, 100
    clusters = np.tile(np.arange(prefixes), 200 // prefixes)
    for _ in range(draws):
        each = rng.beta(share * (1 - spread) / spread, (1 - share) * (1 - spread) / spread, prefixes)
        low, high = clustered((rng.random(len(clusters)) < each[clusters]).tolist(), clusters.tolist())
        covered += low <= share <= high
    assert covered >= 0.88 * draws

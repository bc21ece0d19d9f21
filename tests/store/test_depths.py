"""What audits make of depths: a class of `PrefixDepths` beside a rule that is written out."""

import math
import random

import pytest

from remask.store.depths import KEPT, PrefixDepths, depth_limits, ratio_class
from tests.oracles.similarity import depth_table

TAUS = (-1.0, -0.2, 0.5, 0.9, 0.97, 1.0)


def bears(similarity: list[float], tau: float) -> int:
    """Leading layers above tau, less one where there is a layer above them, whose K/V are the store's too."""
    leading = depth_table({0: similarity}, tau).get(0, 0)
    return leading if leading == len(similarity) else max(0, leading - 1)


@pytest.mark.parametrize("seed", range(30))
def test_a_depth_is_what_the_least_of_the_last_audits_bore(seed: int) -> None:
    rng = random.Random(f"depths {seed}")
    depths, seen = PrefixDepths(), dict[int, list[list[float]]]()
    layers = rng.randint(1, 6)
    for _ in range(40):
        ratio = rng.choice([0, 4, 5, 31, 34, 88, 97, 99, 100])
        curve = [rng.choice([rng.uniform(-1, 1), rng.uniform(0.9, 1), 1.0]) for _ in range(layers)]
        depths.begin(ratio, 4)
        depths.note(ratio, curve)
        seen.setdefault(ratio_class(ratio), []).append(curve)
        asked, tau = rng.randint(0, 100), rng.choice(TAUS)
        below = [low for low in seen if low <= asked]
        expected = min(bears(each, tau) for each in seen[max(below)][-KEPT:]) if below else None
        assert depths.depth(asked, tau) == expected


@pytest.mark.parametrize(("percent", "low"), [(0, 0), (4, 0), (5, 5), (94, 90), (96, 95), (97, 97), (100, 100)])
def test_classes_are_those_of_a_profile(percent: int, low: int) -> None:
    assert ratio_class(percent) == low


def test_the_ends_of_tau() -> None:
    limits = depth_limits([1.0, 1.0, 0.2, -0.9])
    assert sum(limit > 1 for limit in limits) == 0
    assert sum(limit > -1 for limit in limits) == 4


def test_a_layer_that_cannot_be_compared_bears_nothing() -> None:
    assert depth_limits([1.0, math.nan, 1.0]) == (-1.0, -1.0, -1.0)
    assert depth_limits([math.nan]) == (-1.0,)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, list(range(1, 13))),
        (2, [1, 2, 4, 6, 8, 10, 12]),
        (5, [1, 2, 4, 8, 13, 18]),
        (32, [1, 2, 4, 8, 16, 32, 64, 96]),
    ],
)
def test_audits_become_rare(interval: int, expected: list[int]) -> None:
    depths, audited = PrefixDepths(), []
    for number in range(1, expected[-1] + 1):
        due = depths.due(50)
        depths.count(50, 0.9)
        if due:
            depths.begin(50, interval)
            assert depths.auditing(50)
            assert not depths.due(50)
            depths.note(50, [1.0])
            audited.append(number)
    assert audited == expected


def test_an_audit_that_is_given_up_leaves_what_was_known() -> None:
    depths = PrefixDepths()
    depths.begin(50, 4)
    depths.give_up(50)
    assert depths.depth(50, 0.5) is None
    assert not depths.auditing(50)
    depths.begin(50, 4)
    depths.note(50, [1.0, 0.9])
    depths.begin(50, 4)
    depths.give_up(50)
    assert depths.depth(50, 0.5) == 2


def test_depths_fall_at_once_and_rise_when_the_low_audit_is_forgotten() -> None:
    depths = PrefixDepths()
    depths.note(80, [1.0, 1.0, 1.0])
    assert depths.depth(80, 0.97) == 3
    depths.note(80, [1.0, 1.0, 0.5])
    assert depths.depth(80, 0.97) == 1
    for _ in range(KEPT - 1):
        depths.note(80, [1.0, 1.0, 1.0])
        assert depths.depth(80, 0.97) == 1
    depths.note(80, [1.0, 1.0, 1.0])
    assert depths.depth(80, 0.97) == 3


def test_an_operator_sees_what_was_asked_for() -> None:
    depths = PrefixDepths()
    depths.note(80, [1.0, 0.9, 0.5])
    assert depths.describe() == ()
    depths.count(83, 0.8)
    depths.count(91, 0.4)
    low, high = depths.describe()
    assert (low.ratio, low.requests, low.audits, low.tau, low.depth) == (80, 1, 1, 0.8, 1)
    assert (high.ratio, high.requests, high.audits, high.depth) == (90, 1, 0, 3)
    assert low.limits == (0.9, 0.5, 0.5)

"""Rules against depths counted by hand: each request's depth, floored means, and the layer above the boundary."""

import math
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.depth.profile import request_depths, rule_limits
from remask.depth.rule import DepthRule, depth_at, depth_entries
from remask.depth.similarity import limits_of
from remask.errors import ConfigError
from remask_lab.instruments.depths import RULES
from tests.depth.models import AUTHORS

TAU = 0.97
CURVES = st.integers(1, 6).flatmap(
    lambda layers: st.lists(
        st.lists(st.sampled_from([0.5, 0.9, 0.96, 0.97, 0.98, 1.0]), min_size=layers, max_size=layers),
        min_size=1,
        max_size=7,
    )
)


def depth_of(curve: Sequence[float], rule: DepthRule) -> int:
    """The depth of one curve, from the rule's words."""
    layers = len(curve)
    leading = len(list(takewhile(lambda value: value > TAU, curve)))
    largest = max((layer for layer, value in enumerate(curve, 1) if value > TAU), default=0)
    reached = leading if rule.layers == "leading" else largest
    if rule.boundary == "paper" or reached == layers:
        return reached
    return max(reached - 1, 0)


@given(CURVES, st.sampled_from(RULES))
def test_tables_are_what_the_words_say(curves: list[list[float]], rule: DepthRule) -> None:
    measured = [np.array([curve]) for curve in curves]
    depths = [depth_of(curve, rule) for curve in curves]
    expected = min(depths) if rule.requests == "least-depth" else math.floor(np.mean(depths) + 1e-9)
    if rule.requests == "mean-curve":
        expected = depth_of(np.mean(curves, axis=0).round(6).tolist(), rule)
    limits = rule_limits(rule, (50,), measured)
    assert depth_at(limits[50], TAU) == expected
    assert list(limits[50]) == sorted(limits[50], reverse=True)
    assert request_depths(rule, (50,), measured, TAU) == {50: round(float(np.mean(depths)), 3)}


@given(CURVES, st.sampled_from(RULES))
def test_a_higher_tau_is_never_deeper(curves: list[list[float]], rule: DepthRule) -> None:
    (limits,) = rule_limits(rule, (50,), [np.array([curve]) for curve in curves]).values()
    depths = [depth_at(limits, tau) for tau in (0.4, 0.95, 0.97, 0.99)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == len(limits)


@pytest.mark.parametrize(
    ("curve", "paper", "safe"),
    [
        ([1.0, 0.99, 0.98, 0.98, 0.98, 0.92, 0.82, 0.74], 5, 4),
        ([1.0, 0.9, 0.9, 0.9], 1, 0),
        ([1.0, 0.99, 0.98, 0.98], 4, 4),
        ([1.0, 0.99, 0.98, 0.9], 3, 2),
        ([1.0, 0.99, 0.98, 0.97], 3, 2),
        ([1.0], 1, 1),
        ([0.9, 1.0], 0, 0),
    ],
)
def test_the_layer_above_the_depth_must_exceed_tau_too(curve: list[float], paper: int, safe: int) -> None:
    for boundary, expected in (("paper", paper), ("safe", safe)):
        rule = DepthRule(boundary=boundary)  # type: ignore[arg-type]
        assert depth_at(limits_of(rule, np.array(curve)).tolist(), TAU) == expected


def test_entries_grow() -> None:
    curves = {50: [1.0, 0.99, 0.5], 10: [1.0, 0.5, 0.5], 70: [1.0, 0.9, 0.9], 90: [1.0, 1.0, 1.0], 5: [0.1, 1.0, 1.0]}
    limits = {ratio: limits_of(AUTHORS, np.array(curve)).tolist() for ratio, curve in curves.items()}
    assert depth_entries(limits, TAU) == {10: 1, 50: 2, 90: 3}


def test_the_default_comes_first() -> None:
    assert RULES[0] == DepthRule()
    assert str(RULES[0]) == "leading, least-depth, safe"
    assert len(set(RULES)) == 12


@pytest.mark.parametrize("part", ["layers", "requests", "boundary"])
def test_unknown_parts_are_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        DepthRule(**{part: "other"})  # type: ignore[arg-type]

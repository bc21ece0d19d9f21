"""Depths of a table at another tau."""

from dataclasses import replace
from typing import Any

import pytest

from remask.depth.table import DepthTable
from remask.errors import ConfigError
from remask.policies.bicache import DepthLookup
from remask_lab.papers.measure import lookup_at
from tests.depth.test_table import TABLE

LIMITS = {50: (0.9, 0.8, 0.7), 80: (0.95, 0.9, 0.85)}


def table(**changes: Any) -> DepthTable:
    """A table of two ratios and three layers."""
    return replace(TABLE, layers=3, tau=0.8, source="a test", **{"limits": LIMITS, **changes})


def test_a_table_at_another_tau() -> None:
    assert lookup_at(table(), 0.8) == DepthLookup({50: 1, 80: 3})
    assert lookup_at(table(), 0.89) == DepthLookup({50: 1, 80: 2})


@pytest.mark.parametrize(
    ("changes", "tau", "message"),
    [
        ({"limits": {}}, 0.9, r"holds no similarities \(a test\).*tau 0.9 .*remask profile"),
        ({"limits": {50: (0.9, 0.8), 80: (0.95, 0.9)}}, 0.5, "without --needed-layers"),
    ],
)
def test_depths_that_a_table_does_not_hold(changes: dict[str, Any], tau: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookup_at(table(**changes), tau)

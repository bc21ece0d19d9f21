from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.policies.depth_lookup import DepthLookup, percent


@pytest.mark.parametrize(
    ("prefix", "canvas", "expected"),
    [
        (1, 8, 12),
        (27, 200, 14),
        (25, 200, 12),
        (1, 2, 50),
        (0, 7, 0),
        (7, 7, 100),
        (1, 3, 33),
        (2, 3, 67),
        (1, 1000, 0),
    ],
)
def test_halves_round_to_even(prefix: int, canvas: int, expected: int) -> None:
    assert percent(prefix, canvas) == expected


@given(st.integers(1, 5000), st.data())
def test_percent_is_within_half_a_point(canvas: int, data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, canvas))
    assert abs(percent(prefix, canvas) - Fraction(100 * prefix, canvas)) <= Fraction(1, 2) + Fraction(1, 10**9)


def test_the_largest_profiled_ratio_not_above_decides() -> None:
    table = DepthLookup({90: 5, 10: 1, 50: 3})
    depths = {r: table.depth(r, 100) for r in (0, 9, 10, 11, 49, 50, 89, 90, 100)}
    assert depths == {0: 0, 9: 0, 10: 1, 11: 1, 49: 1, 50: 3, 89: 3, 90: 5, 100: 5}


def test_the_canvas_counts_with_its_masks() -> None:
    table = DepthLookup({80: 4})
    assert table.depth(80, 100) == 4
    assert table.depth(80, 128) == 0


def test_an_empty_table_reuses_nothing() -> None:
    assert DepthLookup({}).depth(100, 100) == 0


def test_equal_depths_are_allowed() -> None:
    assert DepthLookup({1: 2, 5: 2}).depth(3, 100) == 2


@pytest.mark.parametrize("entries", [{1: 3, 2: 2}, {5: 0, 90: -1}, {0: -1}])
def test_depths_must_not_decrease(entries: dict[int, int]) -> None:
    with pytest.raises(ConfigError, match="depths must not decrease"):
        DepthLookup(entries)


@pytest.mark.parametrize("entries", [{-1: 1}, {101: 1}, {0: 1, 200: 3}])
def test_ratios_are_percents(entries: dict[int, int]) -> None:
    with pytest.raises(ConfigError, match="percents from 0 to 100"):
        DepthLookup(entries)


def test_entries_are_ordered_and_cannot_be_changed() -> None:
    source = {50: 3, 10: 1}
    table = DepthLookup(source)
    source[10] = 99
    assert list(table.entries.items()) == [(10, 1), (50, 3)]
    with pytest.raises(TypeError):
        table.entries[0] = 1  # type: ignore[index]


@given(st.dictionaries(st.integers(0, 100), st.integers(0, 40)), st.integers(1, 300), st.data())
def test_lookup_is_the_definition_and_monotone(entries: dict[int, int], canvas: int, data: st.DataObject) -> None:
    increasing = dict(zip(sorted(entries), sorted(entries.values()), strict=True))
    table = DepthLookup(increasing)
    first, second = sorted(data.draw(st.tuples(st.integers(0, canvas), st.integers(0, canvas))))
    keys = [key for key in increasing if key <= round(first / canvas * 100)]
    assert table.depth(first, canvas) == (increasing[max(keys)] if keys else 0)
    assert table.depth(first, canvas) <= table.depth(second, canvas)

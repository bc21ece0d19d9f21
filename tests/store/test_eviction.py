from typing import Any

import pytest

from remask.errors import UnknownNameError
from remask.store.eviction import Eviction, EvictionOrder


@pytest.mark.parametrize(("rule", "expected"), [("fifo", [1, 2, 3]), ("lru", [2, 3, 1])])
def test_use_moves_a_key_under_lru_only(rule: Eviction, expected: list[int]) -> None:
    order = EvictionOrder(rule)
    for key in (1, 2, 3):
        order.add(key)
    order.used(1)
    assert list(order) == expected


@pytest.mark.parametrize("rule", ["fifo", "lru"])
def test_removed_keys_are_forgotten(rule: Eviction) -> None:
    order = EvictionOrder(rule)
    order.add(1)
    order.add(2)
    order.remove(1)
    assert list(order) == [2]
    order.add(1)
    assert list(order) == [2, 1]
    with pytest.raises(KeyError):
        order.remove(7)


@pytest.mark.parametrize("rule", ["LRU", "lfu", "", None])
def test_unknown_rules(rule: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown eviction .*Available: fifo, lru"):
        EvictionOrder(rule)

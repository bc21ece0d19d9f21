from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.engine.scheduler import Scheduler, StepLimits


def costs(items: dict[str, int], budget: int | None) -> Scheduler[str]:
    scheduler: Scheduler[str] = Scheduler(StepLimits(budget))
    for item in items:
        scheduler.add(item)
    return scheduler


def price(items: dict[str, int]) -> Callable[[str, int | None], int]:
    return lambda item, _: items[item]


def never(item: object) -> bool:
    return False


def always(item: object) -> bool:
    return True


def test_without_a_budget_all_take_part_in_order() -> None:
    items = {"a": 10**9, "b": 1, "c": 5}
    assert costs(items, None).next(lambda _: True, price(items), never) == ["a", "b", "c"]


def test_the_budget_may_be_met_exactly() -> None:
    items = {"a": 3, "b": 4, "c": 1}
    assert costs(items, 7).next(lambda _: True, price(items), never) == ["a", "b"]


def test_what_did_not_fit_comes_first_in_the_next_round() -> None:
    items = {"a": 4, "b": 4, "c": 4}
    scheduler = costs(items, 8)
    rounds = [scheduler.next(lambda _: True, price(items), never) for _ in range(3)]
    assert rounds == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_the_first_always_runs_however_large() -> None:
    items = {"big": 100, "small": 1}
    scheduler = costs(items, 10)
    assert scheduler.next(lambda _: True, price(items), never) == ["big"]
    assert scheduler.next(lambda _: True, price(items), never) == ["small"]


def test_what_is_not_ready_keeps_its_place_and_costs_nothing() -> None:
    items = {"a": 5, "b": 5}
    scheduler = costs(items, 5)
    priced = []
    taken = scheduler.next(lambda item: item == "b", lambda item, _: priced.append(item) or items[item], never)  # type: ignore[func-returns-value]
    assert taken == ["b"]
    assert priced == ["b"]
    assert list(scheduler) == ["a", "b"]


@pytest.mark.parametrize("budget", [None, 1])
def test_nobody_is_nothing(budget: int | None) -> None:
    scheduler: Scheduler[str] = Scheduler(StepLimits(budget))
    assert scheduler.next(lambda _: True, lambda *_: 1, never) == []
    assert len(scheduler) == 0


def test_removed_items_are_gone() -> None:
    scheduler = costs({"a": 1, "b": 1}, None)
    scheduler.remove("a")
    assert scheduler.next(lambda _: True, lambda *_: 1, never) == ["b"]
    with pytest.raises(ValueError):
        scheduler.remove("a")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 12), st.data())
def test_nothing_starves_and_the_budget_holds(prices: list[int], budget: int, data: st.DataObject) -> None:
    scheduler: Scheduler[int] = Scheduler(StepLimits(budget))
    for item in range(len(prices)):
        scheduler.add(item)
    waited = [0] * len(prices)
    for _ in range(20):
        taken = scheduler.next(lambda _: True, lambda item, _: prices[item], never)
        assert taken
        assert len(set(taken)) == len(taken)
        assert len(taken) == 1 or sum(prices[item] for item in taken) <= budget
        spent = sum(prices[item] for item in taken)
        for item in range(len(prices)):
            waited[item] = 0 if item in taken else waited[item] + 1
            # Work-conserving: what would still have fitted was taken.
            assert item in taken or spent + prices[item] > budget
            assert waited[item] < len(prices)
        assert sorted(scheduler) == list(range(len(prices)))
        # The line may change between rounds.
        if data.draw(st.booleans()):
            scheduler.remove(taken[0])
            scheduler.add(taken[0])


def test_what_is_left_of_the_budget_is_told() -> None:
    items = {"a": 3, "b": 9, "c": 6}
    told = []
    costs(items, 10).next(always, lambda item, left: told.append(left) or items[item], never)  # type: ignore[func-returns-value]
    assert told == [10, 7, 7]
    told.clear()
    costs(items, None).next(always, lambda item, left: told.append(left) or items[item], never)  # type: ignore[func-returns-value]
    assert told == [None] * 3


def refreshing(limit: int | None, budget: int | None = None) -> Scheduler[str]:
    scheduler: Scheduler[str] = Scheduler(StepLimits(budget, limit))
    for item in "abcde":
        scheduler.add(item)
    return scheduler


def test_only_so_many_refresh_in_a_step() -> None:
    scheduler = refreshing(1)
    rounds = [scheduler.next(always, lambda *_: 1, lambda item: item in "abc") for _ in range(3)]
    assert rounds == [["a", "d", "e"], ["b", "d", "e"], ["c", "d", "e"]]
    assert refreshing(2).next(always, lambda *_: 1, lambda item: item in "abc") == ["a", "b", "d", "e"]
    assert refreshing(None).next(always, lambda *_: 1, always) == list("abcde")


def test_what_does_not_fit_takes_no_refresh_from_others() -> None:
    prices = {"a": 4, "b": 9, "c": 3, "d": 1, "e": 1}
    assert refreshing(2, 8).next(always, lambda item, _: prices[item], always) == ["a", "c"]


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=5, max_size=5), st.integers(1, 6))
def test_nothing_starves_for_others_refreshes(limit: int, heavy: list[bool], budget: int) -> None:
    scheduler = refreshing(limit, budget)
    waited = dict.fromkeys("abcde", 0)
    for _ in range(20):
        taken = scheduler.next(
            always, lambda item, _: 3 if heavy["abcde".index(item)] else 1, lambda item: heavy["abcde".index(item)]
        )
        assert sum(heavy["abcde".index(item)] for item in taken) <= limit
        for item in waited:
            waited[item] = 0 if item in taken else waited[item] + 1
            assert waited[item] < 5


@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    most=st.integers(1, 40),
    budget=st.none() | st.integers(1, 40),
)
def test_rows_of_a_step_have_room_and_nothing_starves(rows: list[int], most: int, budget: int | None) -> None:
    scheduler: Scheduler[int] = Scheduler(StepLimits(budget, rows=most))
    for item in range(len(rows)):
        scheduler.add(item)
    ran = set[int]()
    for _ in rows:
        taken = scheduler.next(always, lambda item, _: rows[item], never, lambda item: rows[item])
        assert sum(rows[item] for item in taken) <= most or len(taken) == 1
        ran.update(taken)
    assert ran == set(range(len(rows)))

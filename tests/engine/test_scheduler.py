import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.engine.scheduler import Scheduler


def costs(items: dict[str, int], budget: int | None) -> Scheduler[str]:
    scheduler: Scheduler[str] = Scheduler(budget)
    for item in items:
        scheduler.add(item)
    return scheduler


def test_without_a_budget_all_take_part_in_order() -> None:
    items = {"a": 10**9, "b": 1, "c": 5}
    assert costs(items, None).next(lambda _: True, items.__getitem__) == ["a", "b", "c"]


def test_the_budget_may_be_met_exactly() -> None:
    items = {"a": 3, "b": 4, "c": 1}
    assert costs(items, 7).next(lambda _: True, items.__getitem__) == ["a", "b"]


def test_what_did_not_fit_comes_first_in_the_next_round() -> None:
    items = {"a": 4, "b": 4, "c": 4}
    scheduler = costs(items, 8)
    rounds = [scheduler.next(lambda _: True, items.__getitem__) for _ in range(3)]
    assert rounds == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_the_first_always_runs_however_large() -> None:
    items = {"big": 100, "small": 1}
    scheduler = costs(items, 10)
    assert scheduler.next(lambda _: True, items.__getitem__) == ["big"]
    assert scheduler.next(lambda _: True, items.__getitem__) == ["small"]


def test_what_is_not_ready_keeps_its_place_and_costs_nothing() -> None:
    items = {"a": 5, "b": 5}
    scheduler = costs(items, 5)
    priced = []
    taken = scheduler.next(lambda item: item == "b", lambda item: priced.append(item) or items[item])  # type: ignore[func-returns-value]
    assert taken == ["b"]
    assert priced == ["b"]
    assert list(scheduler) == ["a", "b"]


@pytest.mark.parametrize("budget", [None, 1])
def test_nobody_is_nothing(budget: int | None) -> None:
    scheduler: Scheduler[str] = Scheduler(budget)
    assert scheduler.next(lambda _: True, lambda _: 1) == []
    assert len(scheduler) == 0


def test_removed_items_are_gone() -> None:
    scheduler = costs({"a": 1, "b": 1}, None)
    scheduler.remove("a")
    assert scheduler.next(lambda _: True, lambda _: 1) == ["b"]
    with pytest.raises(ValueError):
        scheduler.remove("a")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 12), st.data())
def test_nothing_starves_and_the_budget_holds(prices: list[int], budget: int, data: st.DataObject) -> None:
    scheduler: Scheduler[int] = Scheduler(budget)
    for item in range(len(prices)):
        scheduler.add(item)
    waited = [0] * len(prices)
    for _ in range(20):
        taken = scheduler.next(lambda _: True, prices.__getitem__)
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

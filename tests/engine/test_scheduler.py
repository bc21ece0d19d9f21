from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.engine.member import Member, Tally, Turn
from remask.engine.planning import Scheduler, StepLimits
from remask.engine.request import Owner


@dataclass(eq=False)
class Stub:
    """A member whose turn has a price and rows, and may be a heavy refresh."""

    id: str
    price: int = 1
    heavy: bool = False
    rows: int = 0
    owner: Owner = field(default_factory=Owner)
    canvases: tuple[None, ...] = (None,)
    min_cost: int | None = None
    offered: list[int] = field(default_factory=list)

    def plan(self) -> Turn:
        tally = Tally(self.price, self.rows, refreshes=self.heavy)
        return Turn(cast("Member", self), (), tally, None, np.empty(0, dtype=np.int64))

    def fit(self, turn: Turn, row_layers: int) -> None:  # noqa: ARG002
        self.offered.append(row_layers)


def line(limits: StepLimits, *members: Stub) -> Scheduler:
    scheduler = Scheduler(limits)
    for member in members:
        scheduler.add(cast("Member", member))
    return scheduler


def priced(limits: StepLimits, prices: Any, heavy: str = "") -> Scheduler:
    """`prices` by the ids of members, of which those in `heavy` refresh."""
    return line(limits, *(Stub(name, price, name in heavy) for name, price in prices.items()))


def taken(scheduler: Scheduler, ready: str | None = None) -> list[str]:
    """The ids of the members that the next step takes, of those that are `ready`; None: of all."""
    turns = [member.plan() for member in scheduler.line if ready is None or member.id in ready]
    return [turn.member.id for turn in scheduler.choose_turns(turns)]


ALIKE = dict.fromkeys("abcde", 1)
# Limits, the prices of members, those that refresh, and what the next steps take.
STEPS: list[tuple[StepLimits, dict[str, int], str, list[str]]] = [
    (StepLimits(), {"a": 10**9, "b": 1, "c": 5}, "", ["abc"]),
    (StepLimits(7), {"a": 3, "b": 4, "c": 1}, "", ["ab"]),  # the budget may be met exactly
    (StepLimits(8), {"a": 4, "b": 4, "c": 4}, "", ["ab", "ca", "bc"]),  # what did not fit comes first
    (StepLimits(10), {"a": 100, "b": 1}, "", ["a", "b"]),  # the first always runs
    (StepLimits(None), {}, "", [""]),
    (StepLimits(1), {}, "", [""]),
    (StepLimits(None, 1), ALIKE, "abc", ["ade", "bde", "cde"]),
    (StepLimits(None, 2), ALIKE, "abc", ["abde"]),
    (StepLimits(), ALIKE, "abcde", ["abcde"]),
    # What does not fit takes no refresh from others.
    (StepLimits(8, 2), {"a": 4, "b": 9, "c": 3, "d": 1, "e": 1}, "abcde", ["ac"]),
]


@pytest.mark.parametrize(("limits", "prices", "heavy", "steps"), STEPS)
def test_who_takes_part_in_the_next_steps(
    limits: StepLimits, prices: dict[str, int], heavy: str, steps: list[str]
) -> None:
    scheduler = priced(limits, prices, heavy)
    assert ["".join(taken(scheduler)) for _ in steps] == steps


def test_what_is_not_ready_keeps_its_place() -> None:
    scheduler = priced(StepLimits(5), {"a": 5, "b": 5})
    assert taken(scheduler, "b") == ["b"]
    assert [member.id for member in scheduler.line] == ["a", "b"]


def test_removed_members_are_gone() -> None:
    scheduler = priced(StepLimits(), {"a": 1, "b": 1})
    member = scheduler.line[0]
    scheduler.remove(member)
    assert taken(scheduler) == ["b"]
    with pytest.raises(ValueError):
        scheduler.remove(member)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 12), st.data())
def test_nothing_starves_and_the_budget_holds(prices: list[int], budget: int, data: st.DataObject) -> None:
    price = {str(number): each for number, each in enumerate(prices)}
    scheduler, waited = priced(StepLimits(budget), price), dict.fromkeys(price, 0)
    for _ in range(20):
        step = taken(scheduler)
        assert step
        assert len(set(step)) == len(step)
        spent = sum(price[name] for name in step)
        assert len(step) == 1 or spent <= budget
        for name in waited:
            waited[name] = 0 if name in step else waited[name] + 1
            # Work-conserving: what would still have fitted was taken.
            assert name in step or spent + price[name] > budget
            assert waited[name] < len(prices)
        assert sorted(member.id for member in scheduler.line) == sorted(price)
        # The line may change between rounds.
        if data.draw(st.booleans()):
            member = scheduler.line[-1]
            scheduler.remove(member)
            scheduler.add(member)


def test_what_is_left_of_the_budget_is_told() -> None:
    members = [Stub("a", 3), Stub("b", 9), Stub("c", 6)]
    taken(line(StepLimits(10), *members))
    taken(line(StepLimits(), *members))
    assert [member.offered for member in members] == [[10], [7], [7]]


def test_a_refresh_that_costs_what_every_pass_costs_is_not_heavy() -> None:
    members = [Stub(name, 4, heavy=True, min_cost=min_cost) for name, min_cost in (("a", 4), ("b", 3), ("c", None))]
    assert taken(line(StepLimits(None, 1), *members)) == ["a", "b"]


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=5, max_size=5), st.integers(1, 6))
def test_nothing_starves_for_others_refreshes(limit: int, heavy: list[bool], budget: int) -> None:
    refreshing = {name for name, is_heavy in zip("abcde", heavy, strict=True) if is_heavy}
    prices = {name: 3 if name in refreshing else 1 for name in "abcde"}
    scheduler, waited = priced(StepLimits(budget, limit), prices, "".join(refreshing)), dict.fromkeys("abcde", 0)
    for _ in range(20):
        step = taken(scheduler)
        assert len(refreshing & set(step)) <= limit
        for name in waited:
            waited[name] = 0 if name in step else waited[name] + 1
            assert waited[name] < 5


@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    most=st.integers(1, 40),
    budget=st.none() | st.integers(1, 40),
)
def test_rows_of_a_step_have_room_and_nothing_starves(rows: list[int], most: int, budget: int | None) -> None:
    members = [Stub(str(number), width, rows=width) for number, width in enumerate(rows)]
    scheduler, ran = line(StepLimits(budget, max_rows=most), *members), set[str]()
    for _ in rows:
        step = taken(scheduler)
        assert sum(rows[int(name)] for name in step) <= most or len(step) == 1
        ran.update(step)
    assert len(ran) == len(rows)

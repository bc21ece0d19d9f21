"""Whose long texts are read next."""

import asyncio

import pytest

from remask.server.texts import Turns


async def _served(asked: list[str], places: int = 1, cancelled: tuple[int, ...] = ()) -> list[str]:
    """The order in which owners get a place, each of which gives it back at once."""
    turns, order = Turns(places), []
    for _ in range(places):
        await turns.acquire("before")

    async def one(owner: str) -> None:
        await turns.acquire(owner)
        order.append(owner)
        turns.release()

    tasks = [asyncio.create_task(one(owner)) for owner in asked]
    await asyncio.sleep(0)  # all stand in line
    for index in cancelled:
        tasks[index].cancel()
    for _ in range(places):
        turns.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(places):  # every place is free again
        await turns.acquire("after")
    return order


@pytest.mark.parametrize("places", [1, 3])
def test_owners_take_turns_whoever_asks_most(places: int) -> None:
    order = asyncio.run(_served(["a"] * 60 + ["b", "b", "c"], places))
    assert order[:6] == ["a", "b", "c", "a", "b", "a"]
    assert len(order) == 63


def test_who_leaves_the_line_costs_nobody_a_turn() -> None:
    assert asyncio.run(_served(["a", "a", "b", "c"], cancelled=(0, 2))) == ["a", "c"]


def test_a_place_that_is_given_to_one_who_leaves_in_the_same_moment_goes_on() -> None:
    async def main() -> None:
        turns = Turns(1)
        await turns.acquire("a")
        leaving = asyncio.create_task(turns.acquire("b"))
        await asyncio.sleep(0)
        turns.release()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await turns.acquire("c")

    asyncio.run(main())

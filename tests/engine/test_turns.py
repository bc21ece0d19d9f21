"""Whose turn it is: counted in steps and in the order in which requests begin, never in seconds."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.engine.planning import StepLimits
from remask.engine.request import Owner, PendingRequest, Request
from remask.engine.waiting import WaitingQueue
from remask.errors import QueueFullError
from remask.request.result import Result
from remask.request.terms import PRIORITY_STEP_S
from tests.engine.support import Work, alone, make_engine, outcome, request, run
from tests.engine.test_async_engine import checked, drive, ends
from tests.engine.test_scheduler import Stub, line, taken

HOSTILE, CANARY = Owner("hostile", "many"), Owner("canary", "one")


def asked(name: str, owner: Owner, **fields: Any) -> Request:
    terms = {each: fields.pop(each) for each in ("priority",) if each in fields}
    return replace(request(name, **fields), owner=owner, **terms)


def flood(count: int, owner: Owner = HOSTILE, tokens: int = 12) -> list[Request]:
    """The choices of one body, each of which takes as many steps as tokens."""
    return [asked(f"{owner.body} {n}", owner, max_tokens=tokens, block_length=1, steps=tokens) for n in range(count)]


def steps_until(engine: Engine, name: str) -> int:
    for step in range(1, 10_000):
        if any(event.result is not None and event.id == name for event in engine.step()):
            return step
    raise AssertionError("it never ended")


def finish(engine: Engine) -> dict[str, Result]:
    return run(engine, [], each_step=lambda _: engine.check_integrity())


@pytest.mark.parametrize("budget", [None, 150])
def test_one_body_of_many_choices_holds_nobody_else_up(budget: int | None) -> None:
    """All slots are taken and the queue is full when the canary comes, which needs eight steps alone."""
    engine = make_engine(max_num_seqs=4, max_row_layers=budget)
    many = flood(12, tokens=24)
    for each in many:
        engine.add(each)
    for _ in range(3):
        engine.step()
    canary = asked("canary", CANARY)
    engine.add(canary)
    assert steps_until(engine, "canary") <= (9 if budget is None else 17)
    results = finish(engine)
    assert len(results) == 12, "nothing of the others is lost"
    assert outcome(results[many[7].id]) == outcome(alone(Work(many[7], many[7].policy)))


def test_bodies_of_one_client_take_turns_too() -> None:
    """As where all clients come through one proxy."""
    engine = make_engine(max_num_seqs=4)
    for each in flood(12, tokens=24):
        engine.add(each)
    engine.step()
    engine.add(asked("other body", Owner("hostile", "other")))
    assert steps_until(engine, "other body") <= 9
    finish(engine)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_has_no_more_canvases_than_may_run_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(max_num_seqs=3, max_row_layers=rng.choice([None, 120]))
    whole, sizes = engine.runner.run, list[int]()

    def counted(items: Any) -> Any:
        sizes.append(len(items))
        return whole(items)

    engine.runner.run = counted  # type: ignore[method-assign]
    for client in range(6):
        for body in range(2):
            for each in flood(3, Owner(f"c{client}", f"c{client}b{body}"), tokens=4):
                engine.add(replace(each, params=replace(each.params, cfg_scale=rng.choice([0.0, 0.0, 1.0]))))
    results = finish(engine)
    assert {result.error for result in results.values()} == {None}
    assert max(sizes) <= 3
    assert Counter(name[:2] for name in results) == {f"c{client}": 6 for client in range(6)}


def test_a_client_has_its_share_of_row_layers_where_others_compute() -> None:
    """Long canvases of one client do not make the steps of another one long; alone it has all."""
    engine = make_engine(max_num_seqs=8, max_client_row_layers=4 * 40)
    for each in flood(6, tokens=24):
        engine.add(each)
    costs = list[int]()

    def step() -> None:
        before = engine.stats.row_layers
        engine.step()
        costs.append(engine.stats.row_layers - before)

    step()
    assert costs == [6 * 32 * 4], "nobody else is there"
    engine.add(asked("canary", CANARY))
    for _ in range(8):
        step()
    assert costs[1:] == [(32 + 16) * 4] * 8
    assert "canary" not in engine._lifecycle.ids, "it took part in every step"
    finish(engine)


class Line:
    """Requests that wait, and that begin when they are told to."""

    def __init__(self) -> None:
        self.turns, self.now = WaitingQueue(), 1000.0
        self.engine = make_engine()

    def come(self, name: str, owner: Owner, priority: int = 0) -> PendingRequest:
        pending = self.engine.check(asked(name, owner, priority=priority))
        self.now += 1e-3
        pending.arrived = self.now
        self.turns.add(pending)
        return pending

    def begin(self) -> str:
        pending = self.turns.first(self.now)
        assert pending is not None
        self.turns.remove(pending)
        self.turns.add_running(pending)
        return pending.request.id


def test_clients_then_bodies_then_arrival() -> None:
    line = Line()
    for name, client, body in [
        ("a1", "a", "1"),
        ("a2", "a", "1"),
        ("a3", "a", "2"),
        ("b1", "b", "1"),
        ("b2", "b", "1"),
    ]:
        line.come(name, Owner(client, body))
    assert [line.begin() for _ in range(5)] == ["a1", "b1", "a3", "b2", "a2"]
    assert line.turns.first(line.now) is None


def test_what_has_ended_is_held_no_more() -> None:
    line = Line()
    first = line.come("a1", Owner("a", "1"))
    line.come("a2", Owner("a", "1"))
    line.begin()
    line.come("b1", Owner("b", "1"))
    line.turns.remove_running(first)
    assert [line.begin() for _ in range(2)] == ["a2", "b1"], "by arrival, as neither holds anything"


def test_priorities_come_first_and_waiting_weighs_as_they_do() -> None:
    line = Line()
    line.come("late", Owner("a", "1"), priority=1)
    line.come("now", Owner("b", "1"))
    line.come("first", Owner("c", "1"), priority=-1)
    assert line.begin() == "first"
    line.come("also first", Owner("c", "1"), priority=-1)
    line.now += 2.5 * PRIORITY_STEP_S
    assert line.begin() == "now", "it has waited for two numbers, and the client of the other holds something"
    assert line.begin() == "late", "for the same reason"
    assert line.begin() == "also first"


def test_requests_of_one_owner_begin_by_priority_and_arrival() -> None:
    line = Line()
    owner = Owner()
    for name, priority in (("third", 1), ("first", 0), ("second", 0)):
        line.come(name, owner, priority)
    assert [line.begin() for _ in range(3)] == ["first", "second", "third"]


def test_parts_beyond_the_usual_number() -> None:
    line = Line()
    held = [line.come(f"a{n}", HOSTILE) for n in range(4)]
    for _ in held:
        line.begin()
    more = line.come("a4", HOSTILE)
    assert not line.turns.may_exceed(more, 4, 4), "it is alone"
    other = line.come("b", CANARY)
    assert line.turns.may_exceed(other, 4, 4)
    assert not line.turns.may_exceed(more, 4, 4), "it has more than its part"
    for number in range(7):
        line.come(f"c{number}", Owner(f"c{number}", "one"))
        line.begin()
    assert not line.turns.may_exceed(other, 11, 4), "twice as many clients hold one"
    line = Line()
    for number in range(16):
        same = line.come(f"a{number}", Owner("hostile", f"body {number}"))
        assert line.turns.may_exceed(same, number, 4) == (number > 0)
        line.begin()
    assert not line.turns.may_exceed(line.come("a16", Owner("hostile", "body 16")), 16, 4)
    assert line.turns.may_exceed(line.come("b", CANARY), 16, 4), "another client waits for none of them"


@pytest.mark.parametrize("count", [9, 30])
def test_streams_of_one_client_hold_none_of_its_others_up(count: int) -> None:
    """As behind a proxy, or a page that opens many: each has a connection and a body of its own."""
    engine = make_engine(max_num_seqs=8, store_budget_tokens=1024)  # idle, so its pages have room for canvases
    for number in range(count):
        engine.add(flood(1, Owner("one address", f"stream {number}"), tokens=36)[0])
    for _ in range(3):
        engine.step()
    engine.add(asked("canary", Owner("one address", "canary")))
    assert steps_until(engine, "canary") <= 8 * 5, "eight steps alone, each of which is every fifth at the latest"
    assert len(finish(engine)) == count


def test_streams_of_one_client_leave_room_for_another_client() -> None:
    engine = make_engine(max_num_seqs=4, store_budget_tokens=128)
    longest = engine.max_model_len - len(flood(1)[0].prompt_token_ids)
    for number in range(20):
        engine.add(flood(1, Owner("one address", f"stream {number}"), tokens=longest // 2)[0])
    engine.step()
    assert 4 < len(engine._lifecycle.requests()) < 16, "some begin beyond the usual number, until memory is full"
    engine.add(asked("canary", CANARY, max_tokens=longest, block_length=1, steps=longest))
    engine.step()
    assert "canary" in [each.request.id for each in engine._lifecycle.requests()]
    assert len(finish(engine)) == 21


def test_items_of_a_step_take_turns_by_client_and_body() -> None:
    """Each costs 4, and three fit."""
    names = ("a1x", "a1y", "a1z", "a2x", "b1x")
    scheduler = line(StepLimits(budget=12), *(Stub(name, 4, owner=Owner(name[0], name[:2])) for name in names))
    rounds = [taken(scheduler) for _ in range(4)]
    assert rounds[0] == ["a1x", "b1x", "a2x"]
    assert all(any(name[0] == "b" for name in step) for step in rounds)
    assert Counter(name for step in rounds for name in step)["a2x"] >= 2


def test_no_client_may_hold_all_of_the_queue() -> None:
    """By what its requests ask for; others are accepted meanwhile."""
    one = make_engine().check(asked("one", CANARY)).row_layers

    async def act(outer: Any) -> None:
        held = outer.submit(checked(outer, *(asked(f"h{n}", HOSTILE) for n in range(3))))
        with pytest.raises(QueueFullError, match=rf"{3 * one} are open, and this one asks for {one}; try again later"):
            outer.submit(checked(outer, asked("more", HOSTILE)))
        with pytest.raises(QueueFullError, match="ask for fewer answers"):
            outer.submit(checked(outer, *(asked(f"n{n}", Owner("third", "b")) for n in range(4))))
        other = outer.submit(checked(outer, asked("canary", CANARY)))
        await asyncio.gather(ends(held), ends(other))
        await ends(outer.submit(checked(outer, *(asked(f"again {n}", HOSTILE) for n in range(3)))))

    drive(act, max_client_work=3 * one)


def test_waiting_is_told_by_the_clock_of_the_engine() -> None:
    """Nobody has waited: a request that leads begins before that of a client which holds nothing."""
    engine = make_engine(max_num_seqs=2)
    engine.clock = lambda: 0.0
    for each in (*flood(1, tokens=4), *flood(1, Owner("another", "one"), tokens=2)):
        engine.add(each)
    engine.step()
    engine.add(asked("later", CANARY, priority=5))
    engine.add(asked("leads", HOSTILE, priority=-1))
    begun = [event.id for _ in range(3) for event in engine.step() if event.queued_s is not None]
    assert begun == ["leads", "later"]
    finish(engine)

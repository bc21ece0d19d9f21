"""A growing canvas in the engine: its pages, who goes first, and what may not grow."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import BiCache, CachePolicy, Dense
from remask.policies.bicache import DepthLookup
from remask.policies.block import BlockDual
from remask.policies.dkv import DkvGreedy
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.result import Event, Result
from remask.store.pages import Extent
from tests.engine import kinds
from tests.engine.support import (
    EOS,
    LAYERS,
    Work,
    alone,
    make_engine,
    outcome,
    poisoned_engine,
    request,
    run,
    running_canvases,
)
from tests.engine.test_constraint import drawn as drawn_form

GROWING: dict[str, Any] = {"growing_canvas": True, "block_length": 4}


def growing(name: str, prompt: int = 8, tokens: int = 12, **fields: Any) -> Request:
    return request(name, prompt, max_tokens=tokens, **GROWING, **fields)


def steps(engine: Engine, count: int) -> list[Event]:
    return [event for _ in range(count) for event in engine.step()]


def results(events: Sequence[Event]) -> dict[str, Result]:
    return {event.id: event.result for event in events if event.result is not None}


def take_all_but(engine: Engine, pages: int) -> tuple[Extent, ...]:
    """Claim free pages, as others would, and leave so many."""
    allocator, size = engine.allocator, engine.allocator.page_size
    free = int((allocator.references == 0).all(axis=0).sum())
    found = allocator.find([((free - pages) * size, range(LAYERS))])
    assert found is not None
    allocator.claim(found[0])
    return found


def test_pages_are_claimed_block_by_block_and_a_short_answer_never_pays_for_its_limit() -> None:
    engine = make_engine()  # pages of four
    engine.add(growing("r", tokens=48))
    used = []
    while engine.busy:
        if engine.step() and running_canvases(engine):
            used.append(engine.allocator.used)
    assert sorted(set(used) - {0}) == [LAYERS * pages for pages in range(3, 15)]
    held = [each for each in used if each]  # none between two blocks, until the next step
    assert held == sorted(held)
    (whole,) = {alone(Work(growing("r", tokens=tokens), Dense())).token_ids[:12] for tokens in (12, 48)}
    stop = replace(growing("r", tokens=48), params=replace(growing("r", tokens=48).params, stop_token_ids=whole[5:6]))
    short = alone(Work(stop, Dense()))
    assert (short.token_ids, short.finish_reason) == (whole[: whole.index(whole[5]) + 1], "stop")
    assert short.usage.row_layers <= LAYERS * (4 * 12 + 4 * 16)


def test_a_fixed_canvas_pays_for_it() -> None:
    engine = make_engine()
    engine.add(request("r", 8, max_tokens=48, block_length=4))
    engine.step()
    assert engine.allocator.used == LAYERS * 14


def test_without_pages_a_request_waits_with_its_tokens_and_goes_on_before_anything_begins() -> None:
    engine = make_engine(store_budget_tokens=0)
    alone_first, alone_second = (alone(Work(growing(name, seed=1), Dense())) for name in ("first", "second"))
    engine.add(growing("first", seed=1))
    engine.add(growing("second", seed=1))
    steps(engine, 1)  # three pages each
    taken = take_all_but(engine, 0)
    told = steps(engine, 3)  # which ends the first block of both
    assert not results(told)
    steps(engine, 1)
    # Six pages are free again, of which the first needs four. The second waits, and so does what could begin.
    engine.add(request("new", 4, max_tokens=4))
    told = steps(engine, 2)
    waiting = list(engine._lifecycle.growing.values())
    assert [running.request.id for running in waiting] == ["second"]
    assert waiting[0].claim.extents == []
    assert (running_canvases(engine), engine.waiting) == (2, 1)
    assert {event.id for event in told} == {"first"}
    for extent in taken:
        engine.allocator.release(extent)
    found = run(engine, [])
    for name, expected in (("first", alone_first), ("second", alone_second)):
        assert (found[name].token_ids, found[name].trace) == (expected.token_ids, expected.trace)
    assert found["new"].finish_reason == "length"


def test_those_that_wait_go_on_in_the_order_in_which_they_came_to_wait() -> None:
    """However little the later one needs: else what needs most would wait for ever."""
    engine = make_engine(store_budget_tokens=0)
    engine.add(growing("large", prompt=24))
    engine.add(growing("small", prompt=4))
    steps(engine, 1)
    taken = take_all_but(engine, 0)
    steps(engine, 4)
    # Nine pages were theirs, and the large one needs eight.
    assert [pending.request.id for pending in engine._lifecycle.growing] == ["small"]
    steps(engine, 3)
    assert [pending.request.id for pending in engine._lifecycle.growing] == ["small", "large"]
    for extent in taken:
        engine.allocator.release(extent)
    assert {result.finish_reason for result in run(engine, []).values()} == {"length"}


@pytest.mark.parametrize("how", ["cancelled", "timeout", "error"])
def test_a_request_ends_while_it_waits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(store_budget_tokens=0)
    engine.add(replace(growing("r"), deadline_s=100.0))
    steps(engine, 1)
    taken = take_all_but(engine, 0)
    steps(engine, 3)
    (extra,) = take_all_but(engine, 0)
    steps(engine, 2)
    assert (engine.busy, running_canvases(engine), len(engine._lifecycle.growing)) == (True, 1, 1)
    if how == "cancelled":
        assert engine.cancel("r")
    elif how == "timeout":
        (pending,) = engine._lifecycle.growing
        pending.arrived -= 100
    else:
        monkeypatch.setattr(engine.memory, "plan", lambda _: 1 / 0)
    for extent in (*taken, extra):
        engine.allocator.release(extent)
    found = results(steps(engine, 1))["r"]
    assert (found.finish_reason, found.token_ids, found.usage.steps) == (how, (), 4)
    assert len(found.trace) == 4
    assert not engine.busy
    engine.check_integrity()


def test_what_waits_outlives_a_failure_of_the_engine() -> None:
    engine = make_engine(store_budget_tokens=0)
    expected = alone(Work(growing("r"), Dense()))
    engine.add(growing("r"))
    engine.add(request("other", 4, max_tokens=12))
    steps(engine, 1)
    take_all_but(engine, 0)
    steps(engine, 3)
    take_all_but(engine, 0)
    steps(engine, 1)
    assert len(engine._lifecycle.growing) == 1
    engine.recover(MemoryError("of the device"))
    found = run(engine, [])
    assert (found["r"].token_ids, found["r"].trace, found["r"].error) == (expected.token_ids, expected.trace, None)
    assert found["other"].finish_reason == "error"  # it ran, and had told of tokens


def test_the_ratio_of_a_depth_table_is_that_of_the_canvas_as_it_is() -> None:
    table = DepthLookup({40: 1, 50: 2, 60: 3})  # of 8 of 12, 16 and 20 positions
    asked = request("r", 8, 8, max_tokens=12, **GROWING)
    by_table = alone(Work(asked, BiCache(depth=table)))
    engine = make_engine()
    engine.add(asked.with_policy(BiCache(depth=table)))
    depths = []
    while engine.busy:
        engine.step()
        depths += [each.canvases[0].prefix.boundary for each in engine._lifecycle.requests() if each.canvases[0].prefix]
    assert list(dict.fromkeys(depths)) == [3, 2, 1]
    # The first step of each block refreshes the prefix above the boundary.
    blocks = [4 * LAYERS * (4 * number + 4) + 8 * (LAYERS - depth) for number, depth in enumerate((3, 2, 1))]
    assert by_table.usage.row_layers == sum(blocks)
    assert by_table.usage.prefix_depth == 3


def test_stops_span_blocks_and_end_tokens_end_a_block() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    (whole,) = run(make_engine(decode=decode), [Work(growing("r"), Dense())]).values()
    text = decode(whole.token_ids)
    stop = text[3:5]
    asked = growing("r", stop=[stop])
    (found,) = run(make_engine(decode=decode), [Work(asked, Dense())]).values()
    assert found.finish_reason == "stop"
    assert stop in decode(found.token_ids)
    assert len(found.token_ids) <= 8


def test_log_probabilities_and_forced_tokens_of_all_blocks() -> None:
    asked = growing("r", tokens=10, temperature=0.8, seed=4).with_readers(Logprobs(2))
    (found,) = run(make_engine(), [Work(asked, BlockDual())]).values()
    written = [position for transfer in found.trace for position in transfer.positions]
    assert sorted(written) == list(range(8, 18))
    assert all(len(transfer.logprobs) == len(transfer.positions) for transfer in found.trace)
    assert [transfer.step for transfer in found.trace] == list(range(10))
    again = asked.with_readers(ForcedTokens(found.trace))
    (other,) = run(make_engine(), [Work(again, BlockDual())]).values()
    assert (other.token_ids, other.error) == (found.token_ids, None)


@pytest.mark.parametrize("seed", range(3))
def test_a_form_is_kept_over_all_blocks(seed: int) -> None:
    constraint, form = drawn_form(random.Random(seed), 64, 63, (EOS,), 12)
    (found,) = run(make_engine(), [Work(growing("r", ignore_eos=False).with_readers(constraint), Dense())]).values()
    assert found.error is None
    form.check(found.token_ids)


@pytest.mark.parametrize("policy", [Dense(), BlockDual()], ids=["none", "block-dual"])
@pytest.mark.parametrize("sampling", [{}, {"threshold": 0.3}, {"steps_per_block": 2}], ids=repr)
def test_overlapping_passes_change_nothing(policy: CachePolicy, sampling: dict[str, Any]) -> None:
    work = [Work(growing(name, tokens=tokens, **sampling), policy, joins) for name, tokens, joins in
            (("a", 12, 0), ("b", 10, 1), ("c", 4, 3))]  # fmt: skip
    work.append(Work(request("fixed", 8, block_length=4, **sampling), policy, 2))
    found = run(make_engine(overlap=True), work)
    for item in work:
        assert outcome(found[item.request.id]) == outcome(alone(item)), item.request.id


@pytest.mark.parametrize("policy", [Dense(), BlockDual()], ids=["none", "block-dual"])
def test_plans_repeat_in_every_block(policy: CachePolicy) -> None:
    def queued(tokens: int) -> int:
        engine = make_engine(overlap=True)
        run(engine, [Work(growing("r", tokens=tokens), policy)])
        return engine.stats.queued_passes

    assert queued(12) == 3 * queued(4) > 0


def test_what_has_places_behind_the_response_may_not_grow() -> None:
    asked, engine = growing("r", tokens=6), make_engine()
    template = Template((OPEN, OPEN, 7, OPEN, OPEN, 7), (Hole(0, 2), Hole(3, 5)))
    with pytest.raises(ConfigError, match="growing_canvas: a canvas that grows has nothing behind"):
        engine.check(replace(asked, template=template))
    with pytest.raises(ConfigError, match="window=5 exceeds the response's 4 positions"):
        engine.check(growing("r", remasking="random").with_policy(DkvGreedy(None, 5)))
    with pytest.raises(ConfigError, match="growing_canvas is for masked models"):
        poisoned_engine(kinds.checkpoint("sdar").model).check(request("r", [1, 2], **GROWING))


def test_work_is_limited_by_the_longest_canvas() -> None:
    engine = make_engine(max_request_row_layers=LAYERS * 20 * 12)
    engine.check(growing("r"))
    with pytest.raises(ConfigError, match="max_tokens=13 and 13 steps may take"):
        engine.check(growing("r", tokens=13))
    with pytest.raises(ConfigError, match="make a canvas of 65"):
        engine.check(growing("r", tokens=57))

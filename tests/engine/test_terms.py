"""What a request asks of the service: priority, a deadline, and entries that are its tenant's own."""

import re
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.families import preset
from remask.policies import Dense, Reuse
from remask.policies.exact import Exact
from tests.engine.support import (
    CheckedTransformer,
    Work,
    alone,
    events_of,
    let_pass,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    request,
    run,
    running_canvases,
)


def started(engine: Engine) -> list[str]:
    return [running.request.id for running in engine._lifecycle.unfinished()]


def test_lower_priorities_begin_first_and_equal_ones_as_they_came() -> None:
    asked = (
        replace(request(name, max_tokens=1), priority=priority)
        for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", 1))
    )
    events = events_of(make_engine(max_num_seqs=1), *asked)
    assert [event.id for event in events if event.result is not None] == ["c", "b", "d", "a", "e"]


def test_what_runs_is_not_touched_by_a_higher_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("running"))
    engine.step()
    engine.add(replace(request("urgent"), priority=-1))
    engine.step()
    assert started(engine) == ["running"]
    run(engine, [])


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("running", "waiting", "other"):
        engine.add(replace(request(name, prefix=6), deadline_s=None if name == "other" else 60.0).with_policy(Reuse()))
    engine.step()
    engine.step()
    assert started(engine) == ["running"]
    for name in ("running", "waiting"):
        let_pass(engine, name, 59.0)
    assert not [event for event in engine.step() if event.result]
    for name in ("running", "waiting"):
        let_pass(engine, name, 2.0)
    ended = [event.result for event in engine.step() if event.result]
    assert {result.id: (result.finish_reason, result.token_ids) for result in ended} == {
        "running": ("timeout", ()),
        "waiting": ("timeout", ()),
    }
    assert started(engine) == ["other"], "the slot was free within the same step"
    engine.check_integrity()
    assert outcome(run(engine, [])["other"]) == outcome(alone(Work(request("other", prefix=6), Reuse())))


def test_a_deadline_while_the_prefix_pass_is_due_leaves_the_entry_usable() -> None:
    engine = make_engine(max_row_layers=1)
    engine.add(request("busy"))
    engine.step()
    engine.add(replace(request("late", prefix=6), deadline_s=60.0).with_policy(Reuse()))
    engine._admission.admit(engine.clock())
    let_pass(engine, "late", 61.0)
    results = run(engine, [Work(request("next", prefix=6), Reuse(), joins=2)])
    assert results["late"].finish_reason == "timeout"
    assert results["next"].usage.cached_tokens == 6
    assert engine.stats.prefix_passes == 1


def test_an_id_is_free_again_after_a_timeout() -> None:
    engine = make_engine()
    engine.add(replace(request("r"), deadline_s=1e-9))
    assert [event.result.finish_reason for event in engine.step() if event.result] == ["timeout"]
    assert run(engine, [Work(request("r"), Dense())])["r"].finish_reason == "length"


def test_tenants_share_nothing() -> None:
    engine = make_engine(max_num_seqs=6)
    work = [Work(replace(request(f"{salt} {i}", 8, 6), cache_salt=salt), Reuse()) for salt in "abc" for i in range(2)]
    results = run(engine, work)
    assert engine.stats.prefix_passes == 3
    assert {name: result.usage.cached_tokens for name, result in results.items()} == {
        f"{salt} {i}": 6 * i for salt in "abc" for i in range(2)
    }
    assert len({results[f"{salt} {i}"].token_ids for salt in "abc" for i in range(2)}) == 1


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ({"cache_salt": None}, "cache_salt must be a text"),
        ({"cache_salt": "\udc80"}, "valid Unicode"),
        ({"priority": "high"}, "priority must be a whole number from -(2**63 - 1) to 2**63 - 1, got 'high'"),
        ({"priority": True}, "priority must be"),
        ({"deadline_s": -1}, "deadline_s must be"),
        ({"deadline_s": float("inf")}, "deadline_s must be"),
        ({"deadline_s": "1"}, "deadline_s must be"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(term: dict[str, Any], text: str) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=re.escape(text)):
        engine.add(replace(request(), **term))
    assert not engine.busy


def block_causal_engine(**limits: Any) -> Engine:
    """A model whose pages are shared exactly: four tokens a block, and a block a page."""
    config = replace(preset("sdar-tiny"), max_length=128)
    model = CheckedTransformer(config, lively_weights(config))
    return poisoned_engine(model, page_size=config.block_length, **limits)


def test_tenants_share_no_exact_pages_either() -> None:
    engine = block_causal_engine()
    size = engine.pool.page_size
    cached = []
    for number, salt in enumerate(("a", "b", "a", "", "b")):
        asked = replace(request(f"r{number}", [1] * 4 * size, max_tokens=size), cache_salt=salt)
        cached.append(run(engine, [Work(asked, Exact())])[asked.id].usage.cached_tokens)
    assert cached[0] == cached[1] == cached[3] == 0
    assert cached[2] == cached[4] > 0


def test_a_deadline_ends_a_request_on_exact_pages_and_leaves_nothing() -> None:
    engine = block_causal_engine(max_num_seqs=1)
    size = engine.pool.page_size
    for name in ("running", "waiting"):
        engine.add(replace(request(name, [1] * 2 * size, max_tokens=4 * size), deadline_s=60.0).with_policy(Exact()))
    engine.step()
    for name in ("running", "waiting"):
        let_pass(engine, name, 61.0)
    assert {event.result.finish_reason for event in engine.step() if event.result} == {"timeout"}
    assert not engine.busy
    engine.memory.chain.drop()
    assert engine.allocator.used == 0


def test_what_only_completes_pages_for_others_is_not_ended_twice() -> None:
    engine = block_causal_engine()
    size = engine.pool.page_size
    engine.add(replace(request("r", [1] * 2 * size, max_tokens=2 * size), deadline_s=60.0).with_policy(Exact()))
    results, closing = [], 0
    while engine.busy:
        results += [event.result.finish_reason for event in engine.step() if event.result]
        for running in engine._lifecycle.scheduler.line:
            assert isinstance(running, RunningRequest)
            assert running.closing == bool(results)
            if running.closing:
                closing += 1
                running.pending.arrived -= 61.0
                assert not engine.cancel("r")
    assert results == ["length"]
    assert closing == 1


def test_what_is_cancelled_completes_no_page_for_others() -> None:
    """However much of it has settled, its pages are free at once, but for those that are stored."""
    engine = block_causal_engine()
    size, layers = engine.pool.page_size, engine.model.config.layers
    for steps in range(2 * size):
        engine.memory.chain.drop()
        engine.add(request("r", [1] * size, max_tokens=2 * size).with_policy(Exact()))
        for _ in range(steps):
            engine.step()
        assert engine.cancel("r")
        assert engine.allocator.used == len(engine.memory.chain.pages) * layers
        run(engine, [])


def test_an_id_may_come_again_while_its_first_request_completes_pages() -> None:
    engine = block_causal_engine(max_refreshes=1)
    size = engine.pool.page_size
    again = request("r", [1] * 2 * size, max_tokens=2 * size)
    engine.add(again.with_policy(Exact()))
    ended = 0
    while engine.busy:
        for event in engine.step():
            if event.result is not None:
                ended += 1
                if ended == 1:
                    assert running_canvases(engine) == 1
                    engine.add(again)
    assert ended == 2

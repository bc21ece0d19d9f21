"""What a request asks of the service: priority, a deadline, and entries that are its tenant's own."""

from dataclasses import replace
from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.policies import Dense, Reuse
from tests.engine.support import Work, alone, make_engine, outcome, request, run


def started(engine: Engine) -> list[str]:
    return [item.request.id for item in engine._jobs() if item.branches]


def let_pass(engine: Engine, name: str, seconds: float) -> None:
    """As if a request had arrived so much earlier."""
    (job,) = [job for job in engine._jobs() if job.request.id == name]
    job.arrived -= seconds


def test_lower_priorities_begin_first_and_equal_ones_as_they_came() -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", 1)):
        engine.add(replace(request(name, max_tokens=1), priority=priority), Dense())
    order = []
    while engine.busy:
        order += [event.id for event in engine.step() if event.result is not None]
    assert order == ["c", "b", "d", "a", "e"]


def test_what_runs_is_not_touched_by_a_higher_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("running"), Dense())
    engine.step()
    engine.add(replace(request("urgent"), priority=-1), Dense())
    engine.step()
    assert started(engine) == ["running"]
    run(engine, [])


def test_a_deadline_ends_what_waits_and_what_runs() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("running", "waiting", "other"):
        engine.add(replace(request(name, prefix=6), deadline_s=None if name == "other" else 60.0), Reuse())
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
    engine.add(request("busy"), Dense())
    engine.step()
    engine.add(replace(request("late", prefix=6), deadline_s=60.0), Reuse())
    engine._admit()
    let_pass(engine, "late", 61.0)
    results = run(engine, [Work(request("next", prefix=6), Reuse(), joins=2)])
    assert results["late"].finish_reason == "timeout"
    assert results["next"].usage.cached_tokens == 6
    assert engine.stats.prefix_passes == 1


def test_an_id_is_free_again_after_a_timeout() -> None:
    engine = make_engine()
    engine.add(replace(request("r"), deadline_s=1e-9), Dense())
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
        ({"priority": "high"}, "priority must be a whole number, lower ones first, got 'high'"),
        ({"priority": True}, "priority must be"),
        ({"deadline_s": -1}, "deadline_s must be"),
        ({"deadline_s": float("inf")}, "deadline_s must be"),
        ({"deadline_s": "1"}, "deadline_s must be"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(term: dict[str, Any], text: str) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=text):
        engine.add(replace(request(), **term), Dense())
    assert not engine.busy

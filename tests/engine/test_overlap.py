"""Passes that are queued before those before them are read: the same answers, and no trace of what is thrown away."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.observer import EngineObserver
from remask.engine.overlap import plan_ahead
from remask.engine.pack import Items
from remask.engine.request import Request
from remask.engine.runner import PassResult
from remask.errors import ConfigError
from remask.plan.plan import Plan, View
from remask.policies import BiCache, BlockDual, CachePolicy, Dense, Reuse
from remask.policies.block import BlockPrefix
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.uniform_cache import UniformCache
from remask.readers.drafts import Drafts
from remask.readers.logprobs import Logprobs
from remask.request.result import Event, Result
from tests.engine.kinds import checkpoint, tokens
from tests.engine.own_policies import Reviving
from tests.engine.support import (
    DEADLINE,
    Work,
    alone,
    as_if_asked_for,
    events_of,
    let_pass,
    make_engine,
    nested_work,
    outcome,
    poisoned_engine,
    random_work,
    request,
    run,
)
from tests.engine.test_isolation import BREAKS, Breaks, bad_request, comparing, neighbours
from tests.sampling_fields import flat_params

SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]


def queueing(family: str = "llada", **limits: Any) -> Engine:
    return make_engine(family, overlap=True, **limits)


def clocked_work(rng: random.Random, family: str, name: str) -> Work:
    """Any request whose passes can be queued, most of the time."""
    while True:
        item = rng.choice([random_work, random_work, nested_work])(rng, family, name)
        if item.policy.traits.by_clock or rng.random() < 0.02:
            return item


def limits(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.randint(2, 8),
        "max_row_layers": rng.choice([None, None, None, 90, 200]),
        "max_refreshes": rng.choice([None, None, 1]),
        "page_size": rng.choice([3, 4, 16]),
        "store_budget_tokens": rng.choice([10, 16, 40]),
    }


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_requests_of_all_kinds_get_the_same_answers(family: str, seed: int) -> None:
    """They come and go, some are cancelled or late, and budgets are too small; memory around is full of NaN."""
    rng = random.Random(f"{family} {seed}")
    chosen = limits(rng)
    engine = queueing(family, **chosen)
    work = {name: clocked_work(rng, family, name) for name in (f"r{i}" for i in range(14))}
    joins = {name: rng.randrange(40) for name in work}
    results: dict[str, Result] = {}
    step = 0
    while engine.busy or step < 40:
        for name, item in work.items():
            if joins[name] == step:
                engine.add(item.asked)
        if rng.random() < 0.04:
            engine.cancel(rng.choice(list(work)))
        unfinished = [
            each.request for each in (*engine._lifecycle.waiting, *[r.pending for r in engine._lifecycle.unfinished()])
        ]
        late = [each.id for each in unfinished if each.deadline_s is not None]
        if late and rng.random() < 0.1:
            let_pass(engine, rng.choice(late), DEADLINE)
        for event in engine.step():
            if event.result is not None:
                assert event.id not in results
                results[event.id] = event.result
        engine.check_integrity()
        step += 1
        assert step < 2000
    assert results.keys() == work.keys()
    assert engine.stats.queued_passes > 0 or (seed > 1 and engine.stats.waited_passes > 0)  # some repeat no plan
    store = {"store_budget_tokens": chosen["store_budget_tokens"]}
    for name, result in results.items():
        if result.finish_reason in ("stop", "length"):
            same = as_if_asked_for(work[name], result)
            assert outcome(result) == outcome(alone(same, family, overlap=False, **store)), same


@pytest.mark.parametrize("sampling", [{"block_length": 4}, {"threshold": 0.3, "block_length": 4}, {"cfg_scale": 1.0}])
def test_events_come_in_the_same_order(sampling: dict[str, Any]) -> None:
    asked = request(**sampling).with_readers(Logprobs(2)).with_policy(BlockDual())
    plain, ahead = (events_of(make_engine(overlap=overlap), asked) for overlap in (False, True))
    told = [[(each.transfer, each.settled) for each in events if each.result is None] for events in (plain, ahead)]
    assert told[0] == told[1]
    assert any(transfer is not None and transfer.logprobs for transfer, _ in told[0])


class Snapshots:
    """What a request has after each pass that was read: tokens, flags, and when each K/V row was written."""

    def __init__(self, engine: Engine, item: Work) -> None:
        engine.add(item.asked)
        self.taken: list[tuple[Any, ...]] = []
        while engine.busy:
            engine.step()
            for running in engine._lifecycle.unfinished():
                # What is queued is in the ledger already.
                flying = engine._next_pass is not None
                canvas, ledger = running.canvases[0].canvas, running.canvases[0].ledger
                state = canvas.tokens.tolist(), canvas.noisy.tolist(), canvas.settled.tolist()
                self.taken.append((*state, None if flying else (ledger.step, ledger.written.tolist())))


POLICIES: list[CachePolicy] = [
    Dense(),
    BlockDual(),
    BiCache(depth=2),
    BiCache(BlockDual(), 2, 8),
    BlockDual("separate"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_what_is_thrown_away_leaves_no_trace(policy: CachePolicy) -> None:
    """Thresholds that end blocks early: what was queued for the block takes no part in anything."""
    discarded = 0
    for threshold in (0.0, 0.1):
        sampling: dict[str, Any] = {"max_tokens": 48, "block_length": 16, "threshold": threshold}
        item = Work(request(prefix=6, **sampling), policy)
        engine = queueing(max_model_len=96)
        plain, ahead = (
            Snapshots(make_engine(overlap=False, max_model_len=96), item).taken,
            Snapshots(engine, item).taken,
        )
        assert len(plain) == len(ahead)
        for expected, found in zip(plain, ahead, strict=True):
            assert found[:3] == expected[:3]
            assert found[3] in (None, expected[3])
        assert any(found[3] is not None for found in ahead)
        discarded += engine.stats.discarded_passes
    assert discarded > 0


def test_what_could_be_read_later_is_not_queued_in_vain() -> None:
    """Rows are picked by what the last pass wrote, so a pass that may be thrown away is not run."""
    item = Work(request(max_tokens=12, block_length=4, threshold=0.1), DllmCache(100, 8, 0.5))
    engine = queueing()
    results = run(engine, [item])
    assert outcome(results["r"]) == outcome(alone(item, overlap=False))
    assert engine.stats.waited_passes == 2
    assert engine.stats.discarded_passes == 1, "in the last block, behind which nothing is read"


def test_a_stop_ends_what_is_queued() -> None:
    item = Work(request(max_tokens=8, stop_token_ids=list(range(6, 40))), Dense())
    engine = queueing()
    results = run(engine, [item])
    assert results["r"].finish_reason == "stop"
    assert outcome(results["r"]) == outcome(alone(item, overlap=False))
    assert engine.stats.discarded_passes == 1


@pytest.mark.parametrize("beside", [Reviving(), None], ids=["hooked", "drafts"])
def test_steps_that_cannot_be_foreseen_are_counted(beside: CachePolicy | None) -> None:
    """While one request needs the host, the others wait with it; then they go on ahead."""
    long, short = Work(request("long", max_tokens=16), Dense()), Work(request("short", max_tokens=4), beside or Dense())
    short = replace(short, request=short.request.with_readers(Drafts() if beside is None else None))
    engine = queueing()
    results = run(engine, [long, short])
    stats = engine.stats
    assert (stats.waited_passes, stats.queued_passes) == (4, 11)
    for item in (long, short):
        assert outcome(results[item.request.id]) == outcome(alone(item, overlap=False))


class Waiting(EngineObserver):
    """An observer that wants each pass before the next one is planned."""

    waits = True

    def __init__(self, note: Callable[[PassResult], None]) -> None:
        self.note = note

    def on_complete(self, ran: PassResult) -> None:
        self.note(ran)


def test_observers_see_every_pass_that_is_launched_after_they_came() -> None:
    engine, seen = queueing(), list[int]()
    engine.add(request())
    engine.step()
    assert engine._next_pass is not None
    engine.attach(Waiting(lambda ran: seen.append(len(ran.hidden))))
    while engine.busy:
        engine.step()
    assert seen == [6, 5, 4, 3, 2, 1], "the second pass was queued when the observer came"
    observed, passes = queueing(), list[PassResult]()
    observed.attach(Waiting(passes.append))
    run(observed, [Work(request(), Dense())])
    assert (observed.stats.queued_passes, len(passes)) == (0, 8)


REPEATING = [
    replace(item, request=replace(item.request, params=replace(item.request.params, block_length=8)))
    for item in (*neighbours(), *comparing())
    if item.policy.traits.by_clock and item.request.params.cfg_scale == 0
]


@pytest.mark.few(4)
@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_a_failure_in_what_is_queued_ends_its_own_request(breaks: Breaks, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {item.request.id: outcome(alone(item, overlap=False)) for item in REPEATING}
    engine = queueing(max_num_seqs=16)
    bad = Work(bad_request(prefix=6), BiCache(depth=2))
    with monkeypatch.context() as context:
        breaks(engine, context)
        results = run(engine, [*REPEATING[:2], bad, *REPEATING[2:]], each_step=lambda _: engine.check_integrity())
    assert results.pop("bad").finish_reason == "error"
    assert {name: outcome(result) for name, result in results.items()} == expected
    assert engine.stats.queued_passes > 0


def test_a_failure_in_what_does_not_come_to_be_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that is queued behind the last one fails, and would never have been run."""
    item = Work(request(max_tokens=8, stop_token_ids=list(range(6, 40))), Dense())
    expected = alone(item, overlap=False)
    engine = queueing()
    whole, last = engine.runner.run, expected.usage.steps

    def run_pass(items: Items) -> tuple[Tensor, Items]:
        if any(branch.ledger.step == last for branch, _ in items):
            raise ValueError("a pass that nobody asked for")
        return whole(items)

    monkeypatch.setattr(engine.runner, "run", run_pass)
    assert outcome(run(engine, [item])["r"]) == outcome(expected)
    assert engine.stats.discarded_passes == 1


@dataclass(frozen=True)
class Failing(Dense):
    """Cannot plan one step, or plans what cannot be run."""

    raises: bool = True

    def repeats(self, view: View) -> int:  # noqa: ARG002
        return 0

    def plan(self, view: View) -> Plan:
        if view.step != 3:
            return Dense.plan(self, view)
        if self.raises:
            raise ValueError("no plan")
        return Plan(view.over(0, 1), view.candidates)  # what is predicted is not computed


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("steps", [3, 8])
def test_a_policy_that_cannot_foresee_ends_its_request_when_it_is_asked(steps: int, raises: bool) -> None:
    """Not before: with three steps it is never asked for the fourth."""
    engine = queueing()
    results = run(engine, [Work(request("bad", steps=steps), Failing(raises)), Work(request("good"), Dense())])
    assert results["bad"].finish_reason == ("length" if steps == 3 else "error")
    assert outcome(results["good"]) == outcome(alone(Work(request("good"), Dense()), overlap=False))


def test_the_device_fails_in_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before is read first; then the engine begins again."""
    engine = queueing()
    whole = engine.runner.run

    def run_pass(items: Items) -> tuple[Tensor, Items]:
        if any(branch.ledger.step == 3 for branch, _ in items):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return whole(items)

    engine.add(request().with_policy(Dense()))
    done: list[Event] = []
    with monkeypatch.context() as context:
        context.setattr(engine.runner, "run", run_pass)
        done += [*engine.step(), *engine.step()]
        with pytest.raises(RuntimeError, match="CUDA error") as raised:
            engine.step()
    assert [event.transfer.step for event in done if event.transfer is not None] == [0, 1]
    logging.disable()
    engine.recover(raised.value)
    logging.disable(logging.NOTSET)
    engine.add(request("next").with_policy(Dense()))
    rest = [event for _ in range(12) for event in engine.step()]
    assert [event.transfer.step for event in rest if event.transfer is not None and event.id == "r"] == [2]
    ended = {event.id: event.result.finish_reason for event in rest if event.result is not None}
    assert ended == {"r": "error", "next": "length"}
    engine.check_integrity()


class Half(Dense):
    """Predicts the first two noisy positions alone, so the most confident of these go on."""

    def repeats(self, view: View) -> int:  # noqa: ARG002
        return 0

    def plan(self, view: View) -> Plan:
        few = np.flatnonzero(view.candidates)[:2]
        return Plan(view.over(0, view.length), np.isin(np.arange(view.length), few))


def test_what_is_not_predicted_is_not_foreseen() -> None:
    """How many positions go on is not said by the schedule then."""
    item, engine = Work(request(steps=4), Half()), queueing()
    results = run(engine, [item])
    assert outcome(results["r"]) == outcome(alone(item, overlap=False))
    assert engine.stats.waited_passes > 0


@pytest.mark.parametrize("name", ["sdar", "sdar, blocks of 3", "llada2"])
def test_block_causal_models(name: str) -> None:
    """Pages are shared, chunks of the prompt fill first, and blocks end when a threshold is passed."""
    point, rng = checkpoint(name), random.Random(name)
    shared = tokens(rng, 4 * point.block)
    rules: list[dict[str, Any]] = [
        {},
        {"threshold": 0.1},
        {"threshold": 0.9, "temperature": 0.8},
        {"threshold": 0.2, "fallback": "leftmost"},
        {"remasking": "sequential", "steps_per_block": 2},
        {"remasking": "entropy_bounded"},
    ]
    work = [
        Work(
            Request(f"r{n}", shared + tokens(rng, 5), flat_params(max_tokens=3 * point.block, seed=n, **rule)),
            policy,
            joins=3 * n,
        )
        for n, rule in enumerate(rules)
        for policy in [Dense() if n == 2 else Exact(2 * point.block)]
    ]
    common: dict[str, Any] = {"page_size": point.block, "store_budget_tokens": 128, "max_model_len": 64}
    plain, ahead = (poisoned_engine(point.model, overlap=overlap, **common) for overlap in (False, True))
    expected, found = run(plain, work), run(ahead, work)
    for item in work:
        own = item.request.id
        assert (found[own].token_ids, found[own].trace) == (expected[own].token_ids, expected[own].trace)
    for item in work:  # a pass is queued where all in it repeat
        run(ahead, [replace(item, joins=0)])
    assert ahead.stats.queued_passes > 0


def test_tokens_on_the_board_are_those_of_the_canvases() -> None:
    """After each pass that was read and before another is queued, but for what the host has still to send."""
    work = [Work(request(str(n), 8, 6, block_length=4), policy) for n, policy in enumerate([Reuse(), BiCache(depth=2)])]
    work += [Work(request("guided", cfg_scale=1.0), Dense()), Work(request("slow", remasking="origin"), Dense())]
    _, compared = compare_boards(work)
    assert compared > 5


@pytest.mark.parametrize("policy", [Dense(), BlockDual(), BiCache(BlockDual(), 2, 8)], ids=repr)
def test_what_is_thrown_away_puts_no_token_on_the_board(policy: CachePolicy) -> None:
    """Blocks end early, and what was queued for them has nothing left to choose."""
    item = Work(request(max_tokens=48, prefix=6, block_length=16, threshold=0.1), policy)
    engine, compared = compare_boards([item])
    assert compared > 0
    assert engine.stats.discarded_passes > 0


def compare_boards(work: Sequence[Work]) -> tuple[Engine, int]:
    """Run `work`. Returns the engine, and how often a canvas was compared with the token buffer."""
    engine = make_engine(overlap=True, max_model_len=96)
    token_buffer = engine.runner.token_buffer
    assert token_buffer is not None
    for item in work:
        engine.add(item.asked)
    compared = 0
    while engine.busy:
        engine.step()
        for branch in (branch for running in engine._lifecycle.unfinished() for branch in running.canvases):
            if branch.unsent is None or engine._next_pass is not None:
                continue
            settled = np.setdiff1d(np.arange(len(branch.canvas)), branch.unsent_positions())
            values = token_buffer.values[torch.from_numpy(branch.buffer_slots[settled])]
            assert (values >> 1).tolist() == branch.canvas.tokens[settled].tolist()
            assert (values & 1).bool().tolist() == branch.canvas.noisy[settled].tolist()
            compared += 1
    return engine, compared


def test_batch_invariance_is_refused_beside_it() -> None:
    with pytest.raises(
        ConfigError, match=r"overlap=True cannot be combined with batch_invariant.*leave one of the two"
    ):
        EngineConfig(overlap=True, batch_invariant=True)
    with pytest.raises(ConfigError, match="overlap"):
        EngineConfig(overlap="yes")  # type: ignore[arg-type]


def test_no_event_comes_after_a_result() -> None:
    """A request is cancelled while a pass that is known to come is still to be read."""
    engine = queueing()
    for name in ("first", "other"):
        engine.add(request(name).with_policy(Dense()))
    for _ in range(2):
        engine.step()
    assert engine._next_pass is not None
    assert engine.cancel("first")
    events = events_of(engine)
    assert [event.result and event.result.finish_reason for event in events if event.id == "first"] == ["cancelled"]


def test_a_request_that_is_cancelled_while_it_runs_takes_no_part() -> None:
    """Its pages go to the next one at once, while a pass over it is still to be read."""
    engine = queueing(max_num_seqs=1)
    engine.add(request("first").with_policy(Dense()))
    engine.step()
    (running,) = engine._lifecycle.unfinished()
    assert engine.cancel("first")
    assert running.ended
    results = run(engine, [Work(request("second"), Dense())])
    assert outcome(results["second"]) == outcome(alone(Work(request("second"), Dense()), overlap=False))


def test_a_speculative_step_changes_nothing_of_its_request() -> None:
    engine = queueing()
    engine.add(request(block_length=4).with_policy(Dense()))
    engine.step()
    (running,) = engine._lifecycle.unfinished()
    queued = engine._next_pass
    assert queued is not None
    before = running.canvases[0].canvas.noisy.copy(), running.decoder.step, running.canvases[0].ledger.step
    ahead = plan_ahead(queued.turns())
    assert ahead is not None
    turn = ahead[running]
    assert turn is not None
    assert turn.decoder is not None
    assert turn.decoder.step == running.decoder.step + 1
    after = running.canvases[0].canvas.noisy, running.decoder.step, running.canvases[0].ledger.step
    assert (before[0] == after[0]).all()
    assert before[1:] == after[1:]


def test_audits_see_what_a_queued_pass_has_left_to_predict() -> None:
    """A step that is audited may have been queued before the pass before it had taken positions from it."""
    work = [Work(request(f"r{n}", block_length=8, max_tokens=16), BlockDual()) for n in range(4)]
    engine = queueing(audit=1.0)
    results = run(engine, work)
    assert engine.stats.queued_passes > 4
    assert (engine.stats.audits > 0, engine.stats.failed_audits) == (True, 0)
    for item in work:
        assert outcome(results[item.request.id]) == outcome(alone(item, overlap=False))


def test_steps_that_are_thrown_away_are_not_drawn_for_audits() -> None:
    """All others are, but for the first one, at which the audit is chosen."""
    engine = queueing(audit=1.0, max_model_len=96)
    draws = engine.auditor._draws = Mock(random=Mock(return_value=0.5))
    work = Work(request(prefix=6, max_tokens=48, block_length=16, threshold=0.1), BlockDual())
    result = run(engine, [work])["r"]
    assert engine.stats.discarded_passes > 0
    assert draws.random.call_count == result.usage.forwards - 1


@pytest.mark.parametrize("name", ["gidd", "gidd, hybrid", "gidd, open", "gidd, masks"])
def test_uniform_models(name: str) -> None:
    """The next pass reads tokens that only the device knows; a correction begins where the host has read."""
    point, rng = checkpoint(name), random.Random(name)
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "tokens_per_step": 2, "min_tokens": 6},
        {"sampler": "ancestral", "steps_per_block": 3},
        {"steps_per_block": 2, "schedule": "linear"},
    ]
    if name != "gidd, masks":
        rules.append({"correction_steps": 3})
    work = []
    for number, rule in enumerate(rules):
        policy: CachePolicy = [Dense(), UniformCache(2), BlockPrefix()][number % 3]
        params = flat_params(max_tokens=12, block_length=4, seed=number, canvas_length=24, **rule)
        asked = Request(f"r{number}", tokens(rng, 5), params, 0, Dense() if name == "gidd, open" else policy)
        work.append(Work(asked, asked.policy, joins=2 * number))
    plain, ahead = (poisoned_engine(point.model, overlap=overlap, max_model_len=32) for overlap in (False, True))
    expected, found = run(plain, work), run(ahead, work)
    for item in work:
        assert outcome(found[item.request.id]) == outcome(expected[item.request.id])
    assert ahead.stats.queued_passes > 0

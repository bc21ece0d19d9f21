"""Whatever happens to an engine, every slot has one owner, every request one end, and nothing is left."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from remask.engine.engine import Engine
from remask.engine.prefix_pass import PrefixPass
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.llm import LLM
from remask.request.result import FinishReason, Result
from remask.request.sampling_params import SamplingParams
from tests.engine.support import (
    CPU,
    DEADLINE,
    LAYERS,
    Work,
    alone,
    as_if_asked_for,
    let_pass,
    make_engine,
    nested_work,
    outcome,
    running_canvases,
)

COMPARED = 2  # requests of an example that are run again, alone


def slots_have_one_owner(engine: Engine) -> None:
    """No two canvases, no canvas and no entry write to one slot of one layer; leases read entries that are there."""
    owned: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(LAYERS)]
    for entry in engine.store.entries:
        for layer in range(LAYERS):
            owned[layer].append(entry.extent.slots())
    for running in engine._lifecycle.unfinished():
        lease = running.claim.lease
        if lease is not None:
            assert any(lease.entry is entry for entry in engine.store.entries)
        for branch in running.canvases:
            covered = [layer for table in branch.tables for layer in table.layers]
            assert covered == list(range(LAYERS))
            for table in branch.tables:
                for layer in table.layers:
                    owned[layer].append(table.private_slots)
    for parts in owned:
        slots = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        assert len(set(slots.tolist())) == len(slots)
        assert not len(slots) or slots.max() < engine.pool.page_count * engine.pool.page_size


class Conservation(RuleBasedStateMachine):
    """Requests of every kind come, run, run out of time, are cancelled; entries are dropped under way."""

    @initialize(
        family=st.sampled_from(["llada", "dream"]),
        max_num_seqs=st.integers(1, 5),
        max_row_layers=st.sampled_from([None, 1, 40, 150, 400]),
        max_refreshes=st.sampled_from([None, 1, 2]),
        page_size=st.sampled_from([1, 3, 4, 16]),
        budget=st.sampled_from([4, 10, 25, 64]),
        eviction=st.sampled_from(["fifo", "lru"]),
        match=st.sampled_from(["exact", "longest"]),
    )
    def start(self, family: str, budget: int, match: str, **limits: Any) -> None:
        self.family, self.budget = family, budget
        more = {"store_budget_tokens": budget, "prefix_match": match, "max_model_len": 32, **limits}
        self.engine = make_engine(family, **more)
        self.work: dict[str, Work] = {}
        self.alive: list[str] = []
        self.doomed: dict[str, FinishReason] = {}
        self.results: dict[str, Result] = {}

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed: int) -> None:
        item = nested_work(random.Random(seed), self.family, f"r{len(self.work)}")
        self.engine.add(item.asked)
        self.work[item.request.id] = item
        self.alive.append(item.request.id)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            for event in self.engine.step():
                if event.result is None:
                    continue
                assert event.id not in self.results
                self.results[event.id] = event.result
                if event.id in self.alive:
                    self.alive.remove(event.id)
                expected = self.doomed.pop(event.id, None)
                assert event.result.finish_reason in ((expected,) if expected else ("stop", "length"))
            self.engine.check_integrity()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive))
        assert self.engine.cancel(name)
        assert not self.engine.cancel(name)
        self.end(name, "cancelled")

    @precondition(lambda self: any(self.work[name].request.deadline_s for name in self.alive))
    @rule(data=st.data())
    def run_out_of_time(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in self.alive if self.work[name].request.deadline_s]))
        let_pass(self.engine, name, DEADLINE)
        self.end(name, "timeout")
        self.step(1)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        infos = self.engine.store.describe()
        name = data.draw(st.sampled_from([None, *(info.prefix_id for info in infos)]))
        idle = [info for info in infos if info.ready and not info.leases and name in (None, info.prefix_id)]
        assert self.engine.store.drop(None if name is None else int(name, 16)) == len(idle)

    def end(self, name: str, reason: FinishReason) -> None:
        self.doomed[name] = reason
        self.alive.remove(name)

    @invariant()
    def all_is_owned_once(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.check_integrity()
        slots_have_one_owner(engine)
        running = engine._lifecycle.unfinished()
        assert engine.waiting + len(running) == len(self.alive)
        assert running_canvases(engine) == sum(each.pending.canvas_count for each in running)
        assert running_canvases(engine) <= engine.config.max_num_seqs or len(running) == 1
        assert engine.store.token_count < self.budget
        assert engine.store.stats.misses >= engine.stats.prefix_passes

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.busy:
                break
            self.step(1)
        assert not self.engine.busy
        assert set(self.results) == set(self.work)
        assert not self.alive
        assert not self.doomed
        self.engine.store.drop()
        assert self.engine.allocator.used == 0
        assert not self.engine.store.entries
        assert not self.engine._lifecycle.ids
        ended = [name for name, result in self.results.items() if result.finish_reason in ("stop", "length")]
        for name in ended[:COMPARED]:
            same = as_if_asked_for(self.work[name], self.results[name])
            expected = alone(same, self.family, store_budget_tokens=self.budget, max_model_len=32)
            assert outcome(self.results[name]) == outcome(expected), same


def check(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Conservation,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.thorough
def test_nothing_is_lost_whatever_happens() -> None:
    check(examples=15, steps=30)


@pytest.mark.soak
def test_nothing_is_lost_over_thousands_of_steps() -> None:
    check(examples=600, steps=120)


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("cancelled", [False, True])
def test_requests_and_prefix_passes_are_in_no_cycle(monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    made: list[weakref.ref[Any]] = []
    for kind in (RunningRequest, PrefixPass):

        def noted(self: Any, *arguments: Any, begin: Any = kind.__init__, **named: Any) -> None:
            begin(self, *arguments, **named)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", noted)
    llm = LLM("bundled", device=str(CPU), threads=1)
    engine = llm.engine
    policy = llm.session.policy("bicache", {"depth": 2})
    params = SamplingParams(max_tokens=6, block_length=6, steps=6)
    for number in range(2):
        engine.add(Request(str(number), range(5, 69), params, 48, policy))
    steps = 0
    while engine.busy:
        if cancelled and steps == 3:
            for number in range(2):
                engine.cancel(str(number))
        engine.step()
        steps += 1
    engine.step()
    assert len(made) == 3
    assert [each() for each in made] == [None] * 3

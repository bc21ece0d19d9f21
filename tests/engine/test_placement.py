"""Placement is planned without changing anything, and applied once."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from remask.engine.engine import Engine
from remask.engine.placement import AwaitsPage, NoRoom, Placement
from remask.engine.request import Request
from remask.errors import IntegrityError
from remask.plan.plan import Plan, PrefixHit, View
from remask.policies import BiCache, CachePolicy, Dense, Exact, Reuse
from remask.policies.base import UnreadReason
from remask.readers.drafts import Drafts
from remask.store.pages import PageAllocator
from tests.engine.kinds import checkpoint
from tests.engine.support import (
    LAYERS,
    alone,
    as_if_asked_for,
    events_of,
    make_engine,
    poisoned_engine,
    prompt_of,
    request,
    run,
)
from tests.engine.support import Work as Asked


def state(engine: Engine) -> tuple[Any, ...]:
    memory = engine.memory
    return (
        memory.allocator.references.tobytes(),
        [(entry.key, entry.leases, entry.hits) for entry in memory.store.entries],
        [(page.key, page.hits) for page in memory.chain.pages],
        repr(memory.store.stats),
        repr(memory.chain.stats),
        memory.extra_bytes,
    )


def own_tokens(placement: Placement) -> list[list[tuple[int, range]]]:
    return [[(extent.length, extent.layers) for extent in canvas] for canvas in placement.extents]


def planned(engine: Engine, asked: Request) -> Placement:
    """The placement of a request that has room, after a check that planning it changes nothing."""
    before = state(engine)
    placement = engine.memory.plan(engine.check(asked))
    assert isinstance(placement, Placement)
    assert state(engine) == before
    return placement


def test_a_plan_names_what_a_request_leases_and_owns() -> None:
    engine = make_engine()
    asked = request("r", 12, 8, cfg_scale=1.0).with_policy(BiCache(depth=2))
    first = planned(engine, asked)
    assert first.lease is not None
    assert (first.lease.prefix, first.lease.entry) == (PrefixHit(8, 2, 3), None)
    # The conditional canvas has 20 positions, 8 of which it leases in 3 layers; the other canvas is all its own.
    assert own_tokens(first) == [[(12, range(3)), (20, range(3, LAYERS))], [(20, range(LAYERS))]]
    assert (first.policy, first.unread_reason) == (asked.policy, None)
    run(engine, [Asked(asked, asked.policy)])
    again = planned(engine, replace(asked, id="again"))
    assert again.lease is not None
    assert again.lease.entry is engine.store.entries[0]


def test_a_request_without_a_lease_runs_without_its_prefix_policy() -> None:
    engine = make_engine(store_budget_tokens=4)
    placement = planned(engine, request("r", 12, 8).with_policy(BiCache(Dense(), depth=2)))
    assert (placement.lease, placement.policy) == (None, Dense())
    assert placement.unread_reason == UnreadReason("budget", "prefix of 8 tokens exceeds the store's budget of 4")
    assert own_tokens(placement) == [[(20, range(LAYERS))]]
    nothing = planned(engine, request("r", 12).with_policy(Reuse()))
    assert (nothing.lease, nothing.unread_reason) == (None, None)


def test_a_plan_says_whether_evicting_helps() -> None:
    engine = make_engine(store_budget_tokens=10)
    engine.add(request("running", 12, 8, max_tokens=16).with_policy(Reuse()))
    engine.step()
    other = engine.memory.plan(engine.check(request("other", [1] * 12, 8).with_policy(Reuse())))
    assert other == NoRoom(evictable=False)  # the leased entry fills the store
    assert not engine.memory.evict_one(other)
    free = int((engine.allocator.references == 0).all(axis=0).sum())
    taken = engine.allocator.allocate(free * engine.pool.page_size, range(LAYERS))
    assert taken is not None
    same = engine.memory.plan(engine.check(request("same", 12, 8).with_policy(Reuse())))
    assert isinstance(same, NoRoom)
    assert same.evictable
    assert same.entry is engine.store.entries[0]
    engine.allocator.release(taken)
    run(engine, [])


def test_a_waiting_request_keeps_the_exact_pages_that_it_would_read() -> None:
    model = checkpoint("sdar").model
    engine = poisoned_engine(model, page_size=8, max_model_len=64)
    prompt = [1 + i % 7 for i in range(24)]
    run(engine, [Asked(request("first", prompt, max_tokens=8), Exact())])
    assert engine.memory.chain.pages
    layers = engine.model.config.layers
    free = int((engine.allocator.references == 0).all(axis=0).sum())
    taken = engine.allocator.allocate(free * 8, range(layers))
    assert taken is not None
    decision = engine.memory.plan(engine.check(request("next", prompt, max_tokens=8).with_policy(Exact())))
    assert isinstance(decision, NoRoom)
    assert decision.pages
    assert decision.pages <= {page.key for page in engine.memory.chain.pages}
    while engine.memory.evict_one(decision):
        pass
    assert decision.pages == {page.key for page in engine.memory.chain.pages}
    engine.allocator.release(taken)
    run(engine, [])


def test_a_request_awaits_the_page_that_another_one_computes() -> None:
    engine = poisoned_engine(checkpoint("sdar").model, page_size=8, max_model_len=64)
    prompt = [1 + i % 7 for i in range(24)]
    engine.add(request("first", prompt, max_tokens=8).with_policy(Exact()))
    pending = engine.check(request("second", prompt, max_tokens=8).with_policy(Exact()))
    assert isinstance(engine.memory.plan(pending), Placement)
    engine._admission.admit(engine.clock())
    before = state(engine)
    assert engine.memory.plan(pending) == AwaitsPage()
    assert state(engine) == before
    run(engine, [])


def test_a_placement_that_is_out_of_date_is_refused() -> None:
    engine = make_engine()
    pending = engine.check(request("r"))
    placement = engine.memory.plan(pending)
    assert isinstance(placement, Placement)
    running = engine.memory.place(pending, placement)
    with pytest.raises(IntegrityError, match="claimed pages that are in use"):
        engine.memory.place(pending, placement)
    engine.memory.free(running)
    engine.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_found_pages_are_those_that_would_be_allocated_one_after_another(seed: int) -> None:
    rng = random.Random(seed)
    allocator, same = (PageAllocator(LAYERS, 12, 4) for _ in range(2))
    references = np.array([[rng.random() < 0.4 for _ in range(12)] for _ in range(LAYERS)], dtype=np.int32)
    allocator.references[:], same.references[:] = references, references
    wanted = []
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(LAYERS)
        wanted.append((rng.randint(1, 12), range(start, rng.randint(start + 1, LAYERS))))
    found = allocator.find(wanted)
    assert (allocator.references == references).all()
    one_by_one = [same.allocate(*each) for each in wanted]
    if found is None:
        assert None in one_by_one
        return
    for extent, other in zip(found, one_by_one, strict=True):
        assert other is not None
        assert extent.pages.tolist() == other.pages.tolist()
        assert (extent.layers, extent.length) == (other.layers, other.length)
        allocator.claim(extent)
    assert (allocator.references == same.references).all()


@dataclass(frozen=True)
class NoBoundary(Dense):
    """Fails where the engine asks how many layers read a prefix."""

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:
        raise RuntimeError(f"no boundary for {prefix} of {canvas} in {layers}")


def test_a_policy_that_fails_while_a_place_is_planned_ends_its_own_request() -> None:
    engine = make_engine()
    bad, good = Asked(request("bad", 12, 8), NoBoundary()), Asked(request("good", 12, 8), Reuse())
    results = run(engine, [bad, good])
    assert results["bad"].finish_reason == "error"
    assert results["bad"].error == f"its cache policy failed: no boundary for 8 of 20 in {LAYERS}"
    assert results["good"] is not None
    assert results["good"].token_ids == alone(as_if_asked_for(good, results["good"])).token_ids


@dataclass(frozen=True)
class NeverGuided(Dense):
    """Leaves the unconditional canvas out of every step."""

    def guides(self, step: int) -> bool:  # noqa: ARG002
        return False


def test_guidance_that_was_never_computed_ends_its_own_request() -> None:
    good = Asked(request("good", cfg_scale=1.0), Dense())
    results = run(make_engine(), [Asked(request("bad", cfg_scale=1.0), NeverGuided()), good])
    assert results["bad"].finish_reason == "error"
    assert "the unconditional canvas is left out" in str(results["bad"].error)
    assert results["good"].token_ids == alone(good).token_ids


def test_a_view_shows_what_the_last_pass_predicted() -> None:
    seen: list[View] = []

    @dataclass(frozen=True)
    class Watching(CachePolicy):
        def plan(self, view: View) -> Plan:
            seen.append(view)
            return Dense().plan(view)

    asked = replace(request("r", prompt_of(6), block_length=4), readers=(Drafts(),), policy=Watching())
    drafts = [event.draft for event in events_of(make_engine(), asked) if event.draft is not None]
    assert len(drafts) == len(seen) > 2
    assert not len(seen[0].last_pass.positions)
    for view, draft in zip(seen[1:], drafts, strict=False):
        assert tuple(view.last_pass.positions.tolist()) == draft.positions
        assert tuple(view.last_pass.token_ids.tolist()) == draft.token_ids
        assert tuple(view.last_pass.confidences.tolist()) == draft.confidences

"""Depths that audits find while requests are served: `depth="online"`."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from remask.engine.engine import Engine
from remask.engine.report import MemoryReport
from remask.errors import ConfigError
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual
from remask.policies.depth_lookup import percent
from remask.policies.dllm import DllmCache
from remask.request.result import Result
from remask.store.depths import ratio_class
from tests import goldens
from tests.engine.support import (
    EOS,
    LAYERS,
    MODELS,
    VOCAB,
    Work,
    alone,
    inner_policies,
    let_pass,
    make_engine,
    outcome,
    poisoned_engine,
    prompt_of,
    request,
    run,
)
from tests.engine.test_against_oracles import model_of
from tests.oracles import dense, similarity

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
INNER: list[CachePolicy] = [BlockDual(), DllmCache(3, 2, 0.3)]
MIDDLE = 0.5  # a tau at which these models' requests bear different depths


def online(tau: float = MIDDLE, interval: int = 4, inner: CachePolicy | None = None, **more: Any) -> BiCache:
    return BiCache(inner or Dense(), "online", tau=tau, audit_interval=interval, **more)


def asks(name: str, policy: CachePolicy, prefix: int = 10, more: int = 4, seed: int = 0, **rest: Any) -> Work:
    """A request with the prefix number `seed` of this length, and a tail of its own."""
    joins = rest.pop("joins", 0)
    salt = rest.pop("cache_salt", "")
    prompt = [*prompt_of(prefix, seed), *prompt_of(more, sum(map(ord, name)))]
    asked = request(name, prompt, prefix, **{"seed": 1, **rest})
    return Work(replace(asked, cache_salt=salt), policy, joins)


def at_depth(item: Work, result: Result) -> Work:
    """The same request under the depth that it reports; at 0 its prefix is refreshed within the request."""
    policy, depth = item.policy, result.usage.prefix_depth
    assert isinstance(policy, BiCache)
    fixed = replace(policy, depth=depth, tau=None, audit_interval=None, within_request=None if depth else True)
    return replace(item, policy=fixed)


def same_answer(item: Work, result: Result, family: str = "llada", **limits: Any) -> None:
    expected = alone(at_depth(item, result), family, **limits)
    noted = replace(result, usage=replace(result.usage, prefix_note=expected.usage.prefix_note))
    assert outcome(noted) == outcome(expected), item


def served(engine: Engine, *items: Work) -> list[Result]:
    """Results of requests that come one after the other."""
    return [run(engine, [item])[item.request.id] for item in items]


@FAMILIES
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("within", [None, True, False])
def test_a_tau_that_nothing_exceeds_reads_nothing(family: str, inner: CachePolicy, within: bool | None) -> None:
    """Every request refreshes its prefix by itself, unless it is told not to."""
    engine = make_engine(family)
    policy = online(1, inner=inner, within_request=within)
    reference = inner if within is False else BiCache(inner, 0, within_request=True)
    items = [asks("a", policy), asks("b", policy), asks("c", policy, prefix=7)]
    for item, result in zip(items, served(engine, *items), strict=True):
        assert result.usage.prefix_depth == result.usage.cached_tokens == 0
        assert result.usage.prefix_note == "audits of this prefix allow no layer a similarity above tau=1"
        expected = outcome(alone(replace(item, policy=reference), family))
        assert outcome(replace(result, usage=replace(result.usage, prefix_note=None))) == expected
    assert engine.store.stats.refused == 0


@FAMILIES
def test_a_tau_that_all_exceed_is_reuse(family: str) -> None:
    ours, theirs = make_engine(family), make_engine(family)
    items = [asks("a", online(-1)), asks("b", online(-1)), asks("c", online(-1), prefix=7), asks("d", online(-1))]
    ours_found, found = served(ours, *items), served(theirs, *(replace(item, policy=Reuse()) for item in items))
    for mine, other in zip(ours_found, found, strict=True):
        assert outcome(mine) == outcome(other)
        assert mine.usage == other.usage
    assert ours.store.stats == theirs.store.stats


@FAMILIES
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))])
def test_the_depth_says_all(family: str, seed: int) -> None:
    """Whatever came before, and whatever is audited beside it: an answer is that of a request of the reported depth."""
    rng = random.Random(f"online {family} {seed}")
    limits: dict[str, Any] = {
        "max_num_seqs": rng.randint(1, 4),
        "page_size": rng.choice([1, 4, 7]),
        "eviction": rng.choice(["fifo", "lru"]),
        "max_row_layers": rng.choice([None, 30, 200]),
        "store_budget_tokens": rng.choice([15, 30, 64]),
    }
    engine = make_engine(family, **limits)
    work = []
    for number in range(14):
        inner = rng.choice([Dense(), Dense(), *inner_policies(rng, family).values()])
        if "attention" in inner.traits.keeps or inner.check.__qualname__.startswith("DkvGreedy"):
            inner = Dense()
        policy = online(
            rng.choice([-1, 0.3, MIDDLE, 0.8, 0.97]),
            rng.choice([1, 2, 5]),
            inner,
            refresh_interval=rng.choice([None, 2, 16]),
            boundary_state=rng.choice(["stored", "recomputed"]),
        )
        prefix, more, salt = rng.choice([6, 10, 13]), rng.randint(1, 12), rng.choice(["", "", "tenant"])
        sampling = {"cfg_scale": 0.5} if rng.random() < 0.2 and limits["max_num_seqs"] > 1 else {}
        item = asks(f"r{number}", policy, prefix, more, rng.randrange(2), joins=rng.randrange(30), **sampling)
        work.append(replace(item, request=replace(item.request, cache_salt=salt)))
    results = run(engine, work)
    assert engine.stats.audits > 0
    assert not engine.memory.audits.passes
    depths = set()
    for item in work:
        result = results[item.request.id]
        assert result.finish_reason == "length", result
        depths.add(result.usage.prefix_depth)
        same_answer(item, result, family)
    assert len(depths) > 1 or limits["store_budget_tokens"] == 15


@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_audits_find_what_a_dense_oracle_finds(name: str, budget: int | None) -> None:
    model, oracle = model_of(name), dense.load(goldens.model_dir(name))
    engine = poisoned_engine(model, max_row_layers=budget)
    tokens = [random.Random(f"{name} {place}").randrange(250) for place in range(22)]
    for number, prefix in enumerate([5, 12, 17]):
        asked = request(f"r{number}", tokens, prefix)
        run(engine, [Work(asked, online(0.9))])
        found = similarity.similarities(oracle, [*tokens, *[model.config.mask_id] * 8], prefix)
        both = [(k + v) / 2 for k, v in zip(found["flat_cosine_k"], found["flat_cosine_v"], strict=True)]
        (entry,) = [entry for entry in engine.store.entries if len(entry) == prefix]
        (info,) = entry.depths.describe()
        assert info.ratio == ratio_class(percent(prefix, 30))
        reached = [min(both[: layer + 1]) for layer in range(len(both))]
        assert info.limits == pytest.approx([*reached[1:], reached[-1]], abs=1e-6)


def test_the_first_request_waits_for_its_audit_and_one_pass_serves_all() -> None:
    engine = make_engine()
    results = run(engine, [asks(f"r{i}", online(-1)) for i in range(4)])
    assert [results[f"r{i}"].usage.cached_tokens for i in range(4)] == [0, 10, 10, 10]
    assert engine.stats.prefix_passes == 1
    assert (engine.store.stats.misses, engine.store.stats.hits) == (1, 3)


def test_audits_cost_what_they_say() -> None:
    engine = make_engine()
    served(engine, *(asks(f"r{i}", online(-1, 3)) for i in range(10)))
    assert engine.stats.audits == 5  # of the requests 1, 2, 4, 7 and 10
    assert engine.stats.audit_row_layers == 5 * 22 * LAYERS
    own = alone(asks("r9", Reuse())).usage.row_layers
    assert engine.stats.row_layers == 10 * own + engine.stats.audit_row_layers + engine.stats.prefix_row_layers


def test_tenants_learn_nothing_of_each_other() -> None:
    engine = make_engine()
    served(engine, *(asks(name, online(), cache_salt=salt) for name, salt in [("a", "x"), ("b", "x"), ("c", "y")]))
    first, second = engine.store.describe()
    assert [info.requests for info in first.depths] == [2]
    assert [info.requests for info in second.depths] == [1]
    assert engine.stats.audits == 3


def test_a_ratio_without_audits_has_the_depth_of_the_one_below() -> None:
    """The first request of a ratio runs at once, and is audited beside."""
    engine = make_engine(max_model_len=128)
    served(engine, asks("a", online(0.9), more=20))  # 10 of 38
    depth = engine.store.entries[0].depths.depth(26, 0.9)
    engine.add(asks("b", online(0.9), more=2).asked)  # 10 of 20
    engine.step()
    assert (engine.running, engine.stats.audits) == (1, 2)
    result = run(engine, [])["b"]
    assert result.usage.prefix_depth == depth
    low, high = engine.store.entries[0].depths.describe()
    assert (low.ratio, high.ratio, high.audits) == (25, 50, 1)


def test_an_audit_without_room_waits_for_a_later_request() -> None:
    engine = make_engine(max_num_seqs=2, max_model_len=32)
    served(engine, asks("a", online(-1)))
    taken = engine.allocator.allocate((engine.pool.pages - 3 - 3) * 4, range(LAYERS))
    assert taken is not None
    engine.add(asks("b", online(-1)).asked)
    engine._admit()
    assert (engine.running, engine.memory.audits.passes) == (1, [])
    engine.allocator.release(taken)
    run(engine, [asks("c", online(-1), joins=1)])
    assert engine.stats.audits == 2


def test_a_request_that_gives_up_leaves_its_audit_behind() -> None:
    engine = make_engine(max_row_layers=20)
    engine.add(asks("gone", online(-1)).asked)
    engine.add(replace(asks("late", online(-1)).asked, deadline_s=1e6))
    engine.step()
    assert (engine.running, engine.waiting, len(engine.memory.audits.passes)) == (0, 2, 1)
    engine.check_integrity()
    assert engine.cancel("gone")
    let_pass(engine, "late", 2e6)
    results = run(engine, [asks("next", online(-1))])
    assert {name: result.finish_reason for name, result in results.items()} == {
        "gone": "cancelled",
        "late": "timeout",
        "next": "length",
    }
    assert engine.stats.audits == 1


def test_what_audits_hold_is_reported() -> None:
    engine = make_engine()
    reports: list[MemoryReport] = []
    item = asks("a", online(-1))
    run(engine, [item], each_step=lambda _: reports.append(engine.memory_report(detail=True)))
    holders = [holder for report in reports for holder in report.holders if holder.name == "audit 0"]
    assert holders[0].tokens == 22
    assert holders[0].pages == (6 + 3) * LAYERS
    assert all(table.layers == (0, LAYERS) for table in holders[0].tables)


def fails(engine: Engine, part: str, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int = 1) -> None:
    """`part` of an audit raises `error` the first `times`."""
    left = times

    def raising(act: Any, is_audit: Any) -> Any:
        def acted(*args: Any, **more: Any) -> Any:
            nonlocal left
            if is_audit(*args) and left:
                left -= 1
                raise error
            return act(*args, **more)

        return acted

    def audits(items: Sequence[Any], passes: Sequence[Any], *_: Any) -> bool:
        return any(work in engine.memory.audits.passes for work in passes)

    always = lambda *_: True  # noqa: E731
    if part == "compare":
        monkeypatch.setattr(engine.runner, "similarity", raising(engine.runner.similarity, always))
    elif part == "place":
        monkeypatch.setattr(engine.store, "new_states", raising(engine.store.new_states, always))
    else:
        monkeypatch.setattr(engine.runner, part, raising(getattr(engine.runner, part), audits))


@pytest.mark.parametrize("part", ["compare", "place", "run", "pack"])
def test_an_audit_that_fails_ends_the_request_that_awaits_it(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fails(engine, part, monkeypatch, ValueError("a defect"), times=2 if part in ("run", "pack") else 1)
    other, item = asks("other", Dense(), seed=1), asks("bad", online(-1))
    results = run(engine, [other, item])
    assert results["bad"].finish_reason == "error"
    assert "a defect" in str(results["bad"].error)
    assert outcome(results["other"]) == outcome(alone(other))
    assert served(engine, asks("next", online(-1)))[0].usage.prefix_depth == LAYERS


def test_an_audit_beside_its_request_that_fails_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    served(engine, asks("a", online(-1)))
    fails(engine, "compare", monkeypatch, ValueError("a defect"))
    assert served(engine, asks("b", online(-1)))[0].finish_reason == "length"
    assert engine.stats.audits == 1


def test_a_prefix_pass_that_fails_takes_its_audit_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    whole = engine.runner.run

    def ran(items: Any, passes: Any) -> Any:
        if passes:
            raise ValueError("a defect")
        return whole(items, passes)

    monkeypatch.setattr(engine.runner, "run", ran)
    result = run(engine, [asks("a", online(-1))])["a"]
    assert result.finish_reason == "error"
    assert not engine.store.entries


@pytest.mark.parametrize("times", [1, 2])
def test_an_audit_that_brings_the_engine_down_is_tried_once_more(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    fails(engine, "compare", monkeypatch, torch.OutOfMemoryError("out of memory"), times)
    engine.add(asks("a", online(-1)).asked)
    results: dict[str, Result] = {}
    for _ in range(50):
        try:
            results |= {event.id: event.result for event in engine.step() if event.result is not None}
        except torch.OutOfMemoryError as error:
            engine.recover(error)
        if not engine.busy:
            break
    assert results["a"].finish_reason == ("length" if times == 1 else "error")
    assert engine.stats.recoveries == times
    engine.check_integrity()


def test_batch_invariance_cannot_be_had() -> None:
    engine = Engine(MODELS["llada"], replace(make_engine(overlap=False).config, batch_invariant=True), "test")
    with pytest.raises(ConfigError, match="depth='online' cannot stand beside batch_invariant"):
        engine.check(asks("a", online()).asked)


def test_a_level_has_audits_of_its_own() -> None:
    engine = make_engine(prefix_match="longest")
    talk = prompt_of(30)
    turns = [Work(request(f"t{n}", [*talk[:n], *prompt_of(3, n)], n), online(-1)) for n in (10, 15)]
    results = served(engine, *turns)
    assert [result.usage.cached_tokens for result in results] == [0, 10]
    assert [len(entry) for entry in engine.store.entries] == [10]
    low = engine.store.entries[0].depths.describe()
    assert [info.ratio for info in low] == [35, 45]


def test_stops_and_ends_are_as_ever() -> None:
    engine = make_engine()
    item = asks("a", online(-1), ignore_eos=False, stop_token_ids=list(range(1, VOCAB, 2)))
    result = run(engine, [item])["a"]
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] % 2 or result.token_ids[-1] == EOS

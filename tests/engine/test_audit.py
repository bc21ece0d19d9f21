"""Audits: what they compare, what they leave alone, and the depths that requests then read."""

import argparse
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remask.checks.values import Share
from remask.cli.flags import value_parser
from remask.engine import audit_passes
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.observer import EngineObserver
from remask.engine.runner import PassResult
from remask.errors import ConfigError, IntegrityError
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies import earned as earning
from remask.policies.bicache import DepthLookup, Earned
from remask.policies.block import BlockDual
from remask.policies.dkv import DkvDecode
from remask.policies.dllm import DllmCache
from remask.policies.earned import Audit, Record
from remask.request.result import Result
from tests.engine.support import LAYERS, MODELS, Work, make_engine, outcome, prompt_of, request, run, served

PREFIX = 12


def asked(name: str, seed: int = 0, prefix: int = PREFIX, tail: int = 6, **sampling: Any) -> Any:
    """A request behind a prefix that all of one length and `seed` share."""
    sampling = {"max_tokens": 8, "block_length": 8, "steps": 4, **sampling}
    tokens = [*prompt_of(prefix, seed), *prompt_of(tail, hash_of(name))]
    return request(name, tokens, prefix, **sampling)


def hash_of(name: str) -> int:
    return sum(map(ord, name)) + 1000


class Kept(EngineObserver):
    """Log-probabilities of the predicted rows of every pass, in float64."""

    def __init__(self, engine: Engine) -> None:
        self.model = engine.model
        self.passes: list[np.ndarray[Any, Any]] = []
        engine.attach(self)

    def on_launch(self, ran: PassResult) -> None:
        with torch.inference_mode():
            self.passes.append(self.model.head(ran.hidden).double().log_softmax(-1).numpy())


def first_pass(policy: CachePolicy, item: Any) -> np.ndarray[Any, Any]:
    """What the first pass of a request predicts, through the engine and its store."""
    engine = make_engine(audit=0.0, overlap=False)
    kept = Kept(engine)
    run(engine, [Work(item, policy)])
    return next(found for found in kept.passes if len(found))


def kl(exact: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The divergence of the row that moves most, from its definition."""
    return float((np.exp(exact) * (exact - other)).sum(-1).max())


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One audit of one prefix proves a depth."""
    monkeypatch.setattr(earning, "PROOF", 2)
    monkeypatch.setattr(earning, "PREFIXES", 1)


def test_an_audit_finds_what_a_request_at_that_depth_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each depth: the divergence of an audit is that of first passes which read the store, from the engine."""
    item = asked("r")
    exact = first_pass(Dense(), item)
    engine = make_engine(audit=1.0)
    monkeypatch.setattr(Record, "audit_depths", lambda *_: tuple(range(1, LAYERS + 1)))
    run(engine, [Work(item, BiCache(depth=Earned()))])
    drain(engine)
    (record,) = engine.auditor.depths.records.values()
    seen = {audited.depth: audited.nats for audited in record.audits}
    assert sorted(seen) == [1, 2, 3, 4]
    for depth, nats in seen.items():
        policy = Reuse() if depth == LAYERS else BiCache(depth=depth)
        assert nats == pytest.approx(kl(exact, first_pass(policy, item)), rel=1e-4, abs=1e-6)
    assert max(seen.values()) > 0.01, "the model moves"


def drain(engine: Engine) -> None:
    """Run the audits that are left while no request runs, as a server does."""
    for _ in range(100):
        if not (engine.auditor.queue or engine.auditor.candidates):
            return
        engine.step()
    raise AssertionError("audits never end")


APPROXIMATE: list[CachePolicy] = [
    BiCache(depth=2),
    BiCache(depth=Earned(DepthLookup({0: 2}))),
    BiCache(BlockDual(), depth=1),
    BlockDual(),
    DkvDecode(),
    DllmCache(),
    Reuse(),
]


def mixed(count: int, policies: list[CachePolicy]) -> list[Work]:
    rng = random.Random(5)
    return [
        Work(asked(f"r{i}", seed=i % 2, block_length=rng.choice([4, 8])), policies[i % len(policies)], rng.randrange(9))
        for i in range(count)
    ]


def test_requests_are_answered_as_without_audits() -> None:
    """Tokens, traces and usage, and the store: the same. Memory is full of NaN, and nothing leaks."""
    work = mixed(14, APPROXIMATE)
    found: list[dict[str, Result]] = []
    stats = []
    for share in (0.0, 1.0):
        engine = make_engine(audit=share, audit_bound=2.0)  # so that no audit makes another depth of a request's
        found.append(run(engine, work))
        drain(engine)
        engine.check_integrity()
        stats.append((engine.store.stats, engine.stats.audits, engine.stats.failed_audits))
    assert {name: outcome(each) for name, each in found[0].items()} == {
        name: outcome(each) for name, each in found[1].items()
    }
    assert stats[0][0] == stats[1][0]
    assert (stats[0][1], stats[1][2]) == (0, 0)
    assert stats[1][1] > 10


def test_an_audit_of_a_step_compares_what_the_request_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a policy that approximates nothing it finds nothing; of one that does, it finds the difference."""
    monkeypatch.setattr(BlockDual, "traits", replace(BlockDual().traits, exact=False))
    engine = make_engine(audit=1.0)
    monkeypatch.setattr(BlockDual, "plan", lambda _, view: Dense().plan(view))
    run(engine, [Work(asked("r"), BlockDual())])
    drain(engine)
    assert engine.auditor.findings["block-dual"].estimate.mean == pytest.approx(0, abs=1e-9)
    monkeypatch.undo()
    other = make_engine(audit=1.0)
    run(other, [Work(asked(f"r{i}"), DkvDecode(None)) for i in range(6)])
    drain(other)
    assert other.auditor.findings["dkv-decode"].count == 6
    assert max(other.auditor.findings["dkv-decode"].recent) > 1e-4


@pytest.mark.usefixtures("at_once")
def test_a_depth_is_earned_and_reported() -> None:
    """With a bound that nothing exceeds all layers come to be read; with one below everything none is."""
    work = [Work(asked(f"r{i}"), BiCache(depth=Earned())) for i in range(12)]
    for bound, deepest in ((1e-9, 0), (2.0, LAYERS)):
        engine = make_engine(audit=1.0, audit_bound=bound)
        depths = [result.usage.prefix_depth for result in served(engine, *work)]
        assert depths[0] == 0
        assert max(depths) == depths[-1] == deepest
        again = make_engine(audit=0.0)
        result = served(engine, replace(work[-1], request=asked("again")))[0]
        (alone,) = served(again, Work(asked("again"), BiCache(depth=result.usage.prefix_depth)))
        assert outcome(alone) == outcome(result)


def test_without_audits_or_with_batch_invariance_no_depth_is_earned() -> None:
    for share, invariant in ((0.0, False), (1.0, True)):
        engine = make_engine(audit=share, batch_invariant=invariant)
        work = [Work(asked(f"r{i}"), BiCache(depth=Earned(DepthLookup({0: 3})))) for i in range(4)]
        assert [result.usage.prefix_depth for result in served(engine, *work)] == [3] * 4


@pytest.mark.usefixtures("at_once")
def test_an_audit_that_fails_ends_no_request_and_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(audit_passes, "_forward", failing)
    engine = make_engine(audit=1.0)
    (result,) = served(engine, Work(asked("r"), BiCache(depth=Earned())))
    drain(engine)
    assert (result.error, engine.stats.audits, engine.stats.failed_audits) == (None, 0, 1)
    assert not any(record.audits for record in engine.auditor.depths.records.values())
    monkeypatch.setattr(audit_passes, "_forward", lambda *_: (_ for _ in ()).throw(IntegrityError("pages are lost")))
    engine.add(asked("other").with_policy(BiCache(depth=Earned())))
    with pytest.raises(IntegrityError):
        run(engine, [])


def test_predictions_that_are_no_numbers_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(audit=1.0)
    monkeypatch.setattr(audit_passes, "divergence", lambda reference, *_: torch.full_like(reference[:, 0], math.nan))
    run(engine, [Work(asked("r"), BiCache(depth=Earned()))])
    drain(engine)
    assert (engine.stats.audits, engine.stats.failed_audits) == (0, 1)


def test_an_audit_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is evicted for it, and no request waits for it."""
    engine = make_engine(audit=1.0, max_num_seqs=2, max_model_len=26, store_budget_tokens=0)
    monkeypatch.setattr(engine.allocator, "allocate", lambda *_: None)
    run(engine, [Work(asked("r"), BlockDual())])
    drain(engine)
    assert (engine.auditor.skipped, engine.stats.audits) == (1, 0)


def test_a_step_runs_at_most_one_pass_of_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no request waits for longer than one."""
    counts: list[int] = []
    forward = audit_passes._forward

    def counted(*args: Any) -> torch.Tensor:
        counts.append(1)
        return forward(*args)

    monkeypatch.setattr(audit_passes, "_forward", counted)
    engine = make_engine(audit=1.0)
    for item in mixed(7, APPROXIMATE):
        engine.add(item.asked)
    while engine.busy or engine.auditor.queue or engine.auditor.candidates:
        before = len(counts)
        engine.step()
        assert len(counts) - before <= 1
    assert counts


def test_a_policy_beyond_the_bound_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(audit=1.0)
    for nats in [0.4] * 12:
        engine.auditor._record("block-dual", nats)
    told = [each.getMessage() for each in caplog.records]
    assert told == [
        "the cache block-dual moves predictions by 0.40 nats here (0.40 to 0.40 where they move most, 8 audits), "
        "which none would not"
    ]


def test_the_share_says_how_many_are_audited() -> None:
    engine = make_engine(audit=0.25)
    run(engine, [Work(asked(f"r{i}"), BlockDual()) for i in range(9)])
    drain(engine)
    assert engine.auditor.findings["block-dual"].count == 2


def test_the_usual_share_waits_for_work_of_which_it_is_two_percent() -> None:
    auditor = make_engine(audit=None).auditor
    layers = auditor.passes.model.config.layers
    auditor.stats.row_layers = 10**9  # of requests before, of which none could be audited
    assert not any(auditor._admit_audit("bicache", 100, 2) for _ in range(80))
    auditor.stats.row_layers += 100 * 2 * 50 * layers - 1
    assert not auditor._admit_audit("bicache", 100, 2)
    auditor.stats.row_layers += 1
    assert auditor._admit_audit("bicache", 100, 2)
    auditor.stats.row_layers *= 10
    assert [auditor._admit_audit("bicache", 100, 2) for _ in range(32)] == [False] * 31 + [True]


@pytest.mark.parametrize(
    ("share", "depth", "audited"),
    [(None, 0, [(2,)] * 5), (None, 1, []), (1.0, 0, [(2,)] * 5), (1.0, 1, [(1,), (1, 2), (1,), (1, 2), (1,)])],
)
def test_what_proves_a_depth_comes_on_top_of_the_share(
    monkeypatch: pytest.MonkeyPatch, share: float | None, depth: int, audited: list[tuple[int, ...]]
) -> None:
    """Nothing is saved before. Later the share decides, and each second audit also tries what may be read instead."""
    monkeypatch.setattr(Record, "audit_depths", lambda *_: (2,))
    monkeypatch.setattr(Record, "depth", lambda *_: depth)
    depths: list[tuple[int, ...]] = []
    monkeypatch.setattr(Record, "add", lambda _, audits: depths.append(tuple(audit.depth for audit in audits)))
    engine = make_engine(audit=share)
    results = served(engine, *(Work(asked(f"r{i}"), BiCache(depth=Earned())) for i in range(5)))
    drain(engine)
    assert results[-1].usage.prefix_depth == depth
    assert depths == audited


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"audit": 1.5}, "audit must be a number from 0 to 1, got 1.5"),
        ({"audit": -0.1}, "audit must be a number from 0 to 1, got -0.1"),
        ({"audit_bound": 0}, "audit_bound must be a number above 0, got 0"),
        ({"audit_bound": -1}, "audit_bound must be a number above 0, got -1"),
    ],
)
def test_bad_settings(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**limits)


def test_an_audit_is_of_its_request_alone() -> None:
    """Salts and adapters have prefixes of their own."""
    engine = make_engine(audit=1.0)
    one = asked("r")
    keys = {engine.store.key(one.prompt_token_ids[:PREFIX], each.salt) for each in (one, replace(one, cache_salt="b"))}
    assert len(keys) == 2
    assert MODELS["llada"].without_rounding() is MODELS["llada"]


def test_a_request_whose_first_steps_are_idle_is_audited_too() -> None:
    """By Dream's schedule the first step of as many as there are tokens transfers nothing, so it runs no pass."""
    engine = make_engine("dream", audit=1.0)
    results = served(engine, *(Work(asked(name, steps=8), BiCache(depth=Earned())) for name in "ab"))
    drain(engine)
    assert [result.trace[0].step for result in results] == [1, 1]
    assert (engine.stats.audits, engine.stats.failed_audits, engine.auditor.skipped) == (2, 0, 0)


def test_prefixes_without_audits_leave_nothing_behind() -> None:
    """A server sees prefixes without end, and audits few of them."""
    engine = make_engine(audit=1 / 64)
    record = engine.auditor.depths.record("", 80, 100)
    record.add([Audit(1, 2, 0.0)])
    for prefix in range(2, 500):
        assert record.depth(prefix, 0) == 0
    assert len(record._estimates) <= 2


@pytest.mark.parametrize("text", ["1/0", "half", "", "1/2/3"])
def test_a_share_that_is_none_is_told_what_is_allowed(text: str) -> None:
    share = value_parser(Share())
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a number from 0 to 1, as SHARE\|1/N\|off, got"):
        share(text)
    assert [share(word) for word in ("off", "1/64", "0.5")] == [0.0, 1 / 64, 0.5]
